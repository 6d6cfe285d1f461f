"""How a weight is stored: numbers, what shares a scale, names of tensors, and the config that says so.

Number        what codes stand for: E4M3, INT8, INT4, E2M1
Format        how one weight is stored, whichever tool wrote it: a Number, what shares a scale, names of tensors
Scheme        a Format that can be asked for ("tensor", "int8"), the config that says it, facts of engines
Quantization  a `quantization_config`, read
kernels       weights to codes and back, with numpy; reference the same in torch

scheme = find_scheme("block")
scheme.format.parts("model.layers.0.mlp.up_proj", (12288, 4096))
# TensorInfo("model.layers.0.mlp.up_proj.weight", "F8_E4M3", (12288, 4096)),
# TensorInfo("model.layers.0.mlp.up_proj.weight_scale_inv", "F32", (96, 32))
read_quantization(config).format_of("model.layers.0.mlp.up_proj").title   # "one scale per 128x128 block"
"""
