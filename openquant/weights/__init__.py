"""The weights of a checkpoint, plain or quantized: which there are, where they lie, and how to read them by rows.

Weight           one matrix: a tensor of its own, one expert of a stack, or codes with their scales
decoded_view     a checkpoint as if it were unquantized, and its quantized weights by their unquantized names
Reader           yields the rows of any Weight in pieces of bounded size, decoded where they are codes
WeightTransform  what a calibration changes about a Weight before it is quantized, such as smoothing factors
Calibration      statistics of the inputs of each layer
ErrorSum         quantization error of a layer, summed over pieces

view, weights = decoded_view(checkpoint)     # view.tensors["model.layers.0.mlp.up_proj.weight"] is BF16
reader = Reader(view.where, path, memory)
for bits in reader.rows(weights["model.layers.0.mlp.up_proj.weight"], multiple=128):
    ...                                      # [n, in], n a multiple of 128, about four megabytes
"""
