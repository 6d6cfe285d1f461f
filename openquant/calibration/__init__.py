"""What loses less than rounding each weight to its nearest code: what texts show of a model is put to use.

Places  where inputs of layers can be divided by factors; Part and `together` say what that makes of the weights
smooth  factors that spare INT8 the outliers among activations (SmoothQuant)
awq     factors that give inputs which count for most finer steps (AWQ)
unfold  the factors of an output, found again from it and its source
carried    columns rounded one after another, each with what earlier errors bring there (GPTQ); `round_layers` does
           so to the layers of a model as texts run through them

places = usable(plan)
found = smooth(places.foldings[0], plan, reader, calibration, 0.5)      # [2, 1, 1, 0.5, ..], or why there is none
"""
