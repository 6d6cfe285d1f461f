"""An entry for a checkpoint whose class has none, as an engine builds that class.

built(checkpoint, Path("vllm/bin/python")).decided      # "decided as vLLM VERSION builds MyForCausalLM: ..."

The engine is asked about a few decoder layers of each kind, at their real sizes, of which it holds none in memory. What
it would do to a layer that no entry can say, leaves that layer as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import PlanError
from ..files.checkpoint import Checkpoint
from ..files.small_files import short_repr
from ..patterns import compile_pattern, template
from ..plan.sort import mtp_layer_finder
from ..registry.architecture import (
    EMBEDDING,
    HEAD,
    ROUTER,
    Architecture,
    CachedRows,
    ExpertLayout,
    FusedLayers,
    Keep,
    ParallelSplit,
    StackedExperts,
)
from ..registry.parts import FUSED_NAMES, HEADS, KV_HEADS
from ..registry.rules import ModuleRules, is_head
from ..weights.find import decoded_view
from .client import EngineAnswer, EngineFailed, EngineLayer, Question, ask_engine
from .modules import (
    EMBEDDING_LAYER,
    HEAD_LAYER,
    UNKNOWN,
    EngineModule,
    decoder_layer_pattern,
    engine_modules,
    is_tower,
    routed_parts,
)

# An honest answer takes a quarter of a minute, most of which is Python importing vLLM.
SECONDS = 240
# Decoder layers of each kind that are asked about, and tensors of them: more than any published model has there.
OF_EACH, MOST_TENSORS, MOST_LAYERS = 3, 60_000, 2_000
# What is narrower is a gate, or as many numbers as there are heads: 4 bits of it save nothing, and entries keep it.
NARROW = 128
LAYERS = "num_hidden_layers"
# vLLM multiplies it out as it loads (layers/quantization/utils/quant_utils.py:511).
DECODED = ("kv_b_proj",)
# Of linear attention, which ranks divide by them.
STATE_HEADS = "linear_num_key_heads"
WORDS = re.compile(r"[\w.-]+")
FEW = "narrow"
TURNED = "the engine puts its rows in another order"
PARTS = "the engine cuts it into parts of sizes that no rule tells"
APART = "the engine joins it with what lies elsewhere"
SQUARE = "a stack of experts whose sizes do not tell which axis is which"
STACKED = "a stack of experts that the engine does not load one by one"
BESIDE = "not one of the decoder's layers"
ADD = "add an entry to openquant/architectures (README: Adding an architecture)"
UNREAD = "the engine loads it into nothing"


def build_architecture(checkpoint: Checkpoint, interpreter: Path) -> Architecture:
    """An entry made of what vLLM says of a checkpoint.

    Args:
        checkpoint: the opened source.
        interpreter: a Python that has vLLM.

    Raises:
        EngineFailed: it cannot build the class, or gives no answer.
        PlanError: it would quantize what has to stay as it is, whatever config.json lists.
        SourceError: the source is quantized, and its scales do not belong to its codes.
    """
    (found,) = build_architectures([checkpoint], interpreter)
    if isinstance(found, PlanError):
        raise found
    return found


def build_architectures(
    checkpoints: Sequence[Checkpoint], interpreter: Path, *paths: Path
) -> list[Architecture | PlanError]:
    """The same of several at once, which vLLM is imported for but once or twice; an error in place of what failed.

    Args:
        checkpoints: the opened sources.
        interpreter: a Python that has vLLM.
        paths: directories for its import path.
    """
    asking = [_question(checkpoint) for checkpoint in checkpoints]
    good = [one for one in asking if isinstance(one, Question)]
    answers = iter(ask_engine(good, interpreter, *paths, seconds=SECONDS) if good else ())
    found: list[_Making | EngineFailed] = []
    for checkpoint, one in zip(checkpoints, asking, strict=True):
        if isinstance(one, Question):
            said = next(answers)
            found.append(_Making(checkpoint.architecture, said, one) if isinstance(said, EngineAnswer) else said)
        else:
            found.append(one)
    # An output has its experts one by one, which not every class that loads stacks takes.
    stacked = [making for making in found if isinstance(making, _Making) and making.stacks]
    again = [Question(making.question.config, making.split()) for making in stacked]
    singles = ask_engine(again, interpreter, *paths, seconds=SECONDS) if again else []
    for making, split, said in zip(stacked, again, singles, strict=True):
        making.hold_single({} if isinstance(said, EngineFailed) else engine_modules(said, split.shapes))
    return [_entry(one) if isinstance(one, _Making) else one for one in found]


def _question(checkpoint: Checkpoint) -> Question | EngineFailed:
    """What an engine is asked about a checkpoint, or why it is not."""
    seen, _ = decoded_view(checkpoint)
    config = _own(seen.config)
    count = _text(config)[1].get(LAYERS)
    if isinstance(count, int) and count > MOST_LAYERS:
        return EngineFailed(f"config.json counts {short_repr(count)} layers", "nobody builds so many")
    shapes = sample_layers({info.name: info.shape for info in seen.tensors.values()})
    if len(shapes) > MOST_TENSORS:
        return EngineFailed(f"{len(shapes)} of its tensors are not alike", "no engine loads so many")
    return Question(config, shapes)


def _entry(making: _Making) -> Architecture | PlanError:
    try:
        return making.entry()
    except PlanError as error:
        return error


def _own(config: Any) -> Any:
    """A configuration without what names code of its own, or how weights are stored."""
    if isinstance(config, dict):
        return {key: _own(value) for key, value in config.items() if key not in ("auto_map", "quantization_config")}
    return [_own(value) for value in config] if isinstance(config, list) else config


def _text(config: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """Where the language model's sizes are, as Model.text_config says it, and what is there."""
    if "num_hidden_layers" in config:
        return None, config
    for key in ("text_config", *config):
        value = config.get(key)
        if isinstance(value, dict) and {"num_hidden_layers", "num_attention_heads"} <= value.keys():
            return key, value
        below = value.get("text_config") if isinstance(value, dict) else None
        if isinstance(below, dict) and "num_hidden_layers" in below:
            return f"{key}.text_config", below
    return None, config


