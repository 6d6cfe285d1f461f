"""What people and programs read of a run: plan and summary for a terminal, the model card, the Result, the report.

Result     what a run did, as callers and `--json` get it
Reporter   who is told of a run while it works
plan_text  what a run will do, a line for each group of layers
model_card README.md of an output
ReportPage       what a report shows; pages make one for each verb, html writes it, charts and figure draw

print(plan_text(plan, "Qwen/Qwen3-8B", Path("Qwen3-8B-FP8"), download, notes=()))
"""
