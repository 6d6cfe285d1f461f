"""The weights of a checkpoint, plain or stored in a Format: which there are, where they lie, reading them by rows.

Weight        one matrix: a tensor of its own, one expert's part of a stack, or codes and scales
decoded_view  a checkpoint as what it stands for, and its quantized weights by the name they have there
Reader        gives rows of any Weight, a bounded piece at a time, decoded where they are codes
WeightTransform        what a calibration changes about a Weight before it is rounded: rows and columns multiplied, say

seen, weights = decoded_view(checkpoint)     # seen.tensors["model.layers.0.mlp.up_proj.weight"] is BF16
reader = Reader(seen.where, path, memory)
for bits in reader.rows(weights["model.layers.0.mlp.up_proj.weight"], multiple=128):
    ...                                      # [n, in], n a multiple of 128, about four megabytes
"""
