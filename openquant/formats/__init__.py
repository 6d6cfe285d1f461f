"""How a weight is stored: numbers, what shares a scale, names of tensors, and the config that says so.

Scheme        one way to store layers: "tensor", "channel", "block", "mxfp8", each with its facts of engines
Format        how the layers of a config's group are stored, whichever tool wrote them
Quantization  a `quantization_config`, read
kernels       weights to codes and back, with numpy

scheme = find_scheme("block")
scheme.outputs("model.layers.0.mlp.up_proj", (12288, 4096))
# TensorInfo("model.layers.0.mlp.up_proj.weight", "F8_E4M3", (12288, 4096)),
# TensorInfo("model.layers.0.mlp.up_proj.weight_scale_inv", "F32", (96, 32))
read_quantization(config).format_of("model.layers.0.mlp.up_proj").title   # "one scale per 128x128 block"
"""
