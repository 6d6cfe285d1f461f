"""GGUF files as sources: a file is shown as a checkpoint in a Hugging Face directory, and its weights stay in it.

    opened = open_gguf(Path("SmolLM2-135M-Instruct.Q4_1.gguf"))
    opened.root                  # a temporary directory: config.json, tokenizer.json, and links to the file
    opened.checkpoint.tensors    # "model.embed_tokens.weight": BF16 [49152, 576], which a Reader decodes by rows

Modules:
    names           the tensors that a model of transformers has, and where a GGUF file has them; tokenizer files
    source          headers, config.json from metadata, and all of this for a file: `open_gguf`

Blocks are decoded by the types of formats/format.py. Names and decoders come from the package gguf, classes and
tokenizers from transformers.
"""
