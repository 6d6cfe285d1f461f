"""The weights of a checkpoint, plain or stored in a Format: which there are, where they lie, reading them by rows.

Encoded  a weight that the source stores quantized: its codes, its scales, the shape it stands for
Layer    a weight that could be quantized: a tensor, one expert's part of a stack, or codes
Matrix   where its elements lie; Reader gives them a bounded piece at a time, decoded where they are codes

seen, encoded = decoded_view(checkpoint)     # quantized weights look like the bfloat16 tensors they stand for
for bits in reader.rows(layer.matrix(seen.where), multiple=128):
    ...                                      # [n, in], n a multiple of 128, about four megabytes
"""
