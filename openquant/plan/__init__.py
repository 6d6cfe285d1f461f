"""Every decision: what becomes of each tensor, where it will lie, what the config says. No tensor is read.

Options  what the user asks for beside the scheme
Fates    which weights are quantized and how, which stay and why, what moves together
Plan     what a run will do; `Plan.lay_out` gives a shard's header and the jobs that fill it
Job      matrices to be written, and what shares their scale; Copy is bytes that go over as they are

plan = make_plan(open_checkpoint(Path("Qwen3-8B")), find_scheme("tensor"))
plan.output_bytes                            # 9434513408, before anything is read
plan.lay_out("model-00001-of-00005.safetensors").jobs
"""
