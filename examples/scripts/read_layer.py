"""Print the scheme of each quantized layer of an output.   python read_layer.py OUTPUT"""

import sys

import openquant

for layer in openquant.explain(sys.argv[1], "**", "keep").layers:
    if layer.scheme:
        print(f"{layer.scheme:14} {' '.join(layer.modules)}")
