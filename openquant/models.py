"""The registry: what is known of each architecture, as data.

Patterns (see patterns.py) name modules as the checkpoint names them, that is tensor names without
`.weight`. One that begins with a dot continues the entry's `layers` pattern, which matches one decoder
layer. Every tensor of two or more axes must match exactly one of compress, experts or keep; all others
are copied. Facts about an engine name the version and file they were read from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Keep:
    """Modules that stay as they are.

    Attributes:
        pattern: which modules.
        why: the reason, as the plan prints it.
    """

    pattern: str
    why: str


@dataclass(frozen=True)
class Joined:
    """Modules that an engine merges into one layer; they share status and, per tensor, one scale.

    Attributes:
        pattern: the members; modules whose `*` parts are equal belong together.
        listed_as: last segment of the engine's own name for the merged layer, listed beside its members where
            the engine does not derive it from them; None where it does.
    """

    pattern: str
    listed_as: str | None = None


@dataclass(frozen=True)
class Stacked:
    """One tensor [E, ...] that holds a projection of all experts of a layer.

    Attributes:
        name: its name below the experts' module.
        parts: the projections side by side in it, as they are named once split.
        transposed: each expert's slice is [in, out] (parts side by side along out) instead of [out, in].
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool


@dataclass(frozen=True)
class Experts:
    """The routed experts of a layer. All of a layer's experts share status.

    Attributes:
        path: the module that holds one layer's experts.
        stacked: tensors to be split into `<path>.<expert>.<part>.weight`, a 2-D [out, in] tensor each.
    """

    path: str
    stacked: tuple[Stacked, ...] = ()


@dataclass(frozen=True)
class Split:
    """How tensor parallelism divides modules.

    Attributes:
        pattern: which modules.
        axis: "out" (column parallel) or "in" (row parallel).
        heads: config key that counts the heads along that axis; None where any division goes.
        replicated: heads are copied where there are fewer than ranks (key and value heads).
    """

    pattern: str
    axis: str
    heads: str | None = None
    replicated: bool = False


@dataclass(frozen=True)
class Model:
    """One architecture.

    Attributes:
        name: the class in config.json's `architectures`.
        layers: pattern of one decoder layer.
        compress: modules to quantize.
        keep: modules to copy, with reasons.
        joined: sets that engines merge.
        experts: routed experts.
        splits: tensor parallelism.
        text_config: config.json key under which the language model's sizes are; None for the top level.
        spellings: groups of equivalent prefixes. A listed module whose name begins with one prefix of a group
            is listed under the others too, because engines build the module under another of these names.
        transformers_reads_blocks: whether transformers loads a 128x128 block output of this architecture.
        reordered: modules whose rows an engine puts in another order as it loads them.
    """

    name: str
    layers: str
    compress: tuple[str, ...]
    keep: tuple[Keep, ...]
    joined: tuple[Joined, ...]
    splits: tuple[Split, ...]
    experts: tuple[Experts, ...] = ()
    text_config: str | None = None
    spellings: tuple[tuple[str, ...], ...] = ()
    transformers_reads_blocks: bool = True
    reordered: tuple[str, ...] = ()


EMBEDDING = Keep("model.embed_tokens", "embedding")
HEAD = Keep("lm_head", "output head")

ATTENTION = ".self_attn.{q,k,v,o}_proj"
MLP = ".mlp.{gate,up,down}_proj"

QKV = Joined(".self_attn.{q,k,v}_proj")
GATE_UP = Joined(".mlp.{gate,up}_proj")

ATTENTION_SPLITS = (
    Split(".self_attn.q_proj", "out", "num_attention_heads"),
    Split(".self_attn.{k,v}_proj", "out", "num_key_value_heads", replicated=True),
    Split(".self_attn.o_proj", "in", "num_attention_heads"),
)
MLP_SPLITS = (Split(".mlp.{gate,up}_proj", "out"), Split(".mlp.down_proj", "in"))

LLAMA = Model(
    "LlamaForCausalLM",
    layers="model.layers.*",
    compress=(ATTENTION, MLP),
    keep=(EMBEDDING, HEAD),
    joined=(QKV, GATE_UP),
    splits=(*ATTENTION_SPLITS, *MLP_SPLITS),
)

