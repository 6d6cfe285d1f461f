"""Calibration: runs texts through a model, and uses what its layers do to quantize it with a smaller error.

run           calibrate(): runs texts and writes the input statistics of the layers to a file; what a run of compress()
              calibrates before the final plan, and GPTQ after it
observers     hooks that record absmax, mean magnitudes and mean squares of each layer's inputs, and absmax of keys and
              values
smoothing     smoothing mappings: a smooth_layer, and the balance_layers that read its outputs; scales that move
              outliers from INT8 activations into weights (SmoothQuant) or give important input channels finer steps
              (AWQ), and what scales change about weights and norms
gptq          rounds a weight column by column, and propagates errors to later columns (GPTQ); moves scales and codes
              afterwards to where errors of the outputs cancel (--tune)
gptq_pass     runs texts through a model, and rounds each layer by GPTQ with its Hessians, H = X'X over the tokens that
              go into it
sensitivity   weighs these tokens, and the outputs of layers, by gradients of the answers (--tune), which a second walk
              through the layers gives, last layer first

weights/weight.py applies the factors of SmoothQuant and AWQ to weights, where these are read. A pass of calibrate()
or of GPTQ that was interrupted continues from its pass checkpoint (streaming/pass_checkpoint.py).

[mapping, *_] = usable_mappings(plan).mappings
smoothquant_scale(mapping, reader, plan, calibration, 0.5)      # float32 [2, 1, 1, 0.5, ..], or why there is none
"""
