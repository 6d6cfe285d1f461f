"""Types of the registry's entries. An entry says what openquant must know of one architecture; it is data.

Patterns (see patterns.py) name modules as the checkpoint names them: tensor names without `.weight`. A pattern that
begins with a dot continues the entry's `layers` pattern, which matches one decoder layer. Every tensor of two or more
axes must match exactly one pattern of compress, experts and keep; all other tensors are copied. Facts about an engine
name the file they were read from, of the version in version.py.

ModuleRules is what an entry says of each module of a checkpoint. Modules whose names differ in numbers only have the
same rule, which is looked up once.

    ModuleRules(MODELS["Qwen3ForCausalLM"]).rule("model.layers.0.mlp.up_proj").compress    # True

ClassTensors are the tensors that a class has, with sizes in terms of config.json. tools/class_tensors.py writes
class_tensors.jsonl from transformers' own classes. A line has, for Qwen3ForCausalLM,

    "sizes":    ["num_hidden_layers", "num_attention_heads*head_dim", "hidden_size", ..]: the others say places in it
    "outside":  {"lm_head.weight": [[4, 2], null, [["tie_word_embeddings", false]]], ..}: a TensorRule for each name
    "lists":    {"model.layers": [0, [{"self_attn.q_proj.weight": [[1, 2], null, []], ..}, ..], {}]}: a LayerList
    "defaults": {"tie_word_embeddings": false}: the truth of keys that config.json need not say
    "parts":    {"vision_config": "siglip_vision_model"}: the model types of parts that may be other models
    "derived":  {"head_dim": "hidden_size/num_attention_heads"}: sizes of keys that config.json need not say
    "aliases":  {"num_experts": "num_local_experts"}: other names of keys
    "built":    true: whether transformers builds all of it

A size is a sum of products of keys and numbers, where "#key" is the length of a key's list, or "?1": one that no key
says, which is the same wherever it stands. A number in a name is `*` where config.json counts it. "*" is not compared.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..patterns import MAX_DIGITS, compile_any, compile_pattern, template


@dataclass(frozen=True)
class Keep:
    """Modules that are not quantized.

    Attributes:
        pattern: the modules.
        why: the reason, as the plan prints it.
        divided: whether each tensor-parallel rank holds a part of the module; otherwise each holds a copy.
    """

    pattern: str
    why: str
    divided: bool = False


@dataclass(frozen=True)
class FusedLayers:
    """Layers that an engine fuses into one. They have the same scheme and, in per-tensor schemes, one scale.

    Attributes:
        pattern: the members. Modules whose `*` parts are equal are fused with each other.
        listed_as: last segment of vLLM's name for the fused layer, to be added to the ignore list beside the members;
            None if vLLM derives the name from theirs.
        sglang: the same for SGLang, which derives the name for few architectures.
    """

    pattern: str
    listed_as: str | None = None
    sglang: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Last segments of the engines' names for the fused layer."""
        return tuple(dict.fromkeys(filter(None, (self.listed_as, self.sglang))))


