"""Checks a quantized directory for consistency, against its source, and against what engines load.

The room is not called `verify`, because `openquant.verify` is the function.

    verify          all checks in order; returns a Report
    checks          all checks that read no tensor, in order: those of `weight_checks` and `headers`, of config.json and
                    files, and those at the end of a run. Headers is what they check, Findings what they report
    contents        reads tensors: NaN, equality with the source, recomputed codes and scales, the error of each layer

    report = verify("Qwen3-8B-FP8", "Qwen3-8B", full=True)
    report.problems                              # () if nothing is wrong
"""
