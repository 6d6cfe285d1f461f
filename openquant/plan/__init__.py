"""Every decision: what becomes of each tensor, where it is written, what config.json says. No tensor is read.

plan           make_plan(): from a checkpoint and a scheme to a Plan; the same for plans that dequantize, copy or keep
architecture   the registry's entry for a checkpoint, by which each tensor is a weight, stacked experts, or passed
               through; the tensor-parallel sizes that can serve the output
decisions      PlanOptions, and the Decision about each weight: its scheme, or why it is not quantized; the
               quantization_config, with modules as engines look them up; what AWQ, SmoothQuant and GPTQ add
layout         a Layout: a shard's header, the order and offsets of its tensors, the writes that fill it; the printed
               lines
assign         a scheme for each weight; fused layers get the same one. A LayerChoice says which layers get which
               scheme, EngineLimits what engines cannot load of them
engines        which engines load an output; what none can load stops the plan; notes for the user
serving        memory that GPUs need to serve source and output, or a checkpoint without a plan; the scales of an FP8 KV
               cache and of activations
completeness   what the source lacks, and what does not fit config.json, by what its class has
summary        the plan in figures; what becomes of one module and why

plan = make_plan(open_checkpoint(Path("Qwen3-8B")), find_scheme("tensor"))
plan.layout.shards[0].nbytes                 # bytes of the first output shard's tensors, before anything is read
plan.layout.lay_out("model-00001-of-00005.safetensors").writes
"""
