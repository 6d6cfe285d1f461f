"""How far a model is from its source: its weights, and what it answers.

LayerError     how far one layer is from its source; ErrorSum adds it up piece by piece
Comparison     codes and scales held against the weights they were made from
diagnose       how far each scheme would take each layer, before there is an output
compare_outputs       source and outputs side by side: figures, verdict, suspects
DocumentRecord         how far two models' answers to one document are apart; summary says it in figures

error = ErrorSum()
error.add(weights, abs(decoded - weights))
error.of("model.layers.0.mlp.up_proj", (12288, 4096)).relative      # 0.0264
"""
