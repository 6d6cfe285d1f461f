"""Compress a model to FP8, check it, and say how to serve it.   python compress.py Qwen/Qwen3-8B Qwen3-8B-FP8"""

import sys

import openquant

model, output = sys.argv[1:3]
result = openquant.compress(model, output)
problems = openquant.verify(output, model, full=True).problems
print(*problems, sep="\n")
print(f"{result.source_bytes / 1e9:.1f} GB -> {result.output_bytes / 1e9:.1f} GB; vllm serve {output}")