QWEN3_MOE = Model(
    "Qwen3MoeForCausalLM",
    layers="model.layers.*",
    compress=(ATTENTION, MLP, ".mlp.experts.*.{gate,up,down}_proj"),
    # vLLM 0.32.0 models/qwen3_moe.py:170 builds the router with quant_config.
    keep=(EMBEDDING, HEAD, Keep(".mlp.gate", "router")),
    joined=(
        QKV,
        # qwen3_moe.py:575 means to map gate_up_proj to its members where mlp_only_layers is not empty; the
        # built engine's quant_config has no such entry either way.
        Joined(".mlp.{gate,up}_proj", listed_as="gate_up_proj"),
        Joined(".mlp.experts.*.{gate,up}_proj"),
    ),
    experts=(Experts(".mlp.experts"),),
    splits=(
        *ATTENTION_SPLITS,
        *MLP_SPLITS,
        Split(".mlp.experts.*.{gate,up}_proj", "out"),
        Split(".mlp.experts.*.down_proj", "in"),
    ),
)

# The Hub's files say language_model.model., transformers 4.52 and later model.language_model.
GEMMA3_WRAPPED = Model(
    "Gemma3ForConditionalGeneration",
    layers="{language_model.model,model.language_model}.layers.*",
    compress=(ATTENTION, MLP),
    keep=(
        Keep("{language_model.model,model.language_model}.embed_tokens", "embedding"),
        Keep("{lm_head,language_model.lm_head}", "output head"),
        Keep("{vision_tower,model.vision_tower}.**", "vision tower"),
        Keep("{multi_modal_projector,model.multi_modal_projector}.**", "projector"),
    ),
    joined=(QKV, GATE_UP),
    splits=(*ATTENTION_SPLITS, *MLP_SPLITS),
    text_config="text_config",
    # vLLM 0.32.0 models/gemma3_mm.py builds the tower with quant_config as vision_tower.vision_model.encoder,
    # models/siglip.py; transformers 5 leaves vision_model out.
    spellings=(
        ("language_model.model.", "model.language_model."),
        (
            "vision_tower.vision_model.",
            "vision_tower.",
            "model.vision_tower.vision_model.",
            "model.vision_tower.",
        ),
    ),
)

LLAMA4_MLP = ".feed_forward.{gate,up,down}_proj"
LLAMA4_SHARED = ".feed_forward.shared_expert.{gate,up,down}_proj"

LLAMA4 = Model(
    "Llama4ForCausalLM",
    layers="model.layers.*",
    compress=(ATTENTION, LLAMA4_MLP, LLAMA4_SHARED, ".feed_forward.experts.*.{gate,up,down}_proj"),
    keep=(EMBEDDING, HEAD, Keep(".feed_forward.router", "router")),
    joined=(
        QKV,
        Joined(".feed_forward.{gate,up}_proj"),
        Joined(".feed_forward.shared_expert.{gate,up}_proj"),
        Joined(".feed_forward.experts.*.{gate,up}_proj"),
    ),
    # [E, H, 2I] and [E, I, H] (vLLM 0.32.0 models/llama4.py:398). A checkpoint may not mix stacked and split
    # experts (llama4.py:583), so they are split wherever they appear.
    experts=(
        Experts(
            ".feed_forward.experts",
            stacked=(
                Stacked("gate_up_proj", ("gate_proj", "up_proj"), transposed=True),
                Stacked("down_proj", ("down_proj",), transposed=True),
            ),
        ),
    ),
    splits=(
        *ATTENTION_SPLITS,
        Split(".feed_forward.{gate,up}_proj", "out"),
        Split(".feed_forward.down_proj", "in"),
        Split(".feed_forward.shared_expert.{gate,up}_proj", "out"),
        Split(".feed_forward.shared_expert.down_proj", "in"),
        Split(".feed_forward.experts.*.{gate,up}_proj", "out"),
        Split(".feed_forward.experts.*.down_proj", "in"),
    ),
    # transformers 5.19 finds no split experts and initialises new ones.
    transformers_reads_blocks=False,
    # vLLM 0.32.0 models/llama4.py:805-844, for its rotary embedding.
    reordered=(".self_attn.{q,k}_proj",),
)

LLAMA4_WRAPPED = replace(
    LLAMA4,
    name="Llama4ForConditionalGeneration",
    # vLLM 0.32.0 models/mllama4.py has no name mapper: it loads these names only, and looks them up as they are.
    layers="language_model.model.layers.*",
    keep=(
        Keep("language_model.model.embed_tokens", "embedding"),
        Keep("language_model.lm_head", "output head"),
        Keep(".feed_forward.router", "router"),
        Keep("vision_model.**", "vision tower"),
        Keep("multi_modal_projector.**", "projector"),
    ),
    text_config="text_config",
)

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        LLAMA,
        replace(LLAMA, name="MistralForCausalLM"),
        replace(LLAMA, name="Qwen3ForCausalLM"),
        QWEN3_MOE,
        replace(LLAMA, name="Gemma3ForCausalLM"),
        GEMMA3_WRAPPED,
        LLAMA4,
        LLAMA4_WRAPPED,
    )
}
