"""The weights of a checkpoint, plain or quantized: which there are, where they lie, and how to read them by rows.

weight                    a Weight is one matrix: a tensor of its own, one expert of a stack, or codes with their
                          scales; what a calibration changes about it before it is quantized. Layouts of other tools:
                          codes in columns (AutoAWQ, GPTQ, Quark), codes of bitsandbytes, several projections in one
                          tensor
find                      which tensors are codes and which their scales; a checkpoint as if it were unquantized
reading                   a Reader yields the rows of any Weight in pieces of bounded size, decoded where they are
                          codes; and whether weights became zero as they were quantized
statistics                a calibration file: statistics of the inputs of each layer
quant_error               quantization error of a layer, summed over pieces

view, weights = decoded_view(checkpoint)     # view.tensors["model.layers.0.mlp.up_proj.weight"] is BF16
reader = Reader(view.where, path)
for bits in reader.rows(weights["model.layers.0.mlp.up_proj.weight"], multiple=128):
    ...                                      # [n, in], n a multiple of 128, about four megabytes
"""
