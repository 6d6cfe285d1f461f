"""Diagnosis: before there is an output, what quantizing would do to the weights of each layer, and what loses less.

diagnose     measures every layer under every scheme, fused layers together
result       the errors of layers, what schemes and calibrations lose on a real model, and which of them to take

diagnosis = openquant.diagnose("Qwen/Qwen3-8B", "int4")
[choice.options for choice in diagnosis.choices]        # ["--scheme nvfp4 --gptq", "--scheme int4 --awq --gptq", ..]
"""