@dataclass(frozen=True)
class StackedExperts:
    """One tensor [experts, ...] that holds the same projections of all experts of a layer.

    Attributes:
        name: its name below the experts' module, or beside it (ExpertLayout.beside).
        parts: the projections that each expert's slice holds, in order, named as after splitting.
        transposed: whether an expert's slice is [in, out], with the parts side by side along `out`; otherwise
            [out, in].
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True)
class ExpertLayout:
    """The routed experts of a layer, which all have the same scheme.

    Attributes:
        path: the module that holds one layer's experts.
        stacked: tensors to be split into `<path>.<expert>.<part>.weight`, each [out, in].
        beside: whether the stacked tensors are siblings of the experts' module rather than its children.
        transformers: whether transformers can load the experts once they are split.
    """

    path: str
    stacked: tuple[StackedExperts, ...] = ()
    beside: bool = False
    transformers: bool = True

    @property
    def place(self) -> str:
        """Pattern of the module that holds the stacked tensors."""
        if self.beside:
            return self.path.rsplit(".", 1)[0]
        return self.path


@dataclass(frozen=True)
class ParallelSplit:
    """How tensor-parallel ranks divide modules.

    Attributes:
        pattern: the modules.
        axis: "out" (column parallel) or "in" (row parallel).
        heads: config key that counts the heads along that axis; None if the axis may be divided anywhere.
        replicated: whether heads are copied when there are fewer than ranks (key and value heads).
        parts: for a tensor that holds several layers one below the other, each divided by itself: the config key to
            which each layer's row count is proportional, or None for equal counts.
        where: other `parts`, each with the config key that must be true for them; the first match counts.
        interleaved: whether the rows are grouped by head (query, key and value of one head, then of the next) and the
            engine sorts them at load. Weights that share a scale must then belong to one head.
        interleaved_all: whether the engine sorts every tensor of the layer, scales too, and fails on a tensor that
            does not have rows for each head, such as a single scale.
        interleaved_rows: whether the engine expects the weight's row count in every tensor of the layer, and fails on
            those that have fewer rows.
    """

    pattern: str
    axis: str
    heads: str | None = None
    replicated: bool = False
    parts: tuple[str | None, ...] = ()
    where: tuple[tuple[str, tuple[str | None, ...]], ...] = ()
    interleaved: bool = False
    interleaved_all: bool = False
    interleaved_rows: bool = False


@dataclass(frozen=True)
class PerRankTensor:
    """An FP8 block tensor that holds several projections, stored as per-rank shards with scales of their own.

    Attributes:
        pattern: the tensor's module.
        members: the projections whose rows each shard holds, in order, named as they are when stored separately.
        ranks: config key that counts the shards.
        sizes: for each kind of layer, per member, the config keys of its head count and of the rows of a head. The
            kind whose sizes account for all rows applies.
        layout: config key that says that files hold such tensors, with its value for files that hold the projections
            separately, as outputs do.
    """

    pattern: str
    members: tuple[str, ...]
    ranks: str
    sizes: tuple[tuple[tuple[str, str], ...], ...]
    layout: tuple[str, str]


@dataclass(frozen=True)
class CachedRows:
    """Projections whose outputs an engine caches for each token: keys, values, or a latent vector.

    Attributes:
        pattern: the projections. All their rows are cached, or the last two of their parts (ParallelSplit.parts).
        heads: config key that counts the heads of those rows, which ranks divide; None if every rank caches all.
        fp8: bytes of a token in an FP8 cache; None for one byte a value.
        bf16: bytes of a token in a bfloat16 cache; None for two bytes a value.
        full_heads: config key that counts the heads of layers with full attention, if they have another number.
        keys_as_values: config key that says that layers without a value projection use their keys as values.
        equal_parts: how many parts of equal size the projection has, two of which are cached, where ParallelSplit
            does not say; 0 if it does, or there is one part.
        passes: config keys whose product is how often a token runs through the layer; each pass has a cache.
        later_window: config key of the window, in tokens, of all passes but the first; None if they cache as much.
    """

    pattern: str
    heads: str | None
    fp8: int | None = None
    bf16: int | None = None
    full_heads: str | None = None
    keys_as_values: str | None = None
    equal_parts: int = 0
    passes: tuple[str, ...] = ()
    later_window: str | None = None


@dataclass(frozen=True)
class RecurrentState:
    """What an engine caches for a sequence of any length: the last inputs of a convolution, and a recurrent state.

    Attributes:
        pattern: the convolutions, weights [channels, 1, width], whose last width - 1 inputs are cached. If there are
            none, one weight of each layer that has a state.
        sizes: config keys, nested ones joined by dots, whose product is the number of values of the recurrent state;
            empty if there is none.
        dtype: config key that names the state's dtype.
        default_dtype: its dtype if config.json does not say.
        has_convolution: whether the pattern's modules are convolutions.
    """

    pattern: str
    sizes: tuple[str, ...] = ()
    dtype: str | None = None
    default_dtype: str = "bfloat16"
    has_convolution: bool = True


@dataclass(frozen=True)
class SmoothingRule:
    """Where SmoothQuant and AWQ can rescale channels exactly.

    The output activations of smooth_layer are the input activations of the balance_layers. If the first is divided by
    a factor per channel and the columns of the others are multiplied by it, the model computes the same.

    Attributes:
        smooth_layer: pattern of a norm, or of a projection with a row for each channel. It is matched with the
            balance layers whose `*` parts begin with its own.
        balance_layers: patterns of all modules that read those channels, routers too.
        offset: what the model adds to a norm's weight before it multiplies by it.
        heads: config key that counts the heads of a projection, each of which several heads of the balance layers read
            (grouped-query attention).
        last: whether only the last part of a projection makes these channels (ParallelSplit.parts).
    """

    smooth_layer: str
    balance_layers: tuple[str, ...]
    offset: float = 0.0
    heads: str | None = None
    last: bool = False


@dataclass(frozen=True)
class SlidingWindows:
    """Which decoder layers have sliding-window attention, for a config.json without `layer_types`.

    The rules are those of transformers' configurations, which engines read. Without any field set, all layers have it.

    Attributes:
        every: one layer in this many has full attention; None if none has.
        key: config key that says another number, or a pattern such as "LLLG".
        first: whether the full layer is the first of its period rather than the last.
        flags: config key of a list with 1 for each layer with a window and 0 for each with full attention.
        size: config key of the window, in tokens.
        enabled_by: config key that must be true for any layer to have a window; None if none is needed.
    """

    every: int | None = None
    key: str | None = None
    first: bool = False
    flags: str | None = None
    size: str = "sliding_window"
    enabled_by: str | None = None


@dataclass(frozen=True)
class Refusal:
    """A scheme or format in which engines cannot load an architecture.

    Attributes:
        scheme: name of the scheme; None for all.
        format: its serialization, "fp8" or "compressed-tensors"; None for both.
        why: the reason, as the error says it.
        hint: what to do instead.
        scales: which scales the scheme must have for this to apply: "single" is one for the whole weight, alone or
            above those of groups; "several" is more than one; "not by row" is any that have no row for each row of the
            weight, which includes other tensors beside the codes. None for any.
        experts: whether it applies to routed experts alone.
    """

    scheme: str | None
    format: str | None
    why: str
    hint: str
    scales: Literal["single", "several", "not by row"] | None = None
    experts: bool = False


@dataclass(frozen=True)
class SGLangLimits:
    """What SGLang cannot load of an architecture, though vLLM can.

    Attributes:
        refused: schemes and formats.
        experts: why it cannot load experts one by one, as outputs have them, quantized or not; None if it can.
        plain: patterns of modules that it builds in bfloat16 whatever is stored, or computes as if they were.
        unpacked: patterns of modules for which it does not accept packed codes (several in a byte or an int32).
        head: why it cannot load a quantized output head; None if it can.
        uniform_formats: formats in which it does not find layers by name, so that all must have the same scheme.
        cache: why it fails on scales of the KV cache; None if it loads or ignores them.
        cache_of_ones: whether it fails only if some scale is not 1.
        ignores_cache_scales: whether it silently uses 1 in place of these scales.
    """

    refused: tuple[Refusal, ...] = ()
    experts: str | None = None
    plain: tuple[str, ...] = ()
    unpacked: tuple[str, ...] = ()
    head: str | None = None
    uniform_formats: tuple[str, ...] = ()
    cache: str | None = None
    cache_of_ones: bool = False
    ignores_cache_scales: bool = False


@dataclass(frozen=True)
class Architecture:
    """The registry's entry of one architecture.

    Attributes:
        name: the class in config.json's `architectures`.
        layers: pattern of one decoder layer; its first `*` is the layer's number.
        compress: patterns of modules to quantize.
        keep: modules that are not quantized, with reasons.
        fused: layers that engines fuse.
        splits: how tensor-parallel ranks divide modules.
        experts: routed experts.
        text_config: config.json key that holds the language model's sizes, nested keys joined by dots; None for the
            top level.
        draft_layers: config key that counts the decoder layers, if files hold MTP layers numbered on from them. Those
            are not quantized.
        spellings: groups of equivalent prefixes, in each of which one `*` may stand for a number. Engines build the
            module under one of them, so an ignored module with one prefix is listed under all.
        renames: parts of names, each with the engines' spelling; an ignored module is listed under both.
        beyond: parts of names below a decoder layer, or prefixes with `*` for a layer's number, each with the prefix
            that engines use instead. Its {} becomes the layer's number plus the count of decoder layers.
        refused: schemes and formats in which engines cannot load it.
        towers: modules of which nothing is quantized, and inside which engines use other names. They are listed by
            name and, in the compressed-tensors format, as a regular expression.
        rest: why modules that no pattern matches are kept; None if there must not be any.
        transformers_reads_blocks: whether transformers can load a 128x128 block output. It cannot if it lacks the
            class or uses other names.
        reordered: patterns of modules whose rows an engine reorders at load.
        nameless: patterns of modules that vLLM builds without a name. No list can name them, so vLLM assumes that they
            have the scheme of most layers.
        head_refused: why engines cannot load a quantized output head; None if they can.
        embedding: by what vLLM finds the scheme of the input embedding: its name, or its class if it builds it without
            a name. None if it builds it without a quantization. No other engine loads quantized embeddings.
        cache_refused: why engines cannot load scales of the KV cache; None if they can.
        sglang: what SGLang cannot load.
        cached: what is cached for each token.
        states: what is cached for each sequence.
        windows: which layers have sliding-window attention.
        smoothing: where channels can be rescaled; only what is known to be exact.
        writes: (scheme, key, value): what an output in that scheme says in config.json outside its
            quantization_config, for engines that read it there.
        per_rank: a tensor that published files store as per-rank shards; it is read as separate projections.
        lacks: prefix of the entry's names that the files' names do not have, such as "model." for a base class. Engines
            look modules up with it.
        has_head: whether the class has an output head. Base classes have none, nor do those with the head of a task.
        attends_ahead: whether tokens of a prompt also attend to later ones, so that what follows a text changes it. It
            changes no output, and so no digest of a plan.
        decided: how an entry outside the registry was made (by vLLM, or from names), as a note says it; None for the
            registry's own. Not compared, since a reason that names a file differs from run to run.
    """

    name: str
    layers: str
    compress: tuple[str, ...]
    keep: tuple[Keep, ...]
    fused: tuple[FusedLayers, ...]
    splits: tuple[ParallelSplit, ...]
    experts: tuple[ExpertLayout, ...] = ()
    text_config: str | None = None
    draft_layers: str | None = None
    spellings: tuple[tuple[str, ...], ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    beyond: tuple[tuple[str, str], ...] = ()
    refused: tuple[Refusal, ...] = ()
    towers: tuple[str, ...] = ()
    rest: str | None = None
    transformers_reads_blocks: bool = True
    reordered: tuple[str, ...] = ()
    nameless: tuple[str, ...] = ()
    head_refused: str | None = None
    embedding: Literal["name", "class"] | None = None
    cache_refused: str | None = None
    sglang: SGLangLimits = SGLangLimits()
    cached: tuple[CachedRows, ...] = ()
    states: tuple[RecurrentState, ...] = ()
    windows: SlidingWindows = SlidingWindows()
    smoothing: tuple[SmoothingRule, ...] = ()
    writes: tuple[tuple[str, str, str], ...] = ()
    per_rank: PerRankTensor | None = None
    lacks: str = ""
    has_head: bool = True
    attends_ahead: bool = field(default=False, repr=False)
    decided: str | None = field(default=None, repr=False, compare=False)

    @property
    def repeats(self) -> bool:
        """Whether a token runs through the decoder layers several times."""
        return any(rows.passes for rows in self.cached)

    def without_prefix(self, prefix: str) -> Architecture:
        """Return the entry for files whose names lack a prefix of the entry's names, such as "model."."""
        return replace(self, lacks=prefix, layers=_remove_prefix(self.layers, prefix))

    def with_task_head(self) -> Architecture:
        """Return the entry with the head of a task, which is kept, in place of the output head."""
        return replace(self, keep=(*self.keep, TASK_HEAD), has_head=False)

    def with_quantized(self, kept: Keep) -> Architecture:
        """Return the entry with the output head or the input embedding, HEAD or EMBEDDING, moved from `keep` to
        `compress`.
        """
        keep = tuple(keep for keep in self.keep if keep != kept)
        return replace(self, compress=(*self.compress, kept.pattern), keep=keep)

    def with_layer_count(self, layers: int) -> Architecture:
        """Return the entry with the names of `beyond` added to its spellings.

        Args:
            layers: how many decoder layers config.json counts.
        """
        spellings = (
            (self.absolute(part).replace("*", str(layer)), prefix.format(layers + layer))
            for part, prefix in self.beyond
            for layer in range(layers)
        )
        return replace(self, spellings=(*self.spellings, *spellings))

    def absolute(self, pattern: str) -> str:
        """Complete a pattern that is relative to a decoder layer, and take from others the prefix that files lack.

        Args:
            pattern: of modules, such as "lm_head" or ".mlp.up_proj", which becomes "model.layers.*.mlp.up_proj".
        """
        if pattern.startswith("."):
            return self.layers + pattern
        return _remove_prefix(pattern, self.lacks)

    def compile(self, pattern: str) -> re.Pattern[str]:
        """Return the regular expression of a pattern, relative or not."""
        return compile_pattern(self.absolute(pattern))

    def names_of(self, module: str) -> list[str]:
        """Return a module's name, followed by the other names that engines have for it."""
        names = dict.fromkeys([module, self.lacks + module])
        for name in list(names):
            for group in self.spellings:
                match = next(filter(None, (_match_prefix(prefix, name) for prefix in group)), None)
                if match is not None:
                    number, rest = match
                    names |= {prefix.replace("*", number) + rest: None for prefix in group}
            for part, engine_part in self.renames:
                names[name.replace(part, engine_part)] = None
        return list(names)

    def extra_config(self, scheme: str | None, config: Mapping[str, Any]) -> dict[str, str]:
        """Return the keys that an output's config.json has for its weights beside quantization_config.

        Args:
            scheme: name of the weights' scheme; None if they are not quantized.
            config: the source's config.json.
        """
        extra = {key: value for name, key, value in self.writes if name == scheme}
        if self.per_rank and self.per_rank.layout[0] in config:
            extra |= [self.per_rank.layout]
        return extra


