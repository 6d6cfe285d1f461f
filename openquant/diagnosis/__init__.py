"""Diagnosis: what quantizing would do to each layer, from its weights alone, before there is an output.

diagnose     measures every layer under every scheme, fused layers together
statistics   the statistics of one layer, summed over pieces of it
suggestions  where another scheme halves a layer's error, and the options of compress that ask for it
result       the types of a diagnosis

diagnosis = openquant.diagnose("Qwen/Qwen3-8B")
[layer.flags for layer in diagnosis.layers if layer.module.endswith("0.mlp.down_proj")]       # [("outliers",), ..]
"""
