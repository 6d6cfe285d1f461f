"""How a weight is stored: numeric format, what shares a scale, names of its tensors, and the config that says so.

numbers                a Number is a numeric format, the values that codes stand for: E4M3, INT8, INT4, E2M1
format                 a Format is how one weight is stored, whichever tool wrote it: a Number, what shares a scale,
                       tensor names
schemes, names         a Scheme is a Format that the user can ask for ("tensor", "int8"), its config, what engines do
                       with it, and the clip ratios that its search tries
scales                 chooses the scale and zero point of each group of weights, by a search where the scheme has one
kernels                weights to codes and back, with numpy; `compiled` does the same with numba, `reference` with
                       torch
quantization           reads a `quantization_config`, whichever tool wrote it; `awq_gptq`, `quark`, `bitsandbytes` and
                       `torchao` those of these tools
ignored, settings      ignore lists that are read, matched as engines match them; values in a config that nothing
                       reads
activations            how a config quantizes activations
hardware               on which GPUs and CPUs engines compute each scheme, and in which numbers; GPUs by name
kv_cache               how a config asks for an FP8 KV cache, and names of its scales; computes them
finite                 NaN and infinity in the bytes of a tensor

scheme = find_scheme("block")
scheme.format.parts("model.layers.0.mlp.up_proj", (12288, 4096))
# TensorInfo("model.layers.0.mlp.up_proj.weight", "F8_E4M3", (12288, 4096)),
# TensorInfo("model.layers.0.mlp.up_proj.weight_scale_inv", "F32", (96, 32))
read_quantization(config).format_of("model.layers.0.mlp.up_proj").title   # "one scale per 128x128 block"
"""
