"""Results as text for a terminal, as the model card, and as an HTML page or picture.

plan_text          what a run will do: a line for each group of layers that are alike
model_card         README.md of an output
evaluation_text    table of an evaluation; diagnosis_text and explanation_text are the same for other verbs
PageContent        what an HTML page shows; pages.py makes one for each verb, render_page writes it
draw_picture       PNG of an evaluation, for a model card
escape             functions that make names and texts of others safe to print

print(plan_text(plan, "Qwen/Qwen3-8B", Path("Qwen3-8B-FP8"), download, notes=()))
"""
