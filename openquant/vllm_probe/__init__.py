"""What vLLM says of an architecture, and an entry made of that. No weight is read, no code of a repository is run.

probe    the script that an interpreter with vLLM runs: builds a class without memory, watches what asks for a
         quantization and where a checkpoint's rows go
Asked    what it said of a model: the layers that it builds, what is loaded into each; `ask` starts it, with bounds
Told     the same by the checkpoint's modules; `differences` to an entry that exists, a `draft` of one that does not
built    the entry of a class that has none, for `--architecture auto`; an error where it would be served wrongly
Deciding who decides, vLLM or names and shapes, and what an output keeps of it

(answer,) = ask([Question(config, shapes)], Path("/opt/vllm/bin/python"))
tell(answer, shapes)["model.layers.0.self_attn.q_proj"].joined     # ("...q_proj", "...k_proj", "...v_proj")
"""
