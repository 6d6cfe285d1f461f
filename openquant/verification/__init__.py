"""A directory held against itself, its source, and what engines would make of it.

Called so, and not `verify`, since `openquant.verify` is the function.

    verify    all checks in order, and their Report
    Headers   what the headers hold: quantized weights and their scales; no tensor is read
    checks    names, shapes, dtypes and config held against each other and the registry: weight_checks, config_checks,
              cache_checks, module_checks
    contents  tensors read: codes and scales made again, equality, the error of each layer
    configs   two config.json held against each other; extras looks for files that nobody expects
    finished  what a run checks of all it has written, and a push of what it publishes

    report = verify("Qwen3-8B-FP8", "Qwen3-8B", full=True)
    report.problems                              # () if nothing is off
"""
