"""Every decision: what becomes of each tensor, where it is written, what config.json says. No tensor is read.

plan              make_plan(): from a checkpoint and a scheme to a Plan
unchanged, plain  the same for plans that copy all weights, or dequantize them
architecture      the registry's entry for a checkpoint
sort              each tensor is a weight, stacked experts, or passed through
decisions         types: PlanOptions, and the Decision about each weight: its scheme, or why it is not quantized
assign            a scheme for each weight; fused layers get the same one
engines           which engines load an output; what none can load stops the plan
config            the output's config.json, and questions about it
ignore_list       the quantization_config, with modules as engines look them up: ignore list, targets of other schemes
tensor_parallel   the tensor-parallel sizes that can serve the output
layout            a shard's header, the order and offsets of its tensors, and the jobs that write it
kv_cache, input_scales, gptq, transforms    what a calibration adds to a plan
serving, as_stored    memory that GPUs need to serve source and output, or a checkpoint without a plan
notes             notes for the user
completeness      what the source lacks, and what does not fit config.json, by what its class has
printed, summary, explain    the plan as lines and figures; what becomes of one module and why

plan = make_plan(open_checkpoint(Path("Qwen3-8B")), find_scheme("tensor"))
plan.layout.shards[0].nbytes                 # bytes of the first output shard's tensors, before anything is read
plan.layout.lay_out("model-00001-of-00005.safetensors").jobs
"""
