"""What the registry can say of an architecture: types without data.

Patterns (see patterns.py) name modules as the checkpoint names them, that is tensor names without
`.weight`. One that begins with a dot continues the entry's `layers` pattern, which matches one decoder
layer. Every tensor of two or more axes must match exactly one of compress, experts or keep; all others
are copied. Facts about an engine name the file they were read from, of the version in version.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
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
class FusedLayers:
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
class StackedExperts:
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
class ExpertLayout:
    """The routed experts of a layer. All of a layer's experts share status.

    Attributes:
        path: the module that holds one layer's experts.
        stacked: tensors to be split into `<path>.<expert>.<part>.weight`, a 2-D [out, in] tensor each.
        beside: the stacked tensors lie beside the experts' module, not below it.
        transformers: whether transformers finds them once they are split.
    """

    path: str
    stacked: tuple[StackedExperts, ...] = ()
    beside: bool = False
    transformers: bool = True

    @property
    def place(self) -> str:
        """The module that holds the stacked tensors."""
        return self.path.rsplit(".", 1)[0] if self.beside else self.path


@dataclass(frozen=True)
class ParallelSplit:
    """How tensor parallelism divides modules.

    Attributes:
        pattern: which modules.
        axis: "out" (column parallel) or "in" (row parallel).
        heads: config key that counts the heads along that axis; None where any division goes.
        replicated: heads are copied where there are fewer than ranks (key and value heads).
        parts: of a tensor that holds several layers one below the other, each of which is divided: the config
            key that the rows of each are in proportion to, or None where all are equal.
        where: other parts, by the config key that must be true for them; the first that is counts. True is one.
        turns: whether a head's queries, key and value lie together, and the parts so by turns, which an engine sorts
            as it loads the layer: what shares a scale must then lie within a head.
        turns_all: whether it does so to every tensor of the layer, and fails on those that have no rows for each head,
            as a single scale.
        turns_rows: whether it counts as many rows as the weight has in every tensor of the layer, and fails on those
            that have fewer.
    """

    pattern: str
    axis: str
    heads: str | None = None
    replicated: bool = False
    parts: tuple[str | None, ...] = ()
    where: tuple[tuple[str, tuple[str | None, ...]], ...] = ()
    turns: bool = False
    turns_all: bool = False
    turns_rows: bool = False


@dataclass(frozen=True)
class PerRankTensor:
    """A tensor in FP8 blocks that holds several projections, in a part for each of some ranks with scales of its own.

    Attributes:
        pattern: the tensor's module.
        members: the projections, in the order that a part has their rows in, as they are named one by one.
        ranks: config key that counts the parts.
        sizes: config keys that count the heads of each member, and the rows of a head; those of several kinds of
            layers, of which the ones count that account for all rows.
        layout: config key that says that files hold such tensors, and its value where they hold the projections one by
            one, as outputs do.
    """

    pattern: str
    members: tuple[str, ...]
    ranks: str
    sizes: tuple[tuple[tuple[str, str], ...], ...]
    layout: tuple[str, str]


@dataclass(frozen=True)
class CachedRows:
    """Projections of which an engine keeps, for each token of a sequence, what they make of it.

    Attributes:
        pattern: which modules; the numbers kept of a token are as many as they have rows, or the last two of their
            parts (Split.parts).
        heads: config key that counts the heads those rows divide into; None if every rank keeps all of them.
        fp8: bytes of a token in an FP8 cache; None for one byte a number.
        bf16: bytes of a token in a bfloat16 cache; None for two bytes a number.
        full_heads: config key that counts the heads of layers that attend to everything, where that is another.
        keys_as_values: config key that says that layers without a projection of values make them of their keys.
        two_of: how many parts of equal size such a projection has, two of which are kept, where Split does not say.
        times: config keys whose product is how often a token goes through the layer; all of it is kept.
        again: config key of the tokens that all but the first time keep at most; None if they keep what that does.
    """

    pattern: str
    heads: str | None
    fp8: int | None = None
    bf16: int | None = None
    full_heads: str | None = None
    keys_as_values: str | None = None
    two_of: int = 0
    times: tuple[str, ...] = ()
    again: str | None = None


@dataclass(frozen=True)
class RecurrentState:
    """What an engine keeps of a sequence, however long it is: the last inputs of a convolution, and a recurrent state.

    Attributes:
        pattern: the convolutions, weights [channels, 1, width], of which the last width - 1 inputs are kept; where
            there are none, one weight of each layer that has a state.
        sizes: config keys, joined by dots where one lies inside another, whose product is the size of the recurrent
            state; empty if there is none.
        dtype: config key that names its dtype.
        usual: its dtype where config.json says nothing.
        convolved: whether the pattern's modules are convolutions.
    """

    pattern: str
    sizes: tuple[str, ...] = ()
    dtype: str | None = None
    usual: str = "bfloat16"
    convolved: bool = True


@dataclass(frozen=True)
class SmoothingRule:
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
class SlidingWindows:
    """Which decoder layers attend to a window of the last tokens only, where config.json has no `layer_types`.

    As transformers has it, whose configurations engines read; all of them, unless something here says otherwise.

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


