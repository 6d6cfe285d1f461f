"""The registry's data: one entry for each architecture, put together from parts.

entry    the types: Model is an entry, whose fields say what to quantize, join and divide, and where engines differ
parts    attention, gated, routed, wrapped...: pieces of a decoder layer, each with what engines join and divide of it
dense, fused, experts, latent, hybrid, mixed, multimodal    the entries, by kind
folds    where layers have their inputs from

An entry of a model that is like another is a line (docs/adding-an-architecture.md):

replace(ARCEE, name="ApertusForCausalLM")    # models.MODELS has it under that name
MODELS["ApertusForCausalLM"].compress        # (".self_attn.{q_proj,k_proj,v_proj,o_proj}", ".mlp.{up_proj,down_proj}")
"""
