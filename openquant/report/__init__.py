"""Results as text for a terminal, as the model card, and as an HTML page or picture.

text          what verbs print: plan, weights, summary of a run, and what verify, eval, diagnose and explain found;
              `fit` for its table
card          README.md of an output (card.jinja, evaluation.jinja), with a link to the source's card, or its text
html, charts  an HTML page of evaluations or of a search; its charts, and pictures of one or several outputs
cells         what cells of tables say; names and texts of others made safe to print

print(plan_text(plan, "Qwen/Qwen3-8B", Path("Qwen3-8B-FP8"), download))
"""
