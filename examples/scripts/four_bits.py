"""Compress a model to four bits with GPTQ, on your texts.   python four_bits.py MODEL OUTPUT chats.jsonl"""

import sys

import openquant

model, output, *texts = sys.argv[1:]
result = openquant.compress(model, output, "int4", gptq=True, text=texts, samples=32, length=256)
print(f"{result.output_bytes / 1e9:.2f} GB in {output}, loaded by {' and '.join(result.engines)}")
