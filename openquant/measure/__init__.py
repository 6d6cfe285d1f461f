"""How far quantized weights are from those they were made from.

LayerError  how far one layer is from its source; ErrorSum adds it up piece by piece
Comparison  codes and scales held against the weights they were made from

error = ErrorSum()
error.add(weights, abs(decoded - weights))
error.of("model.layers.0.mlp.up_proj", (12288, 4096)).relative      # 0.0264
"""
