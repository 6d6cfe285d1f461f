"""Every decision: what becomes of each tensor, where it will lie, what the config says. No tensor is read.

plan              make_plan(): from a checkpoint and a scheme to a Plan
sort              each tensor is a weight, a stack of experts' weights, or passed through unchanged
decisions         the Decision about each weight: its scheme, or why it stays unquantized
assign            schemes assigned to weights; layers that an engine fuses get the same one
ignore_list       modules as engines look them up: the ignore list, and layers with another scheme
tensor_parallel   the tensor-parallel sizes that can serve the result
layout            a shard's header and offsets, and the jobs that fill it
kv_cache, input_scales, gptq, transforms    what a calibration brings into a plan
serving           memory that GPUs need to serve source and output
printed, explain  the plan as lines, and what becomes of one module and why

plan = make_plan(open_checkpoint(Path("Qwen3-8B")), find_scheme("tensor"))
plan.output_bytes                            # 9434513408, before anything is read
plan.lay_out("model-00001-of-00005.safetensors").jobs
"""
