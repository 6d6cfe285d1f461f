"""What vLLM says of an architecture, and a registry entry made of that. No weight is read, no repository's code is run.

probe    the script that an interpreter with vLLM runs: builds a class without memory, records which layers ask for a
         quantization and where a checkpoint's rows go
client   starts the probe, with bounds; an EngineAnswer has the layers that vLLM builds, and what is loaded into each
modules  the same by the checkpoint's modules: which are fused, how ranks divide them, where experts lie
build    the entry of a class that has none, for `--architecture auto`; an error where it would be served wrongly
choose   who decides, vLLM or names and shapes, and what an output keeps of it

(answer,) = ask_engine([Question(config, shapes)], Path("/opt/vllm/bin/python"))
engine_modules(answer, shapes)["model.layers.0.self_attn.q_proj"].fused      # ("...q_proj", "...k_proj", "...v_proj")
"""
