"""The registry's data: one entry for each architecture, put together from parts.

architecture    the types: an Architecture says what to quantize, fuse and divide, and where engines differ;
                ModuleRules is what it says of each module, and ClassTensors which tensors a class has
parts           attention, gated_mlp, routed_experts, wrap...: parts of a decoder layer, with how engines fuse and
                divide them; smoothing rules; how vLLM builds embeddings
dense, experts, hybrid, multimodal    the entries, by kind

A router of experts stays bfloat16 by a `Keep` with the reason ROUTER (parts.routed_experts, or an entry's `keep`). What
is in architecture.NEVER_QUANTIZED stays even if the source has it quantized; plan/architecture.py applies both.

The entry of a model that resembles another is one line (docs/adding-an-architecture.md):

replace(ARCEE, name="ApertusForCausalLM")    # models.MODELS has it under that name
MODELS["ApertusForCausalLM"].compress        # (".self_attn.{q_proj,k_proj,v_proj,o_proj}", ".mlp.{up_proj,down_proj}")
"""