@dataclass(frozen=True)
class SGLangLimits:
    """What SGLang does not load of an architecture, though vLLM does.

    Attributes:
        refused: schemes and formats.
        plain: modules that it builds in bfloat16, whatever is stored, or computes as if they were.
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
class Architecture:
    """One architecture.

    Attributes:
        name: the class in config.json's `architectures`.
        layers: pattern of one decoder layer.
        compress: modules to quantize.
        keep: modules to copy, with reasons.
        fused: sets that engines merge.
        experts: routed experts.
        splits: tensor parallelism.
        text_config: config.json key under which the language model's sizes are, or several joined by dots; None for
            the top level.
        draft_layers: config key that counts the decoder layers, where files hold more: those beyond are draft
            layers (multi-token prediction), which stay as they are. The number is `layers`'s first `*`.
        spellings: groups of equivalent prefixes, in each of which one `*` may stand for a number. A listed module whose
            name begins with one prefix of a group is listed under the others too, because engines build the module
            under another of these names.
        renames: parts of names, and how an engine's names have it; a listed module is listed under both.
        beyond: parts of names below a decoder layer, or beginnings of names with `*` for a layer's number, and how an
            engine's names begin instead: {} is that number counted on from how many layers there are.
        refused: schemes and formats that engines cannot load it in.
        towers: modules of which nothing is quantized and inside of which engines have names of their own; listed as
            they are and, in the compressed-tensors format, as an expression.
        rest: why modules that no pattern covers are kept; None where there may not be any.
        transformers_reads_blocks: whether transformers loads a 128x128 block output of this architecture: not where it
            has no class of it, or other names.
        reordered: modules whose rows an engine puts in another order as it loads them.
        nameless: modules that vLLM builds without a name, and so finds in no list: it takes them to be stored as most
            layers are.
        head_refused: why engines load no quantized output head; None if they do.
        cache_refused: why engines load no scales of keys and values; None if they do.
        sglang: what SGLang does not load.
        cached: what is kept of each token.
        states: what is kept of each sequence.
        windows: which layers forget what is long ago.
        folds: where layers have their inputs from; nothing of what is not known to be exact.
        writes: scheme, key and value: what config.json says in that scheme beside its quantization_config, for engines
            that read it there.
        ranked: what files hold in parts for ranks, and is read as if it were not.
        decided: who decided all this, for whom a plan is made by it, where the registry did not. No part of the
            decision: a reason that names a file differs from run to run.
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
    cache_refused: str | None = None
    sglang: SGLangLimits = SGLangLimits()
    cached: tuple[CachedRows, ...] = ()
    states: tuple[RecurrentState, ...] = ()
    windows: SlidingWindows = SlidingWindows()
    folds: tuple[SmoothingRule, ...] = ()
    writes: tuple[tuple[str, str, str], ...] = ()
    ranked: PerRankTensor | None = None
    decided: str | None = field(default=None, repr=False, compare=False)

    @property
    def repeats(self) -> bool:
        """Whether a token goes through its layers several times."""
        return any(what.times for what in self.cached)

    def with_head(self) -> Architecture:
        """The same with the output head among what is quantized."""
        keep = tuple(keep for keep in self.keep if keep != HEAD)
        return replace(self, compress=(*self.compress, HEAD.pattern), keep=keep)

    def counted(self, layers: int) -> Architecture:
        """The same with the names of what engines count on from so many decoder layers among its spellings."""
        patterns = absolute_patterns(self, (part for part, _ in self.beyond))
        others = [other for _, other in self.beyond]
        found = (
            (pattern.replace("*", str(layer)), other.format(layers + layer))
            for pattern, other in zip(patterns, others, strict=True)
            for layer in range(layers)
        )
        return replace(self, spellings=(*self.spellings, *found)) if self.beyond else self

    def names_of(self, module: str) -> list[str]:
        """A module's name, and the others that engines know it by."""
        found = {module: None}
        for group in self.spellings:
            begins = next(filter(None, (_begins(prefix, module) for prefix in group)), None)
            if begins is not None:
                number, rest = begins
                found |= {other.replace("*", number) + rest: None for other in group}
        for part, other in self.renames:
            found[module.replace(part, other)] = None
        return list(found)

    def written(self, scheme: str | None, config: Mapping[str, Any]) -> dict[str, str]:
        """What config.json says of how weights are stored beside its quantization_config.

        Args:
            scheme: of the weights; None if they are not quantized.
            config: the config.json that the output's is made of.
        """
        found = {key: value for name, key, value in self.writes if name == scheme}
        if self.ranked and self.ranked.layout[0] in config:
            found |= [self.ranked.layout]
        return found

    def refusal(self, scheme: str, format: str) -> Refusal | None:
        """What forbids a scheme in a format; None if nothing does."""
        return _first(self.refused, scheme, format)


def _begins(prefix: str, module: str) -> tuple[str, str] | None:
    """The number that stands for the `*` of a prefix of a name, and the rest of that; None if it does not begin so."""
    head, star, tail = prefix.partition("*")
    if not module.startswith(head):
        return None
    rest = module.removeprefix(head)
    if not star:
        return "", rest
    number = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    rest = rest.removeprefix(number)
    return (number, rest.removeprefix(tail)) if number and rest.startswith(tail) else None


def _first(refused: tuple[Refusal, ...], scheme: str, format: str) -> Refusal | None:
    found = (one for one in refused if one.scheme in (None, scheme) and one.format in (None, format))
    return next(found, None)


def absolute_patterns(model: Architecture, patterns: Iterable[str]) -> list[str]:
    """Patterns of an entry with those that begin with a dot continued from its `layers`."""
    return [model.layers + pattern if pattern.startswith(".") else pattern for pattern in patterns]


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
ROUTER = "router"
DRAFT = "draft layer"
# What engines never build as a quantized Linear, listed or not.
NOT_LINEAR = (EMBEDDING.why, HEAD.why)
# What stays unquantized in whatever way a source has it: of routers, engines build most without quantization.
NEVER_QUANTIZED = (*NOT_LINEAR, ROUTER)
