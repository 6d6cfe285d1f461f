"""Results as text for a terminal, as the model card, and as an HTML page or picture.

text                 plan and summary of a run, and what verify found; `evaluation`, `diagnosis`, `explained` and `fit`
                     for those verbs
card, source_card    README.md of an output; the text of the source's card in it
html, charts         an HTML page of evaluations or of a search, and its charts
comparison           the picture of several outputs: size against KL
recovery             the pictures of tasks: recovery of each output and each task
words                what the words on a page mean
figure               PNG of one evaluation or of several, for a model card
cells, weights       what cells of tables say; the table of a plan's weights
escape               makes names and texts of others safe to print

print(plan_text(plan, "Qwen/Qwen3-8B", Path("Qwen3-8B-FP8"), download, notes=()))
"""
