"""Every decision: what becomes of each tensor, where it will lie, what the config says. No tensor is read.

Entry    what the registry says of an architecture; `Entry.role` of a module, asked once for all that are named alike
Fates    the tensors by shard, and the Fate of each weight that could be quantized: its scheme, and why
Plan     what a run will do; sizes, counts, titles and the printed lines (Line) follow from the fates
Job      Copy, CopyRounded, CopyScale, Put, Unstack, Fold, Decode or Encode: what fills a shard, by `Plan.lay_out`

make_plan goes through sort (each tensor is kept, a weight or a stack of them), settle (schemes, and what moves
together), names (as engines look modules up) and parallel (the sizes that can serve it).

plan = make_plan(open_checkpoint(Path("Qwen3-8B")), find_scheme("tensor"))
plan.output_bytes                            # 9434513408, before anything is read
plan.lay_out("model-00001-of-00005.safetensors").jobs
"""
