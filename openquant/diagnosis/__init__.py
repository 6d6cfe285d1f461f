"""What quantizing does to each layer, from its weights alone: before there is an output.

diagnose_layers     figures of every layer under every scheme, layers of one decoder layer measured together
statistics   the figures of one layer, summed over pieces of it
suggestions  where another scheme halves a layer's error, and the options that ask for it
result       the types of what is found

found = openquant.diagnose("Qwen/Qwen3-8B")
found.layers["model.layers.0.mlp.down_proj"].flags       # ("outliers",)
"""
