"""How a weight is stored: numeric format, what shares a scale, names of its tensors, and the config that says so.

Number        a numeric format, the values that codes stand for: E4M3, INT8, INT4, E2M1
Format        how one weight is stored, whichever tool wrote it: a Number, what shares a scale, names of its tensors
Scheme        a Format that the user can ask for ("tensor", "int8"), its config, and what engines do with it
Quantization  a `quantization_config` that was read
kernels       weights to codes and back, with numpy; `compiled` does the same with numba, `reference` with torch
scales        the scale and zero point of each group of weights

scheme = find_scheme("block")
scheme.format.parts("model.layers.0.mlp.up_proj", (12288, 4096))
# TensorInfo("model.layers.0.mlp.up_proj.weight", "F8_E4M3", (12288, 4096)),
# TensorInfo("model.layers.0.mlp.up_proj.weight_scale_inv", "F32", (96, 32))
read_quantization(config).format_of("model.layers.0.mlp.up_proj").title   # "one scale per 128x128 block"
"""
