"""Reads texts, and turns them into tokens with the model's own tokenizer and chat template.

domains    where texts come from: files, datasets, our own in texts/; prompts that a model continues
corpus     texts as documents of equally many tokens; those for evaluation and for calibration never overlap
tasks      questions of tasks, from files of one's own or made and scored by lm-eval
tokenizer  a checkpoint's tokenizer; chat templates that came with it, rendered in jinja's sandbox

load_tokenizer(Path("Qwen3-8B")).encode("Some text")      # [8373, 1467]
"""
