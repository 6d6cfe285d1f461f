"""How a weight is stored: numeric format, what shares a scale, names of its tensors, and the config that says so.

numbers        a Number is a numeric format, the values that codes stand for: E4M3, INT8, INT4, E2M1; NaN and infinity
               in bytes; how a config asks for an FP8 KV cache, and names of its scales
format         a Format is how one weight is stored, whichever tool wrote it: a Number, what shares a scale, tensor
               names; how activations are quantized; the types of GGUF
schemes        a Scheme is a Format that the user can ask for ("tensor", "int8"), its config, what engines do with it,
               and the clip ratios that its search tries
kernels        the scales and zero points of weights, weights to codes and back, with numpy; `compiled` does the same
               with numba, `reference` with torch; `on_gpu` has GPTQ's loop with Triton
quantization   reads a `quantization_config`, whichever tool wrote it; `awq_gptq` those of AutoAWQ, GPTQ, auto-round and
               Quark
hardware       on which GPUs and CPUs engines compute each scheme, and in which numbers; GPUs by name; names of schemes

scheme = find_scheme("block")
scheme.format.parts("model.layers.0.mlp.up_proj", (12288, 4096))
# TensorInfo("model.layers.0.mlp.up_proj.weight", "F8_E4M3", (12288, 4096)),
# TensorInfo("model.layers.0.mlp.up_proj.weight_scale_inv", "F32", (96, 32))
read_quantization(config).format_of("model.layers.0.mlp.up_proj").title   # "one scale per 128x128 block"
"""