def _match_prefix(prefix: str, module: str) -> tuple[str, str] | None:
    """Match a prefix that may have one `*`: the number in its place, and the rest of the name; None if none."""
    head, star, tail = prefix.partition("*")
    if not module.startswith(head):
        return None
    rest = module.removeprefix(head)
    if not star:
        return "", rest
    number = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    rest = rest.removeprefix(number)
    if not number or not rest.startswith(tail):
        return None
    return number, rest.removeprefix(tail)


def _remove_prefix(pattern: str, prefix: str) -> str:
    """Take a prefix away from a pattern: "model." from "{model,llm.model}.norm" gives "{,llm.model.}norm"."""
    if not prefix or not pattern.startswith("{"):
        return pattern.removeprefix(prefix)
    inside, _, rest = pattern[1:].partition("}")
    choices = inside.split(",")
    if prefix.removesuffix(".") in choices and rest.startswith("."):
        choices = [f"{choice}." for choice in choices]
        rest = rest.removeprefix(".")
    names = dict.fromkeys(choice.removeprefix(prefix) for choice in choices)
    return f"{{{','.join(names)}}}{rest}"


EMBEDDING = Keep(
    "{model,language_model.model,model.language_model,model.language_model.model,model.text_model,thinker.model,llm.model,text_model.model}"
    ".embed_tokens",
    "embedding",
    divided=True,
)
HEAD = Keep(
    "{lm_head,language_model.lm_head,model.language_model.lm_head,thinker.lm_head,llm.lm_head,text_model.lm_head}",
    "output head",
    divided=True,
)
# Of sequence and token classifiers and of reward models, as transformers, vLLM (models/adapters.py, internlm2.py),
# SGLang (models/llama_classification.py, llama_reward.py, internlm2_reward.py) and trl name them.
TASK_HEAD = Keep(
    "{score,classifier,classification_head,v_head,value_head,reward_head,rm_head,regression_layer,weights}.**",
    "task head",
)
ROUTER = "router"
TOWER = "vision or audio"
MTP_LAYER = "MTP layer"
# Engines never build these as a quantized Linear, in the ignore list or not.
NOT_LINEAR = (EMBEDDING.why, HEAD.why)
# Never quantized, even if the source has them so: engines build most routers without quantization.
NEVER_QUANTIZED = (*NOT_LINEAR, ROUTER)


