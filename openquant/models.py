"""The registry: the entry of each architecture (registry/), by its class in config.json."""

from __future__ import annotations

from dataclasses import replace

from .registry import dense, experts, fused, hybrid, latent, mixed, multimodal
from .registry.architecture import Architecture, FusedLayers
from .registry.embeddings import EMBEDDINGS
from .registry.parts import ATTENTION, GATE_UP_TENSOR, IGNORED_CACHE_SCALES, MLP, LayerPart, gated, model, routed

MODELS: dict[str, Architecture] = {
    entry.name: replace(
        entry,
        embedding=EMBEDDINGS.get(entry.name),
        sglang=replace(entry.sglang, ignores_cache_scales=entry.name in IGNORED_CACHE_SCALES),
    )
    for kind in (dense, fused, experts, latent, hybrid, mixed, multimodal)
    for entry in kind.ENTRIES
}

_MODELS = (
    *("model", "language_model.model", "model.language_model", "model.text_model", "thinker.model"),
    *("llm.model", "text_model.model"),
    *("model.decoder", "language_model.model.decoder", "transformer", "backbone", "gpt_neox"),
)
_EXPERTS = "{mlp,block_sparse_moe,feed_forward}.experts"
GENERIC = model(
    "generic",
    ATTENTION,
    LayerPart(
        (".{self_attn,attn,attention,self_attention}.{qkv_proj,out_proj,query_key_value,dense,wq,wk,wv,wo}",),
        fused=(FusedLayers(".{attn,attention}.{wq,wk,wv}"), FusedLayers(".{attn,attention}.{q,k,v}_proj")),
    ),
    LayerPart((".{attn,attention}.{q,k,v,o}_proj",)),
    MLP,
    GATE_UP_TENSOR,
    gated(".feed_forward"),
    gated(".{mlp,feed_forward}", "w1", "w3", "w2"),
    LayerPart((".mlp.{fc1,fc2,fc_in,fc_out,dense_h_to_4h,dense_4h_to_h}",)),
    gated(".{mlp,block_sparse_moe,feed_forward}.{shared_expert,shared_experts,shared_mlp}"),
    replace(routed(f".{_EXPERTS}"), keep=()),
    replace(routed(f".{_EXPERTS}", "w1", "w3", "w2"), keep=(), experts=()),
    layers=f"{{{','.join(_MODELS)}}}.{{layers,h,blocks}}.*",
    text_config="text_config",
    draft_layers="num_hidden_layers",
    rest="not known to be a projection of attention or MLP",
    decided="decided from names and shapes alone: look at the plan, and at what the engine makes of it",
)
"""For classes without an entry, if the user asks for it: projections with usual names are quantized, nothing else."""
