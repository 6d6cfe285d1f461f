"""Calibration: texts run through a model, and what is found makes a quantized model lose less.

run           calibrate(): texts run through a model; input statistics of its layers are written to a file
observers     hooks that record the largest magnitude and mean square of each input channel, and of keys and values
mappings      where inputs can be scaled: a smooth_layer that makes them, and the balance_layers that read them
smoothing     what scaling these inputs changes about each weight
smoothquant   scales that move outliers from INT8 activations into weights (SmoothQuant)
awq           scales that give important input channels finer steps (AWQ)
hessian       Hessians of layers, H = X'X over the tokens that a layer sees
gptq          weights rounded column by column, errors propagated to the columns that follow (GPTQ)
gptq_pass     GPTQ for each layer of a model as texts run through it; gptq_run does that for a run of compress()
prepare       what a run of compress() calibrates, and what that changes about its weights

places = usable_mappings(plan)
smoothquant_scale(places.mappings[0], plan, reader, calibration, 0.5)      # [2, 1, 1, 0.5, ..], or why there is none
"""
