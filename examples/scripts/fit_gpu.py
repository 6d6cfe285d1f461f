"""Compress a model as little as a GPU needs.   python fit_gpu.py Qwen/Qwen3-32B 4090 Qwen3-32B-4090"""

import sys

import openquant

model, gpu, output = sys.argv[1:4]
table = openquant.fit_table(model, gpu)
if table.source_fits:
    raise SystemExit(f"{model} fits {gpu} as it is")
if table.uncalibrated is None:
    raise SystemExit(f"no scheme makes {model} fit {gpu}")
print(openquant.compress(model, output, table.uncalibrated).output)
