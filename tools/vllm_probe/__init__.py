"""Ask vLLM how it builds an architecture, and make a registry entry of the answer (tools/draft_entry.py).

No weight is read, and no code of a repository is run.

probe    the script that an interpreter with vLLM runs: builds a class without memory, records which layers ask for a
         quantization method and into which rows tensors are loaded
client   runs the probe with limits; an EngineAnswer has the layers that vLLM builds and what is loaded into each
modules  the answer by modules of the checkpoint: which are fused, how ranks divide them, where experts are

(answer,) = ask_engine([Question(config, shapes)], Path("/opt/vllm/bin/python"))
engine_modules(answer, shapes)["model.layers.0.self_attn.q_proj"].fused      # ("...q_proj", "...k_proj", "...v_proj")
"""
