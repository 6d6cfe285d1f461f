"""Texts as a model takes them: tokens of its own tokenizer, conversations in the words of its own chat template.

Corpus     texts as Documents of equally many tokens, apart for evaluation and calibration
Prompt     what a model is to continue
Tokenizer  a checkpoint's; `tokenizer.load` tries it in a process of its own before
sandbox    runs what came with a checkpoint, its chat template and its tokenizer, in a process with limits

tokenizer.load(Path("Qwen3-8B")).encode("Some text")      # [8373, 1467]
"""