# Base classes have it without "model." or the like.
_EMBEDDINGS = compile_any([EMBEDDING.pattern, "{embed_tokens,language_model.embed_tokens,text_model.embed_tokens}"])


class ModuleRule(NamedTuple):
    """What an entry says of a module.

    Attributes:
        name_template: the module's name with `*` for its numbers, "model.layers.*.mlp.up_proj".
        patterns: how many patterns of compress, experts and keep match it; 1 if the entry is right.
        compress: whether it may be quantized.
        stack: for a tensor of stacked experts: its layout and which of the layout's stacks it is; None for others.
        keep: why it is not quantized; None if it may be.
        fused: pattern of the layers that engines fuse it with; None if they do not.
        fused_depth: how many segments of its name follow the module that holds the fused layer: 1, or 2 for
            "indexer.index_qk_proj" fused with q_proj; 1 if it is not fused.
        expert_depth: how many segments of its name follow the path of its experts: 2 in
            "model.layers.0.mlp.experts.7.w1"; 0 if it does not belong to an expert.
        split: how tensor-parallel ranks divide it; None if they do not.
        fused_names: last segments of the engines' names for the fused layer, which the ignore list has too.
        vllm_segment: last segment of the name that vLLM looks up in place of the module's own; None for its own.
        reordered: whether an engine reorders its rows at load.
        nameless: whether vLLM builds it without a name.
        plain: whether SGLang builds it in bfloat16.
        unpacked: whether SGLang accepts no packed codes of it.
        divided: whether each tensor-parallel rank holds a part of it rather than a copy.
    """

    name_template: str
    patterns: int
    compress: bool
    stack: tuple[ExpertLayout, StackedExperts] | None
    keep: str | None
    fused: str | None
    fused_depth: int
    expert_depth: int
    split: ParallelSplit | None
    fused_names: tuple[str, ...]
    vllm_segment: str | None
    reordered: bool
    nameless: bool
    plain: bool
    unpacked: bool
    divided: bool


