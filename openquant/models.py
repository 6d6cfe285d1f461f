"""The registry: what is known of each architecture, as data.

Patterns (see patterns.py) name modules as the checkpoint names them, that is tensor names without
`.weight`. One that begins with a dot continues the entry's `layers` pattern, which matches one decoder
layer. Every tensor of two or more axes must match exactly one of compress, experts or keep; all others
are copied. Facts about an engine name the version and file they were read from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Keep:
    """Modules that stay as they are.

    Attributes:
        pattern: which modules.
        why: the reason, as the plan prints it.
        divided: whether tensor-parallel ranks have a part of it each, rather than all of it.
    """

    pattern: str
    why: str
    divided: bool = False


@dataclass(frozen=True)
class Joined:
    """Modules that an engine merges into one layer; they share status and, per tensor, one scale.

    Attributes:
        pattern: the members; modules whose `*` parts are equal belong together.
        listed_as: last segment of vLLM's own name for the merged layer, listed beside its members where vLLM does
            not derive it from them; None where it does.
        sglang: the same of SGLang, which derives it for few architectures.
    """

    pattern: str
    listed_as: str | None = None
    sglang: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The engines' names for the merged layer."""
        return tuple(dict.fromkeys(filter(None, (self.listed_as, self.sglang))))


@dataclass(frozen=True)
class Stacked:
    """One tensor [E, ...] that holds a projection of all experts of a layer.

    Attributes:
        name: its name below the experts' module, or beside it.
        parts: the projections side by side in it, as they are named once split.
        transposed: each expert's slice is [in, out] (parts side by side along out) instead of [out, in].
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Experts:
    """The routed experts of a layer. All of a layer's experts share status.

    Attributes:
        path: the module that holds one layer's experts.
        stacked: tensors to be split into `<path>.<expert>.<part>.weight`, a 2-D [out, in] tensor each.
        beside: the stacked tensors lie beside the experts' module, not below it.
    """

    path: str
    stacked: tuple[Stacked, ...] = ()
    beside: bool = False

    @property
    def place(self) -> str:
        """The module that holds the stacked tensors."""
        return self.path.rsplit(".", 1)[0] if self.beside else self.path


@dataclass(frozen=True)
class Split:
    """How tensor parallelism divides modules.

    Attributes:
        pattern: which modules.
        axis: "out" (column parallel) or "in" (row parallel).
        heads: config key that counts the heads along that axis; None where any division goes.
        replicated: heads are copied where there are fewer than ranks (key and value heads).
        parts: of a tensor that holds several layers one below the other, each of which is divided: the config
            key that the rows of each are in proportion to, or None where all are equal.
    """

    pattern: str
    axis: str
    heads: str | None = None
    replicated: bool = False
    parts: tuple[str | None, ...] = ()


@dataclass(frozen=True)
class Cached:
    """Projections of which an engine keeps, for each token of a sequence, what they make of it.

    Attributes:
        pattern: which modules; the numbers kept of a token are as many as they have rows.
        heads: config key that counts the heads those rows divide into; None if every rank keeps all of them.
        fp8: bytes of a token in an FP8 cache; None for one byte a number.
        bf16: bytes of a token in a bfloat16 cache; None for two bytes a number.
        full_heads: config key that counts the heads of layers that attend to everything, where that is another.
        keys_as_values: config key that says that layers without a projection of values make them of their keys.
    """

    pattern: str
    heads: str | None
    fp8: int | None = None
    bf16: int | None = None
    full_heads: str | None = None
    keys_as_values: str | None = None


@dataclass(frozen=True)
class State:
    """What an engine keeps of a sequence, however long it is: the last inputs of a convolution, and a recurrent state.

    Attributes:
        pattern: the convolutions, weights [channels, 1, width], of which the last width - 1 inputs are kept.
        sizes: config keys whose product is the size of the recurrent state; empty if there is none.
        dtype: config key that names its dtype.
        usual: its dtype where config.json says nothing.
    """

    pattern: str
    sizes: tuple[str, ...] = ()
    dtype: str | None = None
    usual: str = "bfloat16"


@dataclass(frozen=True)
class Fold:
    """Where layers have their inputs from. Each can be divided there, and the columns of all that read it multiplied by
    as much, and the model computes what it did.

    Attributes:
        source: what makes them: a norm, or a projection with a row for each. It goes with readers whose `*` parts begin
            with its own.
        readers: all that reads them, routers too.
        offset: what a model adds to a norm's weight before it multiplies by it.
        heads: config key that counts the heads of a projection whose outputs several heads of readers read each.
        last: whether they are of the last only of what a projection holds (Split.parts).
    """

    source: str
    readers: tuple[str, ...]
    offset: float = 0.0
    heads: str | None = None
    last: bool = False


@dataclass(frozen=True)
class Windows:
    """Which decoder layers attend to a window of the last tokens only, where config.json has no `layer_types`.

    As transformers 5.23 has it, whose configurations engines read; all of them, unless something here says otherwise.

    Attributes:
        every: every so manieth layer attends to everything; None if none does.
        key: config key that says another number, or a pattern such as "LLLG".
        first: whether that is the first of so many rather than the last.
        flags: config key that lists, layer by layer, 1 for a window and 0 for everything.
        size: config key of the window's tokens.
        asked: config key without which there is no window at all.
    """

    every: int | None = None
    key: str | None = None
    first: bool = False
    flags: str | None = None
    size: str = "sliding_window"
    asked: str | None = None


@dataclass(frozen=True)
class Refusal:
    """What engines cannot load an architecture in.

    Attributes:
        scheme: name of the scheme; None for all.
        format: its serialization; None for both.
        why: the reason, as the error says it.
        hint: what to do instead.
    """

    scheme: str | None
    format: str | None
    why: str
    hint: str


SGLANG = "SGLang 0.5.23"


@dataclass(frozen=True)
class SGLang:
    """What SGLang does not load of an architecture, though vLLM does.

    Attributes:
        refused: schemes and formats.
        plain: modules that it builds in bfloat16, whatever is stored.
        unpacked: modules of which it takes no codes that share a byte or a word.
        head: why it loads no quantized output head; None if it does.
        alike: the formats in which it finds no layer by its name, so that all must be stored alike.
        cache: why it fails on scales of keys and values; None if it loads them, or takes 1 in their place.
        cache_of_ones: whether it does so only where they are not 1.
        ones: whether it takes 1 in their place without a word.
    """

    refused: tuple[Refusal, ...] = ()
    plain: tuple[str, ...] = ()
    unpacked: tuple[str, ...] = ()
    head: str | None = None
    alike: tuple[str, ...] = ()
    cache: str | None = None
    cache_of_ones: bool = False
    ones: bool = False

    def refusal(self, scheme: str, format: str) -> Refusal | None:
        """What forbids a scheme in a format; None if nothing does."""
        return _first(self.refused, scheme, format)


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
        draft_layers: config key that counts the decoder layers, where files hold more: those beyond are draft
            layers (multi-token prediction), which stay as they are. The number is `layers`'s first `*`.
        spellings: groups of equivalent prefixes. A listed module whose name begins with one prefix of a group
            is listed under the others too, because engines build the module under another of these names.
        renames: parts of names, and how an engine's names have it; a listed module is listed under both.
        refused: schemes and formats that engines cannot load it in.
        towers: modules of which nothing is quantized and inside of which engines have names of their own; listed as
            they are and, in the compressed-tensors format, as an expression.
        rest: why modules that no pattern covers are kept; None where there may not be any.
        transformers_reads_blocks: whether transformers loads a 128x128 block output of this architecture.
        reordered: modules whose rows an engine puts in another order as it loads them.
        head_refused: why engines load no quantized output head; None if they do.
        cache_refused: why engines load no scales of keys and values; None if they do.
        sglang: what SGLang does not load.
        cached: what is kept of each token.
        states: what is kept of each sequence.
        windows: which layers forget what is long ago.
        folds: where layers have their inputs from; nothing of what is not known to be exact.
    """

    name: str
    layers: str
    compress: tuple[str, ...]
    keep: tuple[Keep, ...]
    joined: tuple[Joined, ...]
    splits: tuple[Split, ...]
    experts: tuple[Experts, ...] = ()
    text_config: str | None = None
    draft_layers: str | None = None
    spellings: tuple[tuple[str, ...], ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    refused: tuple[Refusal, ...] = ()
    towers: tuple[str, ...] = ()
    rest: str | None = None
    transformers_reads_blocks: bool = True
    reordered: tuple[str, ...] = ()
    head_refused: str | None = None
    cache_refused: str | None = None
    sglang: SGLang = SGLang()
    cached: tuple[Cached, ...] = ()
    states: tuple[State, ...] = ()
    windows: Windows = Windows()
    folds: tuple[Fold, ...] = ()

    def with_head(self) -> Model:
        """The same with the output head among what is quantized."""
        keep = tuple(keep for keep in self.keep if keep != HEAD)
        return replace(self, compress=(*self.compress, HEAD.pattern), keep=keep)

    def names_of(self, module: str) -> list[str]:
        """A module's name, and the others that engines know it by."""
        found = {module: None}
        for group in self.spellings:
            prefix = next((prefix for prefix in group if module.startswith(prefix)), None)
            if prefix is not None:
                found |= {other + module.removeprefix(prefix): None for other in group}
        for part, other in self.renames:
            found[module.replace(part, other)] = None
        return list(found)

    def refusal(self, scheme: str, format: str) -> Refusal | None:
        """What forbids a scheme in a format; None if nothing does."""
        return _first(self.refused, scheme, format)


def _first(refused: tuple[Refusal, ...], scheme: str, format: str) -> Refusal | None:
    found = (one for one in refused if one.scheme in (None, scheme) and one.format in (None, format))
    return next(found, None)


def absolute(model: Model, patterns: Iterable[str]) -> list[str]:
    """Patterns of an entry with those that begin with a dot continued from its `layers`."""
    return [model.layers + pattern if pattern.startswith(".") else pattern for pattern in patterns]


@dataclass(frozen=True)
class Part:
    """A piece of a decoder layer that many architectures have; entries are put together from these.

    Attributes: as of Model.
    """

    compress: tuple[str, ...]
    joined: tuple[Joined, ...] = ()
    splits: tuple[Split, ...] = ()
    experts: tuple[Experts, ...] = ()
    keep: tuple[Keep, ...] = ()
    cached: tuple[Cached, ...] = ()
    states: tuple[State, ...] = ()


def gated(
    path: str,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    listed_as: str | None = None,
    sglang: str | None = "gate_up_proj",
) -> Part:
    """Gate, up and down below `path`, the first two of which engines join."""
    return Part(
        compress=(f"{path}.{{{gate},{up},{down}}}",),
        joined=(Joined(f"{path}.{{{gate},{up}}}", listed_as, sglang),),
        splits=(Split(f"{path}.{{{gate},{up}}}", "out"), Split(f"{path}.{down}", "in")),
    )


def plain(path: str, up: str = "up_proj", down: str = "down_proj") -> Part:
    """An MLP without a gate."""
    return Part((f"{path}.{{{up},{down}}}",), (), (Split(f"{path}.{up}", "out"), Split(f"{path}.{down}", "in")))


def routed(
    path: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj", experts: Experts | None = None
) -> Part:
    """The experts below `path`, one module each, and the router in its usual place beside them."""
    each = gated(f"{path}.*", gate, up, down, sglang=None)
    router = Keep(f"{path.rsplit('.', 1)[0]}.gate", ROUTER)
    return replace(each, experts=(experts or Experts(path),), keep=(router,))


def model(name: str, *parts: Part, layers: str = "model.layers.*", keep: tuple[Keep, ...] = (), **more: Any) -> Model:
    """An entry of these parts; embedding and output head are kept wherever a wrapper puts them."""
    return Model(
        name,
        layers=layers,
        compress=tuple(pattern for part in parts for pattern in part.compress),
        keep=(EMBEDDING, HEAD, *(found for part in parts for found in part.keep), *keep),
        joined=tuple(found for part in parts for found in part.joined),
        splits=tuple(found for part in parts for found in part.splits),
        experts=tuple(found for part in parts for found in part.experts),
        cached=tuple(found for part in parts for found in part.cached),
        states=tuple(found for part in parts for found in part.states),
        **more,
    )


EMBEDDING = Keep("{model,language_model.model,model.language_model}.embed_tokens", "embedding", divided=True)
HEAD = Keep("{lm_head,language_model.lm_head}", "output head", divided=True)
ROUTER = "router"
DRAFT = "draft layer"
# What engines never build as a quantized Linear, listed or not.
NOT_LINEAR = (EMBEDDING.why, HEAD.why)
# What stays unquantized in whatever way a source has it: of routers, engines build most without quantization.
NEVER_QUANTIZED = (*NOT_LINEAR, ROUTER)
# Where a wrapper has its language model: as the Hub's older files say it, and transformers 4.52 and later.
WRAPPED = "{language_model.model,model.language_model}.layers.*"

HEADS, KV_HEADS = "num_attention_heads", "num_key_value_heads"


def attention(out: str = "o_proj", listed_as: str | None = None) -> Part:
    """q, k and v, which engines join, and the projection after them."""
    return Part(
        compress=(f".self_attn.{{q_proj,k_proj,v_proj,{out}}}",),
        joined=(Joined(".self_attn.{q,k,v}_proj", listed_as, "qkv_proj"),),
        splits=(
            Split(".self_attn.q_proj", "out", HEADS),
            Split(".self_attn.{k,v}_proj", "out", KV_HEADS, replicated=True),
            Split(f".self_attn.{out}", "in", HEADS),
        ),
        cached=(Cached(".self_attn.{k,v}_proj", KV_HEADS),),
    )


ATTENTION, MLP = attention(), gated(".mlp")
IF_ASKED = Windows(asked="use_sliding_window")
PATTERN = "sliding_window_pattern"

# Facts of SGLang, each from running its loader (tests/serve/test_sglang.py).
# models/llama.py:723 and llama4's renames every weight_scale_inv to weight_scale, which no block has.
SCALES_LOST = SGLang(
    (Refusal("block", "fp8", "it drops the scales of blocks without a word", "--format compressed-tensors loads"),)
)
HEAD_IN_BFLOAT16 = "it builds the output head in bfloat16 whatever is stored"
# Their load_weights look for a parameter of every name.
NO_CACHE = "it has no place for scales of keys and values"
NO_SCALES = SGLang(cache=NO_CACHE)
# Their attention is built without such scales (RadixAttention without quant_config), or load_weights skips them.
SGLANG_ONES = (
    *("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"),
    *("Glm4ForCausalLM", "Glm4MoeForCausalLM", "Starcoder2ForCausalLM", "PhiForCausalLM", "GraniteMoeForCausalLM"),
    *("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "ExaoneMoeForCausalLM", "AfmoeForCausalLM"),
    *("Llama4ForCausalLM", "Llama4ForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    *("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
)
# models/olmo.py and stablelm.py give no quantization to their attention.
PLAIN_ATTENTION = SGLang(plain=(".self_attn.*",), head=HEAD_IN_BFLOAT16, cache=NO_CACHE)
# Run on its Transformers backend, whose names it prefixes, "Linear" among them.
NO_GROUPS = SGLang(
    (
        Refusal(
            None,
            "compressed-tensors",
            "it finds no group of the compressed-tensors format for these layers",
            "--scheme tensor and -w 128 load",
        ),
    ),
    cache=NO_CACHE,
)
# Layers are built without their names.
FORMATS = ("fp8", "compressed-tensors")
NAMELESS = SGLang(alike=FORMATS)
# models/qwen2_vl.py:446 and its like rename what config.json lists, to what they then do not look for.
RENAMED = SGLang(alike=FORMATS[1:])
# Gate and up as one tensor: an engine that cuts it apart for its ranks does so in the middle.
GATE_UP_TENSOR = Part(
    (".mlp.{gate_up_proj,down_proj}",),
    splits=(Split(".mlp.gate_up_proj", "out", parts=(None, None)), Split(".mlp.down_proj", "in")),
)

# SGLang 0.5.23 layers/quantization/utils.py:57-61 asks for the members of what these files hold as one.
FUSED_NAMES = (
    *((".qkv_proj", f".{member}_proj") for member in "qkv"),
    *((".gate_up_proj", f".{member}_proj") for member in ("gate", "up")),
)

# Dense decoders.

LLAMA = model("LlamaForCausalLM", ATTENTION, MLP, sglang=SCALES_LOST)
DENSE = replace(LLAMA, sglang=SGLang())

# Qwen2 with a draft layer of its own name, which vLLM 0.32.0 models/mimo_mtp.py:115 builds as the one after the last;
# all that is published has 36. It has no packed_modules_mapping. SGLang 0.5.23 models/mimo_mtp.py:98 builds it without
# a name, so its speculative decoding cannot be told to leave it as it is.
MIMO_DRAFT = "model.mtp_layers.*"
MIMO = replace(
    DENSE,
    name="MiMoForCausalLM",
    windows=IF_ASKED,
    keep=(*DENSE.keep, Keep(f"{MIMO_DRAFT}.**", DRAFT)),
    joined=(
        *DENSE.joined,
        Joined(f"{MIMO_DRAFT}.self_attn.{{q,k,v}}_proj", "qkv_proj"),
        Joined(f"{MIMO_DRAFT}.mlp.{{gate,up}}_proj", "gate_up_proj"),
    ),
    renames=(("model.mtp_layers.0.", "model.layers.36."),),
    sglang=NO_SCALES,
)

# On disk as vLLM has them (0.32.0 models/phi3.py); each of what they hold must divide.
PHI3 = model(
    "Phi3ForCausalLM",
    Part(
        (".self_attn.{qkv_proj,o_proj}",),
        splits=(
            Split(".self_attn.qkv_proj", "out", replicated=True, parts=(HEADS, KV_HEADS, KV_HEADS)),
            Split(".self_attn.o_proj", "in", HEADS),
        ),
        cached=(Cached(".self_attn.qkv_proj", KV_HEADS),),
    ),
    GATE_UP_TENSOR,
    renames=FUSED_NAMES,
    sglang=SCALES_LOST,
)

# No gate in the MLP.
ARCEE = model("ArceeForCausalLM", ATTENTION, plain(".mlp"))

# vLLM 0.32.0 models/stablelm.py has no packed_modules_mapping.
STABLELM = model(
    "StableLmForCausalLM",
    attention(listed_as="qkv_proj"),
    gated(".mlp", listed_as="gate_up_proj"),
    sglang=PLAIN_ATTENTION,
)

# Mixtures of experts.

MIXTRAL = model(
    "MixtralForCausalLM",
    ATTENTION,
    routed(".block_sparse_moe.experts", "w1", "w3", "w2"),
    # SGLang 0.5.23 models/mixtral.py:303.
    spellings=(("model.layers.", "layers."),),
    sglang=SGLang(head=HEAD_IN_BFLOAT16),
)

# vLLM 0.32.0 models/phimoe.py; SGLang 0.5.23 models/phimoe.py.
PHI_MOE = replace(
    MIXTRAL,
    name="PhiMoEForCausalLM",
    spellings=(),
    # models/phimoe.py:511
    head_refused="vLLM 0.32.0 builds it without a quantization",
    sglang=SGLang(),
)

SHARED_EXPERT = replace(gated(".mlp.shared_expert"), keep=(Keep(".mlp.shared_expert_gate", ROUTER),))
SHARED_EXPERTS = gated(".mlp.shared_experts")
ROUTED = routed(".mlp.experts")

QWEN2_MOE = model("Qwen2MoeForCausalLM", ATTENTION, MLP, SHARED_EXPERT, ROUTED, windows=IF_ASKED)

QWEN3_MOE = model(
    "Qwen3MoeForCausalLM",
    ATTENTION,
    # qwen3_moe.py:575 means to map gate_up_proj to its members where mlp_only_layers is not empty; the
    # built engine's quant_config has no such entry either way.
    gated(".mlp", listed_as="gate_up_proj"),
    # vLLM 0.32.0 models/qwen3_moe.py:170 builds the router with quant_config.
    ROUTED,
    windows=IF_ASKED,
)

# Experts [E, 2I, H] and [E, H, I] beside the module that vLLM has them in; split they have the usual names there
# (vLLM 0.32.0 models/granitemoehybrid.py:409, models/granitemoe.py:305).
GRANITE_EXPERTS = replace(
    routed(
        ".block_sparse_moe.experts",
        experts=Experts(
            ".block_sparse_moe.experts",
            stacked=(Stacked("input_linear", ("gate_proj", "up_proj")), Stacked("output_linear", ("down_proj",))),
            beside=True,
        ),
    ),
    keep=(Keep(".block_sparse_moe.router.layer", ROUTER),),
)
# transformers 5.23 wants its stacks.
GRANITE_MOE = model("GraniteMoeForCausalLM", ATTENTION, GRANITE_EXPERTS, transformers_reads_blocks=False)

# The router is `gate.wg`, which vLLM's Transformers backend quantizes unless it is listed.
HUNYUAN_MOE = model(
    "HunYuanMoEV1ForCausalLM",
    ATTENTION,
    MLP,
    gated(".mlp.shared_mlp"),
    replace(ROUTED, keep=(Keep(".mlp.gate.wg", ROUTER),)),
    # Not as close as the others.
    transformers_reads_blocks=False,
    sglang=SGLang(head=HEAD_IN_BFLOAT16, alike=FORMATS),
)

ERNIE_MOE = model(
    "Ernie4_5_MoeForCausalLM",
    ATTENTION,
    MLP,
    SHARED_EXPERTS,
    ROUTED,
    keep=(
        Keep(".mlp.moe_statics.**", ROUTER),
        Keep("model.mtp_{block,emb_norm,hidden_norm,linear_proj}.**", DRAFT),
    ),
    sglang=NO_SCALES,
)

# vLLM 0.32.0 models/glm4_moe_mtp.py and deepseek_mtp.py, which build the draft layers, have no
# packed_modules_mapping.
DRAFTED_MLPS = tuple(gated(path, listed_as="gate_up_proj") for path in (".mlp", ".mlp.shared_experts"))
GLM4_MOE = model(
    "Glm4MoeForCausalLM",
    attention(listed_as="qkv_proj"),
    *DRAFTED_MLPS,
    ROUTED,
    draft_layers="num_hidden_layers",
    # SGLang 0.5.23 models/glm4_moe.py:501
    sglang=SGLang(unpacked=(".mlp.shared_experts.**",)),
)

# Latent attention. vLLM 0.32.0 multiplies kv_b_proj out as it loads (layers/quantization/utils/quant_utils.py:511):
# in FP8 it would cost accuracy and save nothing.
LATENT = Part(
    (".self_attn.{q_proj,q_a_proj,q_b_proj,kv_a_proj_with_mqa,o_proj}",),
    # models/deepseek_v2.py:1051; SGLang 0.5.23 models/deepseek_v2.py
    joined=(
        Joined(".self_attn.{q_a_proj,kv_a_proj_with_mqa}", "fused_qkv_a_proj", sglang="fused_qkv_a_proj_with_mqa"),
    ),
    splits=(Split(".self_attn.{q_proj,q_b_proj}", "out", HEADS), Split(".self_attn.o_proj", "in", HEADS)),
    keep=(Keep(".self_attn.kv_b_proj", "engines decode it when they load it", divided=True),),
    cached=(Cached(".self_attn.kv_a_proj_with_mqa", None),),
)
# SGLang puts one of these behind the other whatever it is: shapes and global scales too.
LATENT_UNPACKED = (".self_attn.q_a_proj",)
DEEPSEEK_V3 = model(
    "DeepseekV3ForCausalLM",
    LATENT,
    *DRAFTED_MLPS,
    ROUTED,
    draft_layers="num_hidden_layers",
    sglang=SGLang(unpacked=LATENT_UNPACKED),
)

# The projections of one layer's index over the tokens; small, and vLLM 0.32.0 (vllm/models/deepseek_v32) reads
# two of the three unquantized.
INDEXER = Keep(".self_attn.indexer.{wq_b,wk,weights_proj}", "chooses the tokens attended to")
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="DeepseekV32ForCausalLM",
    keep=(*DEEPSEEK_V3.keep, INDEXER),
    # vLLM 0.32.0 model_executor/layers/attention/mla_attention.py:1365: 512 codes, 4 scales, 64 numbers in bfloat16;
    # of the index 128 codes and a scale, whatever the rest is in (vllm/models/deepseek_v32/common).
    cached=(
        Cached(".self_attn.kv_a_proj_with_mqa", None, fp8=656),
        Cached(".self_attn.indexer.wk", None, fp8=132, bf16=132),
    ),
)

NAMELESS_HEAD = "vLLM 0.32.0 builds it without a name to find its scheme by"
# The router is `router.gate`.
AFMOE = model(
    "AfmoeForCausalLM",
    ATTENTION,
    Part((".self_attn.gate_proj",), splits=(Split(".self_attn.gate_proj", "out", HEADS),)),
    MLP,
    SHARED_EXPERTS,
    replace(ROUTED, keep=(Keep(".mlp.router.gate", ROUTER),)),
    # models/afmoe.py:513
    head_refused=NAMELESS_HEAD,
    # SGLang 0.5.23 models/afmoe.py:257, where experts are layers of their own, found by other names.
    sglang=SGLang(
        tuple(
            Refusal(scheme, None, "it takes no packed codes for experts", "--scheme channel loads")
            for scheme in ("int8-weights", "int4", "nvfp4")
        )
    ),
    windows=Windows(4, "global_attn_every_n_layers"),
)

MTP = Keep("mtp.**", DRAFT)
EXAONE_MOE = model(
    "ExaoneMoeForCausalLM",
    ATTENTION,
    MLP,
    SHARED_EXPERTS,
    ROUTED,
    keep=(MTP,),
    # models/exaone_moe.py:510
    head_refused=NAMELESS_HEAD,
    windows=Windows(4, PATTERN),
)

NO_EXPERTS = "vLLM 0.32.0 reads its experts as MXFP4 and its attention is a thirtieth of it"
GPT_OSS = model(
    "GptOssForCausalLM",
    attention(),
    keep=(Keep(".mlp.router", ROUTER), Keep(".mlp.experts.**", "served as MXFP4")),
    # vLLM 0.32.0 models/gpt_oss.py:825-1060.
    refused=(Refusal(None, None, NO_EXPERTS, "serve the MXFP4 original"),),
    windows=Windows(2),
)

# Linear attention, state spaces and convolutions.

CONVOLUTION = "convolution"
KEY_HEADS, VALUE_HEADS = "linear_num_key_heads", "linear_num_value_heads"
# vLLM 0.32.0 models/config.py:856 reads the dtype of a state in Qwen3.5, and 717 that of Nemotron-H.
DELTA_STATE = State(
    ".linear_attn.conv1d", (VALUE_HEADS, "linear_value_head_dim", "linear_key_head_dim"), "mamba_ssm_dtype"
)
# vLLM 0.32.0 layers/mamba/gdn/qwen_gdn_linear_attn.py:524: ba_proj has no block form. It has a few rows.
GATED_DELTA = Part(
    (".linear_attn.{in_proj_qkvz,out_proj}",),
    splits=(
        Split(".linear_attn.in_proj_qkvz", "out", KEY_HEADS),
        Split(".linear_attn.out_proj", "in", VALUE_HEADS),
    ),
    keep=(Keep(".linear_attn.in_proj_ba", "gates of a row per head"), Keep(".linear_attn.conv1d", CONVOLUTION)),
    states=(DELTA_STATE,),
)
QWEN3_NEXT = model(
    "Qwen3NextForCausalLM",
    ATTENTION,
    GATED_DELTA,
    MLP,
    SHARED_EXPERT,
    ROUTED,
    keep=(MTP,),
    # models/qwen3_next.py:851
    head_refused="vLLM 0.32.0 builds it without a quantization",
    sglang=SGLang(
        (Refusal("tensor", "fp8", "it asks in_proj_qkvz for four scales", "--scheme channel and -w 128 load"),),
        # SGLang 0.5.23 models/qwen3_next.py:311
        unpacked=(".linear_attn.in_proj_qkvz",),
        # models/qwen3_next.py:1266
        cache="it takes no scales of keys and values but 1",
        cache_of_ones=True,
    ),
)

# The same in pieces: qkv and z are joined, and qkv holds three of the four that the engine makes of them (:664).
GATED_DELTA_PIECES = Part(
    (".linear_attn.{in_proj_qkv,in_proj_z,out_proj}",),
    joined=(Joined(".linear_attn.{in_proj_qkv,in_proj_z}", sglang="in_proj_qkvz"),),
    splits=(
        Split(".linear_attn.in_proj_qkv", "out", parts=(KEY_HEADS, KEY_HEADS, VALUE_HEADS)),
        Split(".linear_attn.in_proj_z", "out", VALUE_HEADS),
        Split(".linear_attn.out_proj", "in", VALUE_HEADS),
    ),
    keep=(Keep(".linear_attn.in_proj_{a,b}", "gates of a row per head"), Keep(".linear_attn.conv1d", CONVOLUTION)),
    states=(DELTA_STATE,),
)
# Saved without its tower it keeps the wrapper's names.
EITHER = "{model,model.language_model}.layers.*"
HEAD_SCALE_LOST = SGLang(head="it drops the scale of the output head without a word")
QWEN3_5 = model(
    "Qwen3_5ForCausalLM", ATTENTION, GATED_DELTA_PIECES, MLP, layers=EITHER, keep=(MTP,), sglang=HEAD_SCALE_LOST
)
# The Hub's files hold stacks [E, 2I, H] and [E, H, I], transformers 5.23 saves one module for each expert.
STACKED_EXPERTS = replace(
    ROUTED,
    experts=(
        Experts(
            ".mlp.experts",
            stacked=(Stacked("gate_up_proj", ("gate_proj", "up_proj")), Stacked("down_proj", ("down_proj",))),
        ),
    ),
)
QWEN3_5_MOE = model(
    "Qwen3_5MoeForCausalLM",
    ATTENTION,
    GATED_DELTA_PIECES,
    MLP,
    SHARED_EXPERT,
    STACKED_EXPERTS,
    layers=EITHER,
    keep=(MTP,),
    sglang=HEAD_SCALE_LOST,
)

# in_proj holds five pieces that vLLM divides by rules of their own (layers/mamba/mamba_mixer2.py).
STATE_SPACE = "state space inputs, of several kinds"
GRANITE_HYBRID = model(
    "GraniteMoeHybridForCausalLM",
    ATTENTION,
    Part(
        (".mamba.out_proj",),
        splits=(Split(".mamba.out_proj", "in", "mamba_n_heads"),),
        keep=(Keep(".mamba.in_proj", STATE_SPACE, divided=True), Keep(".mamba.conv1d", CONVOLUTION)),
        states=(State(".mamba.conv1d", ("mamba_n_heads", "mamba_d_head", "mamba_d_state")),),
    ),
    GRANITE_EXPERTS,
    Part(
        (".shared_mlp.{input_linear,output_linear}",),
        splits=(
            Split(".shared_mlp.input_linear", "out", parts=(None, None)),
            Split(".shared_mlp.output_linear", "in"),
        ),
    ),
    # vLLM 0.32.0 models/granitemoehybrid.py asks for its linears under this name.
    renames=((".mamba.", ".mixer."),),
    transformers_reads_blocks=False,
    sglang=SGLang(
        (Refusal(None, "fp8", "its loader of this architecture fails on the fp8 format", "--scheme channel loads"),),
        cache=NO_CACHE,
    ),
)

LFM2_MIXERS = (
    attention("out_proj"),
    Part(
        (".conv.out_proj",),
        splits=(Split(".conv.out_proj", "in"),),
        keep=(Keep(".conv.in_proj", "three inputs of a convolution", divided=True), Keep(".conv.conv", CONVOLUTION)),
        states=(State(".conv.conv"),),
    ),
)
# models/lfm2.py:193
NAMELESS_CACHE = "vLLM 0.32.0 builds its attention without quantization"
LFM2 = model("Lfm2ForCausalLM", *LFM2_MIXERS, gated(".feed_forward", "w1", "w3", "w2"), cache_refused=NAMELESS_CACHE)
LFM2_MOE = model(
    "Lfm2MoeForCausalLM",
    *LFM2_MIXERS,
    gated(".feed_forward", "w1", "w3", "w2"),
    # vLLM 0.32.0 models/lfm2_moe.py builds the router with quant_config.
    routed(".feed_forward.experts", "w1", "w3", "w2"),
    cache_refused=NAMELESS_CACHE,
    # SGLang 0.5.23 models/lfm2_moe.py.
    renames=tuple(
        (f".feed_forward.{one}", f".feed_forward.{other}_proj")
        for one, other in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    ),
)

# One mixer for each layer: attention, state space, MLP or experts without a gate.
NEMOTRON_H = model(
    "NemotronHForCausalLM",
    Part(
        (".mixer.{q,k,v,o}_proj", ".mixer.out_proj"),
        joined=(Joined(".mixer.{q,k,v}_proj", sglang="qkv_proj"),),
        splits=(
            Split(".mixer.q_proj", "out", HEADS),
            Split(".mixer.{k,v}_proj", "out", KV_HEADS, replicated=True),
            Split(".mixer.o_proj", "in", HEADS),
            Split(".mixer.out_proj", "in", "mamba_num_heads"),
        ),
        keep=(Keep(".mixer.in_proj", STATE_SPACE, divided=True), Keep(".mixer.conv1d", CONVOLUTION)),
        cached=(Cached(".mixer.{k,v}_proj", KV_HEADS),),
        states=(
            State(
                ".mixer.conv1d",
                ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
                "mamba_ssm_cache_dtype",
                usual="float32",
            ),
        ),
    ),
    plain(".mixer"),
    plain(".mixer.shared_experts"),
    replace(
        plain(".mixer.experts.*"),
        experts=(Experts(".mixer.experts"),),
        keep=(
            Keep(".mixer.gate", ROUTER),
            Keep(".mixer.fc{1,2}_latent_proj", "to and from the experts' narrower space"),
        ),
    ),
    layers="backbone.layers.*",
    keep=(Keep("backbone.embeddings", "embedding"), MTP),
    # transformers 5 builds it as model.
    spellings=(("backbone.", "model."),),
)

# Layers with a second input, of a table of embeddings of its own. Those that attend to everything have heads of their
# own, and in the larger ones no projection of values.
GEMMA4 = model(
    "Gemma4ForCausalLM",
    replace(
        ATTENTION,
        cached=(
            replace(ATTENTION.cached[0], full_heads="num_global_key_value_heads", keys_as_values="attention_k_eq_v"),
        ),
    ),
    MLP,
    keep=(
        Keep("{model,model.language_model}.embed_tokens_per_layer", "embedding"),
        Keep("{model,model.language_model}.per_layer_model_projection", "embedding"),
        Keep(".{per_layer_input_gate,per_layer_projection}", "embedding"),
    ),
    windows=Windows(6),
)

# Dense decoders with windows.
WINDOWS = {
    "Cohere2": Windows(4, PATTERN),
    "Cwm": Windows(4, first=True),
    "Exaone4": Windows(4, PATTERN),
    "Gemma2": Windows(2),
    "Gemma3": Windows(6, PATTERN),
    "Olmo3": Windows(4),
    "Qwen2": IF_ASKED,
    "Qwen3": IF_ASKED,
    "SmolLM3": IF_ASKED,
}

# Wrappers with towers.


def wrapped(text: Model, name: str, *towers: str, layers: str = WRAPPED, **more: Any) -> Model:
    """An entry of a language model inside a wrapper, all of whose other modules stay as they are."""
    kept = tuple(Keep(f"{{{tower},model.{tower}}}.**", "vision or audio") for tower in towers)
    more = {"text_config": "text_config", "towers": towers, **more}
    more = {"sglang": SGLang(), **more}
    return replace(text, name=name, layers=layers, keep=(*text.keep, *kept), **more)


# vLLM 0.32.0 models/gemma3_mm.py builds the tower with quant_config as vision_tower.vision_model.encoder,
# models/siglip.py; transformers 5 leaves vision_model out.
GEMMA3_WRAPPED = wrapped(
    replace(LLAMA, windows=WINDOWS["Gemma3"]),
    "Gemma3ForConditionalGeneration",
    "vision_tower",
    "multi_modal_projector",
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
# vLLM 0.32.0 models/mistral3.py:431 renames every weight_scale_inv to weight_scale, which a block has not.
MISTRAL3_WRAPPED = wrapped(
    LLAMA,
    "Mistral3ForConditionalGeneration",
    "vision_tower",
    "multi_modal_projector",
    # SGLang 0.5.23 as if nothing were around it.
    spellings=(("language_model.model.layers.", "model.language_model.layers.", "model.layers."),),
    refused=(
        Refusal(
            "block",
            "fp8",
            "vLLM 0.32.0 does not find its block scales",
            "use --scheme tensor or channel, or --format compressed-tensors",
        ),
    ),
)
# Files say model. and visual., newer ones model.language_model. and model.visual.; vLLM's mapper takes both.
QWEN_VISION = "visual"
QWEN2_VL = wrapped(
    replace(LLAMA, windows=IF_ASKED),
    "Qwen2VLForConditionalGeneration",
    QWEN_VISION,
    layers=EITHER,
    # transformers 5 looks the tower up under its newer name only.
    spellings=(("visual.", "model.visual."),),
    sglang=replace(RENAMED, cache=NO_CACHE),
)
QWEN3_VL = wrapped(LLAMA, "Qwen3VLForConditionalGeneration", QWEN_VISION, sglang=RENAMED)
# Experts [E, H, 2I] and [E, I, H] (vLLM 0.32.0 models/qwen3_vl_moe.py:76).
QWEN3_VL_MOE = wrapped(
    replace(
        QWEN3_MOE,
        experts=(
            Experts(
                ".mlp.experts",
                stacked=(
                    Stacked("gate_up_proj", ("gate_proj", "up_proj"), transposed=True),
                    Stacked("down_proj", ("down_proj",), transposed=True),
                ),
            ),
        ),
    ),
    "Qwen3VLMoeForConditionalGeneration",
    QWEN_VISION,
    sglang=RENAMED,
    transformers_reads_blocks=False,
)

# [E, H, 2I] and [E, I, H] (vLLM 0.32.0 models/llama4.py:398). A checkpoint may not mix stacked and split
# experts (llama4.py:583), so they are split wherever they appear.
LLAMA4 = model(
    "Llama4ForCausalLM",
    ATTENTION,
    gated(".feed_forward"),
    gated(".feed_forward.shared_expert"),
    replace(
        routed(
            ".feed_forward.experts",
            experts=Experts(
                ".feed_forward.experts",
                stacked=(
                    Stacked("gate_up_proj", ("gate_proj", "up_proj"), transposed=True),
                    Stacked("down_proj", ("down_proj",), transposed=True),
                ),
            ),
        ),
        keep=(Keep(".feed_forward.router", ROUTER),),
    ),
    # transformers 5.19 finds no split experts and initialises new ones.
    transformers_reads_blocks=False,
    # vLLM 0.32.0 models/llama4.py:805-844, for its rotary embedding.
    reordered=(".self_attn.{q,k}_proj",),
    sglang=SCALES_LOST,
    windows=Windows(4, "no_rope_layer_interval", flags="no_rope_layers", size="attention_chunk_size"),
)
# vLLM 0.32.0 models/mllama4.py has no name mapper: it loads these names only, and looks them up as they are.
LLAMA4_WRAPPED = wrapped(
    LLAMA4,
    "Llama4ForConditionalGeneration",
    "vision_model",
    "multi_modal_projector",
    layers="language_model.model.layers.*",
    # SGLang 0.5.23 models/mllama4.py:607.
    sglang=SGLang(
        (
            Refusal(
                "channel",
                None,
                "it reorders the rows of queries and keys, but not their scales",
                "--scheme tensor, and -w 128 in the fp8 format, load",
            ),
        ),
        # It does not reorder those at all.
        unpacked=(".self_attn.{q,k}_proj",),
    ),
)

# Foldings, which tests/plan/test_folding.py holds in models of transformers. None where norms come after layers
# (OLMo 2, Exaone 4) or one is read by attention and MLP (Cohere), nor of v where it has a norm (Gemma 4).
OUT_FOLD = Fold(".self_attn.v_proj", (".self_attn.o_proj",), heads=KV_HEADS)
DOWN_FOLD = Fold(".mlp.up_proj", (".mlp.down_proj",))
QKV_FOLD = Fold(".input_layernorm", (".self_attn.{q,k,v}_proj",))
DENSE_FOLDS = (QKV_FOLD, Fold(".post_attention_layernorm", (".mlp.{gate,up}_proj",)), OUT_FOLD, DOWN_FOLD)
# Gemma's norms multiply by 1 + w.
GEMMA2_MLP_FOLD = Fold(".pre_feedforward_layernorm", (".mlp.{gate,up}_proj",), offset=1)
# Gate and up as one, whose upper rows are the gate's.
FUSED_FOLDS = (
    Fold(".post_attention_layernorm", (".mlp.gate_up_proj",)),
    Fold(".mlp.gate_up_proj", (".mlp.down_proj",), last=True),
)


def expert_folds(mlp: str, gate: str, up: str, down: str, *beside: str) -> tuple[Fold, ...]:
    """Foldings around experts below a module, which its router and other modules beside read with them."""
    readers = (f"{mlp}.gate", f"{mlp}.experts.*.{{{gate},{up}}}", *beside)
    return (
        QKV_FOLD,
        Fold(".post_attention_layernorm", readers),
        OUT_FOLD,
        Fold(f"{mlp}.experts.*.{up}", (f"{mlp}.experts.*.{down}",)),
    )


QWEN_EXPERTS = (".mlp", "gate_proj", "up_proj", "down_proj", ".mlp.{gate,up}_proj")
FOLDS: dict[str, tuple[Fold, ...]] = {
    **{
        f"{name}ForCausalLM": DENSE_FOLDS
        for name in (
            *("Llama", "Mistral", "Ministral3", "Qwen2", "Qwen3", "Granite", "SmolLM3", "SeedOss", "Cwm", "Ernie4_5"),
            *("HunYuanDenseV1", "MiMo"),
        )
    },
    "GemmaForCausalLM": tuple(replace(fold, offset=1) for fold in DENSE_FOLDS[:2]) + DENSE_FOLDS[2:],
    "Gemma2ForCausalLM": (replace(QKV_FOLD, offset=1), GEMMA2_MLP_FOLD, OUT_FOLD, DOWN_FOLD),
    # Not into q, k and v: accuracy fell below that of rounding to nearest (llm-compressor issue 2522).
    "Gemma3ForCausalLM": (GEMMA2_MLP_FOLD, OUT_FOLD, DOWN_FOLD),
    "Phi3ForCausalLM": (
        Fold(".input_layernorm", (".self_attn.qkv_proj",)),
        Fold(".self_attn.qkv_proj", (".self_attn.o_proj",), heads=KV_HEADS, last=True),
        *FUSED_FOLDS,
    ),
    "Glm4ForCausalLM": (QKV_FOLD, OUT_FOLD, *FUSED_FOLDS),
    "GlmForCausalLM": (QKV_FOLD, OUT_FOLD, *FUSED_FOLDS),
    "Qwen3MoeForCausalLM": (*expert_folds(*QWEN_EXPERTS), DOWN_FOLD),
    "Qwen2MoeForCausalLM": (
        *expert_folds(*QWEN_EXPERTS, ".mlp.shared_expert_gate", ".mlp.shared_expert.{gate,up}_proj"),
        DOWN_FOLD,
        Fold(".mlp.shared_expert.up_proj", (".mlp.shared_expert.down_proj",)),
    ),
    "MixtralForCausalLM": expert_folds(".block_sparse_moe", "w1", "w3", "w2"),
}

DENSE_NAMES = {
    SCALES_LOST: ("Llama", "Mistral", "Ministral3"),
    SGLang(): ("Qwen2", "Qwen3", "Gemma3", "Exaone4", "Cohere", "Cohere2"),
    NO_SCALES: ("Gemma", "Olmo2", "Olmo3", "Granite"),
    PLAIN_ATTENTION: ("Olmo",),
    NO_GROUPS: ("SmolLM3", "SeedOss", "Cwm", "Ernie4_5"),
    NAMELESS: ("Gemma2",),
    SGLang(head=HEAD_IN_BFLOAT16, alike=FORMATS): ("HunYuanDenseV1",),
}
MODELS: dict[str, Model] = {
    entry.name: replace(
        entry, folds=FOLDS.get(entry.name, ()), sglang=replace(entry.sglang, ones=entry.name in SGLANG_ONES)
    )
    for entry in (
        *(
            replace(DENSE, name=f"{name}ForCausalLM", sglang=sglang, windows=WINDOWS.get(name, Windows()))
            for sglang, names in DENSE_NAMES.items()
            for name in names
        ),
        MIMO,
        PHI3,
        model("Glm4ForCausalLM", ATTENTION, GATE_UP_TENSOR, renames=FUSED_NAMES[3:]),
        model("GlmForCausalLM", ATTENTION, GATE_UP_TENSOR),
        ARCEE,
        replace(ARCEE, name="ApertusForCausalLM"),
        model("Starcoder2ForCausalLM", ATTENTION, plain(".mlp", "c_fc", "c_proj")),
        model(
            "PhiForCausalLM",
            attention("dense"),
            plain(".mlp", "fc1", "fc2"),
            sglang=SGLang(head=HEAD_IN_BFLOAT16, alike=FORMATS),
        ),
        STABLELM,
        MIXTRAL,
        # vLLM 0.32.0 models/minimax_m2.py calls the module mlp.
        replace(MIXTRAL, name="MiniMaxM2ForCausalLM", spellings=(), renames=((".block_sparse_moe.", ".mlp."),)),
        PHI_MOE,
        QWEN2_MOE,
        QWEN3_MOE,
        model("OlmoeForCausalLM", ATTENTION, ROUTED, sglang=NO_SCALES),
        GRANITE_MOE,
        HUNYUAN_MOE,
        ERNIE_MOE,
        EXAONE_MOE,
        AFMOE,
        GLM4_MOE,
        replace(DEEPSEEK_V3, name="DeepseekV2ForCausalLM"),
        DEEPSEEK_V3,
        replace(
            DEEPSEEK_V3,
            name="Glm4MoeLiteForCausalLM",
            sglang=SGLang(
                (Refusal("tensor", "fp8", "it joins scales as if they had rows", "--scheme channel and -w 128 load"),),
                unpacked=LATENT_UNPACKED,
            ),
        ),
        DEEPSEEK_V32,
        replace(DEEPSEEK_V32, name="GlmMoeDsaForCausalLM"),
        GPT_OSS,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        GRANITE_HYBRID,
        LFM2,
        LFM2_MOE,
        NEMOTRON_H,
        GEMMA4,
        LLAMA4,
        GEMMA3_WRAPPED,
        MISTRAL3_WRAPPED,
        QWEN2_VL,
        replace(QWEN2_VL, name="Qwen2_5_VLForConditionalGeneration", sglang=RENAMED),
        QWEN3_VL,
        QWEN3_VL_MOE,
        wrapped(
            GEMMA4,
            "Gemma4ForConditionalGeneration",
            "vision_tower",
            "embed_vision",
            "audio_tower",
            "embed_audio",
        ),
        wrapped(QWEN3_5, "Qwen3_5ForConditionalGeneration", QWEN_VISION),
        wrapped(QWEN3_5_MOE, "Qwen3_5MoeForConditionalGeneration", QWEN_VISION),
        LLAMA4_WRAPPED,
    )
}

_EXPERTS = "{mlp,block_sparse_moe,feed_forward}.experts"
GENERIC = model(
    "generic",
    ATTENTION,
    Part(
        (".{self_attn,attn,attention,self_attention}.{qkv_proj,out_proj,query_key_value,dense,wq,wk,wv,wo}",),
        joined=(Joined(".{attn,attention}.{wq,wk,wv}"), Joined(".{attn,attention}.{q,k,v}_proj")),
    ),
    Part((".{attn,attention}.{q,k,v,o}_proj",)),
    MLP,
    GATE_UP_TENSOR,
    gated(".feed_forward"),
    gated(".{mlp,feed_forward}", "w1", "w3", "w2"),
    Part((".mlp.{fc1,fc2,fc_in,fc_out,dense_h_to_4h,dense_4h_to_h}",)),
    gated(".{mlp,block_sparse_moe,feed_forward}.{shared_expert,shared_experts,shared_mlp}"),
    replace(routed(f".{_EXPERTS}"), keep=()),
    replace(routed(f".{_EXPERTS}", "w1", "w3", "w2"), keep=(), experts=()),
    layers="{model,language_model.model,model.language_model,transformer,backbone,gpt_neox}.{layers,h,blocks}.*",
    draft_layers="num_hidden_layers",
    rest="not known to be a projection of attention or MLP",
)
"""For what has no entry, when the user asks for it: projections by their usual names, and nothing else."""