def sample_layers(shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """The tensors of a few layers of each kind: of those that hold tensors of the same names and shapes."""
    found: dict[str, Sequence[int]] = {}
    numbered: dict[tuple[str, int], dict[str, Sequence[int]]] = {}
    for name, shape in shapes.items():
        first = re.match(r"([^0-9].*?\.|)(\d{1,9})(\..*)", name)
        if first is None:
            found[name] = shape
        else:
            numbered.setdefault((first[1], int(first[2])), {})[name] = shape
    kinds: dict[tuple[str, frozenset[Any]], list[int]] = {}
    for (place, number), held in sorted(numbered.items(), key=lambda one: one[0]):
        start = len(f"{place}{number}")
        kind = frozenset((name[start:], tuple(shape)) for name, shape in held.items())
        kinds.setdefault((place, kind), []).append(number)
    for (place, _), numbers in kinds.items():
        for number in {*numbers[: OF_EACH - 1], numbers[-1]}:
            found |= numbered[place, number]
    # In their order, which is that of loading.
    return {name: shape for name, shape in shapes.items() if name in found}


class _Module(NamedTuple):
    """One module that could be quantized, or why it stays."""

    name: str
    told: EngineModule
    why: str | None


class _Making:
    """One call of `build_architecture`.

    Args:
        name: the class.
        asked: what the engine says.
        question: of what.

    Attributes:
        stacks: templates of the stacks of experts that it loads.
    """

    def __init__(self, name: str, asked: EngineAnswer, question: Question) -> None:
        self.name, self.asked, self.question = name, asked, question
        shapes = self.shapes = question.shapes
        self.inner, text = _text(question.config)
        self.text = text
        self.told = engine_modules(asked, shapes)
        self.layers = decoder_layer_pattern(self.told)
        self.routers = {layer.experts for layer in asked.layers if layer.experts}
        # By template: the first of each, and why any of them stays as it is.
        self.kinds: dict[str, _Module] = {}
        drafted = mtp_layer_finder(Architecture(name, self.layers, (), (), (), (), draft_layers=LAYERS), dict(text))
        self.mixers = {
            name.removesuffix(".weight").rpartition(".")[0] for name, shape in shapes.items() if _is_conv(shape)
        }
        for module, one in self.told.items():
            if drafted(module):
                continue
            alike, why = template(module), self._stays(module, one)
            if alike not in self.kinds or (why and self.kinds[alike].why is None):
                self.kinds[alike] = _Module(module, one, why)
        # Of each template all that are joined with it.
        self.sets: dict[str, tuple[str, ...]] = {}
        self._together()
        self.attention = {
            _parent(alike)
            for alike, (name, one, _) in self.kinds.items()
            if name.rpartition(".")[2] in DECODED or (one.layer is not None and "QKVParallelLinear" in one.layer.kinds)
        }
        left = {
            alike: (one.name, one.told)
            for alike, one in self.kinds.items()
            if one.why is None and one.told.layer is not None and one.told.layer.experts
        }
        # By template.
        self.stacks = [alike for alike, (name, _) in left.items() if len(self._shape(name)) > 2]
        hidden = text.get("hidden_size")
        parts = routed_parts(left, shapes, hidden if isinstance(hidden, int) else 0)
        self.experts = [replace(part, keep=()) for part in parts.values()]
        for alike in self.stacks:
            if alike not in self._stacked():
                self.kinds[alike] = self.kinds[alike]._replace(why=SQUARE)

    def _shape(self, module: str) -> Sequence[int]:
        return self.shapes.get(f"{module}.weight") or self.shapes[module]

    def _stacked(self) -> dict[str, tuple[ExpertLayout, StackedExperts]]:
        """By template the stacks that are cut into experts."""
        return {
            f"{experts.place}.{stacked.name}": (experts, stacked)
            for part in self.experts
            for experts in part.experts
            for stacked in experts.stacked
        }

    def _stays(self, module: str, one: EngineModule) -> str | None:
        """Why a module stays as it is; None if it may be quantized."""
        layer, shape = one.layer, self._shape(module)
        if is_head(module) or (layer is not None and HEAD_LAYER in layer.kinds):
            return HEAD.why
        if layer is not None and EMBEDDING_LAYER in layer.kinds:
            return EMBEDDING.why
        if not WORDS.fullmatch(module):
            return "its name is none that a rule can say"
        if not one.read:
            return UNREAD
        if not template(module).startswith(f"{self.layers}."):
            return "vision or audio" if is_tower(module) else BESIDE
        if layer is None or not layer.linear:
            return UNKNOWN
        if layer.experts:
            return None if len(shape) in (2, 3) and min(shape) >= 1 else UNKNOWN
        if shape[0] in self.routers and not one.fused:
            return ROUTER
        if len(shape) != 2 or module in self.shapes:
            return UNKNOWN
        if one.reordered:
            return TURNED
        if min(shape) < NARROW:
            return FEW
        if module.rpartition(".")[2] in DECODED:
            return "engines decode it when they load it"
        if _cut(layer, one) and module.rpartition(".")[0] in self.mixers:
            return "inputs of a convolution or a state-space model"
        return PARTS if _cut(layer, one) and self._parts(layer, shape) is None else None

    def _parts(self, layer: EngineLayer, shape: Sequence[int]) -> tuple[str | None, ...] | None:
        """As Split.parts says it: what a single tensor holds that the engine cuts apart; None if that is not known."""
        if "QKVParallelLinear" in layer.kinds:
            counts = [self.text.get(key) for key in (HEADS, KV_HEADS)]
            heads, pairs = (count if isinstance(count, int) and count > 0 else 0 for count in counts)
            whole = heads and pairs and shape[0] % (heads + 2 * pairs) == 0
            return (HEADS, KV_HEADS, KV_HEADS) if whole else None
        alike = len({*layer.sizes}) == 1 and sum(layer.sizes) == shape[0]
        return (None,) * len(layer.sizes) if alike else None

    def _together(self) -> None:
        """What is joined, in any layer, has one fate; and stays as it is where no rule can say what is joined."""
        for module in self.told:
            members = [template(member) for member in self.told[module].fused if template(member) in self.kinds]
            if template(module) in members:
                found = dict.fromkeys(each for member in members for each in (*self.sets.get(member, ()), member))
                self.sets |= dict.fromkeys(found, tuple(found))
        for together in dict.fromkeys(self.sets.values()):
            reasons = dict.fromkeys(why for member in together if (why := self.kinds[member].why) is not None)
            if len({*map(_parent, together)}) > 1:
                reasons = {APART: None}
            elif any(self.kinds[member].why is None for member in together):
                # Beside others it is no gate.
                reasons.pop(FEW, None)
            for member in together:
                self.kinds[member] = self.kinds[member]._replace(why=next(iter(reasons), None))

    def split(self) -> dict[str, Sequence[int]]:
        """Shapes of the tensors of an output, whose experts lie one by one."""
        stacks = self._stacked()
        found: dict[str, Sequence[int]] = {}
        for name, shape in self.shapes.items():
            module = name.removesuffix(".weight")
            if template(module) not in stacks:
                found[name] = shape
                continue
            experts, stacked = stacks[template(module)]
            path = _parent(module) + (f".{experts.path.rpartition('.')[2]}" if experts.beside else "")
            rows, columns = (shape[2], shape[1]) if stacked.transposed else (shape[1], shape[2])
            for number in range(shape[0]):
                for part in stacked.parts:
                    found[f"{path}.{number}.{part}.weight"] = (rows // len(stacked.parts), columns)
        return found

    def hold_single(self, single: Mapping[str, EngineModule]) -> None:
        """Leave stacks as they are if the engine does not load what would be made of them, in the same order.

        Args:
            single: what it says of that; nothing if it failed.
        """
        kept = []
        for part in self.experts:
            (experts,) = part.experts
            path = compile_pattern(experts.path)
            names = [one for stack in experts.stacked for one in stack.parts]
            held = [one for module, one in single.items() if path.fullmatch(module.rsplit(".", 2)[0])]
            good = held and all(one.layer is not None and one.layer.experts and one.read for one in held)
            orders = {tuple(dict.fromkeys(_lasts(one.layer))) for one in held if one.layer is not None}
            if not experts.stacked or (good and orders == {tuple(names)}):
                kept.append(part)
                continue
            for alike in self.stacks:
                if alike.rpartition(".")[0] == experts.place:
                    self.kinds[alike] = self.kinds[alike]._replace(why=STACKED)
        self.experts = kept

    def entry(self) -> Architecture:
        """It.

        Raises:
            PlanError: the engine would quantize what has to stay as it is, whatever config.json lists, or nothing.
        """
        found = self.unnamed()
        if not found.compress:
            raise PlanError(
                f"vLLM {self.asked.version} builds no layer of {self.name} that could be quantized",
                "--architecture generic goes by names and shapes alone",
            )
        return self._named(found)

    def unnamed(self) -> Architecture:
        """The same without other names.

        Raises:
            PlanError: experts would have to stay as they are.
        """
        kept, compress = [EMBEDDING, HEAD], []
        splits: list[ParallelSplit] = []
        cached: list[CachedRows] = []
        fused: dict[tuple[str, ...], FusedLayers] = {}
        for alike, (name, one, why) in self.kinds.items():
            members = self.sets.get(alike, ())
            said = all(WORDS.fullmatch(self.kinds[member].name) for member in members)
            # Also of what stays as it is, which is listed under the name of what it is merged into.
            if members and said and len({*map(_parent, members)}) == 1:
                merged = next(filter(None, (self.kinds[member].told.merged for member in members)), None)
                fused[members] = FusedLayers(_either(members), merged)
            if why is not None and one.layer is not None and one.layer.experts:
                raise PlanError(f"{name} cannot be quantized, nor left out: {why}", ADD)
            if why is not None:
                if WORDS.fullmatch(name) and not _known(name):
                    divided = why in (HEAD.why, EMBEDDING.why) or bool(one.layer and one.layer.axis)
                    kept.append(Keep(alike, why, divided))
                continue
            layer = one.layer
            assert layer is not None
            if layer.experts:
                continue
            compress.append(alike)
            splits += self._split(alike, name, one, layer)
            cached += self._cached(alike, one, layer)
        heads = next((layer for layer in self.asked.layers if HEAD_LAYER in layer.kinds), None)
        return Architecture(
            self.name,
            layers=self.layers,
            compress=(*compress, *(pattern for part in self.experts for pattern in part.compress)),
            keep=tuple(kept),
            fused=(*fused.values(), *(one for part in self.experts for one in part.fused)),
            splits=(*splits, *(one for part in self.experts for one in part.splits)),
            experts=tuple(one for part in self.experts for one in part.experts),
            cached=tuple(cached),
            text_config=self.inner,
            draft_layers=LAYERS,
            rest=UNKNOWN,
            head_refused=None if heads is None or heads.asked else "the engine builds it without a quantization",
            decided=f"decided as vLLM {self.asked.version} builds {self.name}: look at the plan; what SGLang makes of "
            "it is not known",
        )

    def _split(self, alike: str, name: str, one: EngineModule, layer: EngineLayer) -> Iterator[ParallelSplit]:
        if layer.axis is None:
            return
        if _cut(layer, one):
            parts = self._parts(layer, self.shapes[f"{name}.weight"])
            assert parts is not None
            yield ParallelSplit(alike, "out", replicated=parts[0] is not None, parts=parts)
        elif "QKVParallelLinear" in layer.kinds and len(one.fused) > 1 and template(one.fused[0]) != alike:
            yield ParallelSplit(alike, "out", KV_HEADS, replicated=True)
        else:
            mixer = STATE_HEADS if _parent(name) in self.mixers and STATE_HEADS in self.text else None
            yield ParallelSplit(alike, layer.axis, HEADS if _parent(alike) in self.attention else mixer)

    def _cached(self, alike: str, one: EngineModule, layer: EngineLayer) -> Iterator[CachedRows]:
        if "QKVParallelLinear" in layer.kinds and (_cut(layer, one) or template(one.fused[0]) != alike):
            yield CachedRows(alike, KV_HEADS)

    def _named(self, entry: Architecture) -> Architecture:
        """The same, with the names under which the engine looks up what it would not find by its own."""
        spellings: dict[tuple[str, ...], None] = {}
        renames: dict[tuple[str, str], None] = {}
        wanted = [layer for layer in self.asked.layers if layer.linear and layer.holds and not layer.own]
        for layer in wanted:
            module = layer.holds[0][0].removesuffix(".weight")
            own, other = self._engine_name(module, layer).split("."), layer.prefix.split(".")
            tail: list[str] = []
            while len(own) > 1 and len(other) > 1 and own[-1] == other[-1]:
                own, other, tail = own[:-1], other[:-1], own[-1:]
            same = 0
            while same < min(len(own), len(other)) and own[same] == other[same]:
                same += 1
            if any(part.isdecimal() for part in (*own[same:], *other[same:])):
                continue
            if same == 0:
                spellings[f"{'.'.join(own)}.", f"{'.'.join(other)}."] = None
            elif same < min(len(own), len(other)):
                renames[f".{'.'.join(own[same - 1 :])}", f".{'.'.join(other[same - 1 :])}"] = None
            elif tail:
                # One has a part that the other leaves out.
                renames[f".{'.'.join(own[same:] + tail)}", f".{'.'.join(other[same:] + tail)}"] = None
        fused = tuple(rename for rename in FUSED_NAMES if any(alike.endswith(rename[0]) for alike in entry.compress))
        entry = replace(entry, spellings=tuple(spellings), renames=(*renames, *fused))
        asked = ModuleRules(entry)
        for layer in wanted:
            modules = [name.removesuffix(".weight") for name, _, _ in layer.holds]
            if all(asked.rule(module).keep is None for module in modules):
                continue
            listed = asked.engine_names(modules)
            ours, theirs = _parent(modules[0]), _parent(self._engine_name(modules[0], layer))
            names = {*listed, *(name.replace(ours, theirs, 1) for name in listed)}
            parent, _, last = layer.prefix.rpartition(".")
            # Of what is merged, vLLM looks for the members where the class says which.
            members = {f"{parent}.{member}" for member in self.asked.packed.get(last, (last,))}
            if not layer.named or (layer.prefix not in names and not members <= names):
                raise PlanError(
                    f"vLLM {self.asked.version} builds {layer.prefix} quantized, whatever config.json lists, and "
                    f"{modules[0]} is to stay as it is",
                    ADD,
                )
        return entry

    def _engine_name(self, module: str, layer: EngineLayer) -> str:
        """What becomes of a module's name by the engine's own rules, merged with others or not."""
        merged = len({name for name, _, _ in layer.holds}) > 1
        name = self.asked.renamed.get(module) or module
        return f"{_parent(name)}.{layer.prefix.rpartition('.')[2]}" if merged else name


def _is_conv(shape: Sequence[int]) -> bool:
    """Whether a tensor is the weight of a convolution along a sequence, [channels, 1, width]."""
    return len(shape) == 3 and shape[1] == 1


def _known(module: str) -> bool:
    return any(compile_pattern(known.pattern).fullmatch(module) for known in (EMBEDDING, HEAD))


def _cut(layer: EngineLayer, one: EngineModule) -> bool:
    """Whether an engine cuts a single tensor into parts for its ranks."""
    return not one.fused and (len(layer.sizes) > 1 or "QKVParallelLinear" in layer.kinds)


def _lasts(layer: EngineLayer) -> Iterator[str]:
    return (tensor.removesuffix(".weight").rpartition(".")[2] for tensor, _, _ in layer.holds)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _either(members: Sequence[str]) -> str:
    return f"{_parent(members[0])}.{{{','.join(member.rpartition('.')[2] for member in members)}}}"