class ModuleRules:
    """The rules of an entry for modules, with its patterns compiled and results cached.

    Args:
        model: the entry.
    """

    def __init__(self, model: Architecture) -> None:
        self.model = model
        self._compress = compile_any(map(model.absolute, model.compress))
        self._reordered = compile_any(map(model.absolute, model.reordered))
        self._nameless = compile_any(map(model.absolute, model.nameless))
        self._plain = compile_any(map(model.absolute, model.sglang.plain))
        self._unpacked = compile_any(map(model.absolute, model.sglang.unpacked))

        self._stacks = [
            (model.compile(f"{experts.place}.{stacked.name}"), (experts, stacked))
            for experts in model.experts
            for stacked in experts.stacked
        ]
        self._keeps = [(model.compile(keep.pattern), keep) for keep in model.keep]
        self._fused = [
            (model.compile(fused.pattern), model.compile(_fused_parent(fused.pattern)), fused) for fused in model.fused
        ]
        self._splits = [(model.compile(split.pattern), split) for split in model.splits]
        self._experts = [model.compile(experts.path) for experts in model.experts]

        # By the template of the parent, then by the last segment. Neighbours in a checkpoint have the same parent.
        self._families: dict[str, dict[str, ModuleRule]] = {}
        self._parent = ""
        self._siblings = self._families.setdefault("", {})

    def rule(self, module: str) -> ModuleRule:
        """Return the rule of a module."""
        parent, _, last = module.rpartition(".")
        if parent != self._parent:
            self._parent = parent
            self._siblings = self._families.setdefault(template(parent), {})
        rule = self._siblings.get(last)
        if rule is None:
            is_number = parent and last.isdecimal() and len(last) <= MAX_DIGITS
            rule = (self._siblings.get("*") if is_number else None) or self._find_rule(module)
            self._siblings["*" if is_number else last] = rule
        return rule

    def _find_rule(self, module: str) -> ModuleRule:
        compress = self._compress.fullmatch(module) is not None
        stacks = [stack for pattern, stack in self._stacks if pattern.fullmatch(module)]
        keeps = [keep for pattern, keep in self._keeps if pattern.fullmatch(module)]
        fused = [(parent, layers) for pattern, parent, layers in self._fused if pattern.fullmatch(module)]

        # vLLM looks up stacks that are siblings of the experts' module by that module's name.
        vllm_segments = [layers.listed_as for _, layers in fused]
        vllm_segments += [experts.path.rpartition(".")[2] for experts, _ in stacks if experts.beside]
        split = next((split for pattern, split in self._splits if pattern.fullmatch(module)), None)

        return ModuleRule(
            name_template=template(module),
            patterns=compress + len(stacks) + len(keeps),
            compress=compress,
            stack=next(iter(stacks), None),
            keep=next((keep.why for keep in keeps), None),
            fused=next((layers.pattern for _, layers in fused), None),
            fused_depth=_depth_below(module, [parent for parent, _ in fused[:1]]) or 1,
            expert_depth=_depth_below(module, self._experts),
            split=split,
            fused_names=tuple(dict.fromkeys(name for _, layers in fused for name in layers.names)),
            vllm_segment=next(filter(None, vllm_segments), None),
            reordered=self._reordered.fullmatch(module) is not None,
            nameless=self._nameless.fullmatch(module) is not None,
            plain=self._plain.fullmatch(module) is not None,
            unpacked=self._unpacked.fullmatch(module) is not None,
            divided=split is not None or is_table(module) or any(keep.divided for keep in keeps),
        )

    def experts(self, module: str) -> str | None:
        """Return the path of the experts that a module belongs to, "model.layers.0.mlp.experts"; None if none."""
        depth = self.rule(module).expert_depth
        if depth == 0:
            return None
        return module.rsplit(".", depth)[0]

    def vllm_name(self, module: str) -> str:
        """Return the name by which vLLM looks a module up: its own, that of the layer it is fused into, or for stacked
        experts that lie beside the experts' module, that of this module.
        """
        rule = self.rule(module)
        if rule.vllm_segment is None:
            return module
        return f"{module.rsplit('.', rule.fused_depth)[0]}.{rule.vllm_segment}"

    def fused_groups(self, modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Group modules that engines fuse.

        Args:
            modules: names of the modules that exist.

        Returns:
            For each module that engines fuse with others, all existing members of its group, itself included, in the
            order given.
        """
        # By pattern and parent.
        groups: dict[tuple[str, str], tuple[str, ...]] = {}
        for module in modules:
            rule = self.rule(module)
            if rule.fused is not None:
                key = rule.fused, module.rsplit(".", rule.fused_depth)[0]
                groups[key] = (*groups.get(key, ()), module)
        return {module: members for members in groups.values() for module in members}

    def engine_names(self, modules: Iterable[str]) -> list[str]:
        """Return the names of modules and of the layers they are fused into, each in every engine's spelling."""
        names: dict[str, None] = {}
        for module in modules:
            names[module] = None
            rule = self.rule(module)
            for segment in rule.fused_names:
                names[f"{module.rsplit('.', rule.fused_depth)[0]}.{segment}"] = None
        return list(dict.fromkeys(itertools.chain(names, *map(self.model.names_of, names))))


def _fused_parent(pattern: str) -> str:
    """What stands before a pattern's last alternatives: ".self_attn" of ".self_attn.{q,k,v}_proj"."""
    return pattern[: pattern.rindex("{")].rpartition(".")[0]


def _depth_below(module: str, parents: Iterable[re.Pattern[str]]) -> int:
    """How many segments of a module's name follow the longest prefix that a parent matches; 0 if none does."""
    segments = module.split(".")
    for depth in range(1, len(segments)):
        prefix = ".".join(segments[:-depth])
        if any(pattern.fullmatch(prefix) for pattern in parents):
            return depth
    return 0


def is_head(module: str) -> bool:
    """Return whether a module is an output head.

    Args:
        module: full name of the module: "lm_head".
    """
    return compile_pattern(HEAD.pattern).fullmatch(module) is not None


def is_embedding(module: str) -> bool:
    """Return whether a module is an input embedding.

    Args:
        module: full name of the module: "model.embed_tokens".
    """
    return _EMBEDDINGS.fullmatch(module) is not None


def is_table(module: str) -> bool:
    """Return whether a module is an output head or an input embedding, which have a row for each token.

    Args:
        module: full name of the module: "lm_head".
    """
    return is_head(module) or is_embedding(module)


# A size that is not compared.
ANY = "*"
PATH = Path(__file__).with_name("class_tensors.jsonl")
# The package may lie in an archive, as on the page that plans in a browser.
_FILE = files(__package__) / PATH.name


class TensorRule(NamedTuple):
    """What a class says of the tensors with one name template.

    Attributes:
        shape: the size of each axis.
        repeats: how many there are, of experts and the like; None if there is one.
        conditions: keys of config.json, each with the truth that it must have for the tensor to be there.
    """

    shape: tuple[str, ...]
    repeats: str | None
    conditions: tuple[tuple[str, bool], ...]


class LayerList(NamedTuple):
    """A list of layers.

    Attributes:
        length: the size that counts its layers.
        kinds: for each kind of layer, its tensors by their names below the layer.
        choices: for children of a layer, such as "mlp", a key that says something of each layer, and the places in
            `kinds` of those that each value goes with. "layer_types" is a list with a value for each layer,
            "moe_layers@1" one of the numbers of some, from 1 on, "dense_layers<" the size that counts those that come
            first, and "frequency%" the distance between some.
    """

    length: str
    kinds: tuple[dict[str, TensorRule], ...]
    choices: dict[str, tuple[str, dict[str, list[int]]]]


class ClassTensors(NamedTuple):
    """The tensors of a class.

    Attributes:
        name: the class.
        outside: tensors outside of all lists, by name.
        lists: lists of layers, by the prefix of their names: "model.layers".
        defaults: the truth of keys that config.json need not say.
        parts: the model types of the parts of config.json, which may be other models, by the part's key.
        derived: sizes of keys that config.json need not say.
        aliases: other names of keys.
        is_built: whether transformers builds the class. If not, some of its tensors are only known by name.
    """

    name: str
    outside: dict[str, TensorRule]
    lists: dict[str, LayerList]
    defaults: dict[str, bool]
    parts: dict[str, str]
    derived: dict[str, str]
    aliases: dict[str, str]
    is_built: bool


@cache
def find_class_tensors(name: str) -> ClassTensors | None:
    """Return the tensors of a class; None if the file has none of that name."""
    start = f'{{"class":"{name}",'
    # The file has all classes, and only one of its lines is parsed.
    with _FILE.open(encoding="utf-8") as file:
        line = next((line for line in file if line.startswith(start)), None)
    if line is None:
        return None
    data = json.loads(line)
    sizes: list[str] = data["sizes"]

    def rules(entries: dict[str, Any]) -> dict[str, TensorRule]:
        return {
            name: TensorRule(
                tuple(sizes[size] for size in shape),
                None if repeats is None else sizes[repeats],
                tuple((key, truth) for key, truth in conditions),
            )
            for name, (shape, repeats, conditions) in entries.items()
        }

    lists = {
        prefix: LayerList(sizes[length], tuple(map(rules, kinds)), choices)
        for prefix, (length, kinds, choices) in data["lists"].items()
    }
    return ClassTensors(
        name,
        rules(data["outside"]),
        lists,
        **{key: data[key] for key in ("defaults", "parts", "derived", "aliases")},
        is_built=data["built"],
    )
