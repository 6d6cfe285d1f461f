"""Build a registry entry for a class that has none, from how vLLM builds that class.

build_architecture(checkpoint, Path("vllm/bin/python")).decided  # "decided as vLLM VERSION builds MyForCausalLM: ..."

vLLM builds a few decoder layers of each kind, at their real sizes but without memory. A layer with which vLLM does
something that no entry can say stays unquantized.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
from ..registry.rules import ModuleRules, is_embedding, is_head
from ..weights.find import decoded_view
from .client import EngineAnswer, EngineFailed, EngineLayer, Question, ask_engine
from .modules import (
    EMBEDDING_LAYER,
    HEAD_LAYER,
    UNKNOWN,
    EngineModule,
    decoder_layer_pattern,
    engine_modules,
    is_head_or_embedding,
    is_tower,
    last_parts,
    parent_of,
    routed_parts,
)

# An honest answer takes a quarter of a minute, most of which is the import of vLLM.
SECONDS = 240
# Number of decoder layers of each kind in a question, and limits that no published model reaches.
LAYERS_OF_EACH_KIND, MOST_TENSORS, MOST_LAYERS = 3, 60_000, 2_000
# Narrower layers are gates or have one row per head: quantizing them saves nothing, and entries keep them.
NARROW = 128
LAYERS = "num_hidden_layers"
# vLLM dequantizes it when it loads (layers/quantization/utils/quant_utils.py:511).
DECODED = ("kv_b_proj",)
# The config key by whose heads ranks divide linear attention.
STATE_HEADS = "linear_num_key_heads"
PLAIN_NAME = re.compile(r"[\w.-]+")
NARROW_LAYER = "narrow"
REORDERED = "the engine puts its rows in another order"
UNKNOWN_PARTS = "the engine cuts it into parts of sizes that no rule tells"
FUSED_ELSEWHERE = "the engine joins it with what lies elsewhere"
AMBIGUOUS_AXES = "a stack of experts whose sizes do not tell which axis is which"
NOT_LOADED_SEPARATELY = "a stack of experts that the engine does not load one by one"
OUTSIDE_DECODER = "not one of the decoder's layers"
ADD_ENTRY_HINT = "add an entry to openquant/registry (docs/adding-an-architecture.md)"
NOT_LOADED = "the engine loads it into nothing"


def build_architecture(checkpoint: Checkpoint, interpreter: Path) -> Architecture:
    """Build a registry entry for a checkpoint's class from how vLLM builds it.

    Args:
        checkpoint: the opened source.
        interpreter: a Python that has vLLM.

    Raises:
        EngineFailed: vLLM cannot build the class, or gives no answer.
        PlanError: vLLM would quantize layers that must stay as they are, whatever the ignore list says.
        SourceError: the source is quantized, and its scales do not belong to its codes.
    """
    (entry,) = build_architectures([checkpoint], interpreter)
    if isinstance(entry, PlanError):
        raise entry
    return entry


def build_architectures(
    checkpoints: Sequence[Checkpoint], interpreter: Path, *paths: Path
) -> list[Architecture | PlanError]:
    """Build the entries of several checkpoints, importing vLLM once or twice for all.

    Args:
        checkpoints: the opened sources.
        interpreter: a Python that has vLLM.
        paths: directories for its import path.

    Returns:
        For each checkpoint the entry, or the error that `build_architecture` would raise: a PlanError, EngineFailed
        included.

    Raises:
        EngineFailed: the interpreter has no vLLM, or did not end in time, so that there is no answer at all.
        SourceError: a source is quantized, and its scales do not belong to its codes.
    """
    questions = [_question(checkpoint) for checkpoint in checkpoints]
    valid = [question for question in questions if isinstance(question, Question)]
    answers = iter(ask_engine(valid, interpreter, *paths, seconds=SECONDS) if valid else ())
    builders: list[_Builder | EngineFailed] = []
    for checkpoint, question in zip(checkpoints, questions, strict=True):
        if isinstance(question, Question):
            answer = next(answers)
            builders.append(
                answer if isinstance(answer, EngineFailed) else _Builder(checkpoint.architecture, answer, question)
            )
        else:
            builders.append(question)
    # An output has separate experts, which not every class that loads stacks can load.
    stacked = [builder for builder in builders if isinstance(builder, _Builder) and builder.stacks]
    unstacked = [Question(builder.question.config, builder.split()) for builder in stacked]
    unstacked_answers = ask_engine(unstacked, interpreter, *paths, seconds=SECONDS) if unstacked else []
    for builder, question, answer in zip(stacked, unstacked, unstacked_answers, strict=True):
        builder.check_unstacked({} if isinstance(answer, EngineFailed) else engine_modules(answer, question.shapes))
    return [_entry(builder) if isinstance(builder, _Builder) else builder for builder in builders]


def _question(checkpoint: Checkpoint) -> Question | EngineFailed:
    """Return the question about a checkpoint, or the reason for which there is none."""
    decoded, _ = decoded_view(checkpoint)
    config = _without_code(decoded.config)
    count = _text_config(config)[1].get(LAYERS)
    if isinstance(count, int) and count > MOST_LAYERS:
        return EngineFailed(f"config.json counts {short_repr(count)} layers", "nobody builds so many")
    shapes = sample_layers({info.name: info.shape for info in decoded.tensors.values()})
    if len(shapes) > MOST_TENSORS:
        return EngineFailed(f"{len(shapes)} of its tensors differ in more than the layer", "no engine loads so many")
    return Question(config, shapes)


def _entry(builder: _Builder) -> Architecture | PlanError:
    try:
        return builder.entry()
    except PlanError as error:
        return error


def _without_code(config: Any) -> Any:
    """Return a config without names of the repository's code and without quantization_config."""
    removed = ("auto_map", "quantization_config")
    if isinstance(config, dict):
        return {key: _without_code(value) for key, value in config.items() if key not in removed}
    return [_without_code(value) for value in config] if isinstance(config, list) else config


def _text_config(config: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """Return the key of the language model's config, as Architecture.text_config names it, and that config."""
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
    """Return the tensors of a few layers of each kind. Layers are of a kind if their tensors' names and shapes agree.

    Args:
        shapes: shape of each tensor of a checkpoint, by name.

    Returns:
        Shapes by name, in the order of `shapes`: of all tensors that are in no layer, and of the first and last layers
        of each kind, at most OF_EACH.
    """
    sample: set[str] = set()
    layers: dict[tuple[str, int], dict[str, Sequence[int]]] = {}
    for name, shape in shapes.items():
        match = re.match(r"([^0-9].*?\.|)(\d{1,9})(\..*)", name)
        if match is None:
            sample.add(name)
        else:
            layers.setdefault((match[1], int(match[2])), {})[name] = shape
    kinds: dict[tuple[str, frozenset[Any]], list[int]] = {}
    for (prefix, number), tensors in sorted(layers.items(), key=lambda item: item[0]):
        start = len(f"{prefix}{number}")
        kind = frozenset((name[start:], tuple(shape)) for name, shape in tensors.items())
        kinds.setdefault((prefix, kind), []).append(number)
    for (prefix, _), numbers in kinds.items():
        for number in {*numbers[: LAYERS_OF_EACH_KIND - 1], numbers[-1]}:
            sample.update(layers[prefix, number])
    # Tensors are loaded in this order.
    return {name: shape for name, shape in shapes.items() if name in sample}


class _Module(NamedTuple):
    """A module with a weight.

    Attributes:
        name: its name in the checkpoint.
        engine: what the engine makes of it.
        why: why it stays unquantized; None if it may be quantized.
    """

    name: str
    engine: EngineModule
    why: str | None


class _Builder:
    """Builds one registry entry.

    Args:
        name: the class.
        answer: the engine's answer.
        question: the question that it answers.

    Attributes:
        stacks: name templates of the stacks of experts that the engine loads.
    """

    def __init__(self, name: str, answer: EngineAnswer, question: Question) -> None:
        self.name, self.answer, self.question = name, answer, question
        shapes = self.shapes = question.shapes
        self.text_config_key, text = _text_config(question.config)
        self.text = text
        self.modules = engine_modules(answer, shapes)
        self.layers = decoder_layer_pattern(self.modules)
        # By name template: the first module, and why any module of the template stays unquantized.
        self.kinds: dict[str, _Module] = {}
        drafted = mtp_layer_finder(Architecture(name, self.layers, (), (), (), (), draft_layers=LAYERS), dict(text))
        self.mixers = {
            name.removesuffix(".weight").rpartition(".")[0] for name, shape in shapes.items() if _is_conv(shape)
        }
        for module, engine in self.modules.items():
            if drafted(module):
                continue
            pattern, why = template(module), self._why_kept(module, engine)
            if pattern not in self.kinds or (why and self.kinds[pattern].why is None):
                self.kinds[pattern] = _Module(module, engine, why)
        # By name template, the templates of all layers that are fused with it.
        self.fused_groups: dict[str, tuple[str, ...]] = {}
        self._find_fused_groups()
        self.attention = {
            parent_of(pattern)
            for pattern, (name, engine, _) in self.kinds.items()
            if name.rpartition(".")[2] in DECODED
            or (engine.layer is not None and "QKVParallelLinear" in engine.layer.kinds)
        }
        left = {
            pattern: (kind.name, kind.engine)
            for pattern, kind in self.kinds.items()
            if kind.why is None and kind.engine.layer is not None and kind.engine.layer.experts
        }
        self.stacks = [pattern for pattern, (name, _) in left.items() if len(self._shape(name)) > 2]
        hidden = text.get("hidden_size")
        parts = routed_parts(left, shapes, hidden if isinstance(hidden, int) else 0)
        self.experts = [replace(part, keep=()) for part in parts.values()]
        for pattern in self.stacks:
            if pattern not in self._stacked():
                self.kinds[pattern] = self.kinds[pattern]._replace(why=AMBIGUOUS_AXES)

    def _shape(self, module: str) -> Sequence[int]:
        return self.shapes.get(f"{module}.weight") or self.shapes[module]

    def _stacked(self) -> dict[str, tuple[ExpertLayout, StackedExperts]]:
        """Return the stacks that are split into experts, by name template."""
        return {
            f"{experts.place}.{stacked.name}": (experts, stacked)
            for part in self.experts
            for experts in part.experts
            for stacked in experts.stacked
        }

    def _why_kept(self, module: str, engine: EngineModule) -> str | None:
        """Return why a module stays unquantized; None if it may be quantized."""
        layer, shape = engine.layer, self._shape(module)
        if is_head(module) or (layer is not None and HEAD_LAYER in layer.kinds):
            return HEAD.why
        if layer is not None and EMBEDDING_LAYER in layer.kinds:
            return EMBEDDING.why
        if not PLAIN_NAME.fullmatch(module):
            return "its name is none that a rule can say"
        if not engine.read:
            return NOT_LOADED
        if not template(module).startswith(f"{self.layers}."):
            return "vision or audio" if is_tower(module) else OUTSIDE_DECODER
        if layer is None or not layer.linear:
            return UNKNOWN
        if layer.experts:
            return None if len(shape) in (2, 3) and min(shape) >= 1 else UNKNOWN
        if shape[0] in self.answer.expert_counts and not engine.fused:
            return ROUTER
        if len(shape) != 2 or module in self.shapes:
            return UNKNOWN
        if engine.reordered:
            return REORDERED
        if min(shape) < NARROW:
            return NARROW_LAYER
        if module.rpartition(".")[2] in DECODED:
            return "engines decode it when they load it"
        if _is_cut(layer, engine) and module.rpartition(".")[0] in self.mixers:
            return "inputs of a convolution or a state-space model"
        return UNKNOWN_PARTS if _is_cut(layer, engine) and self._parts(layer, shape) is None else None

    def _parts(self, layer: EngineLayer, shape: Sequence[int]) -> tuple[str | None, ...] | None:
        """Return the parts of a tensor that the engine cuts, as ParallelSplit.parts; None if they are not known."""
        if "QKVParallelLinear" in layer.kinds:
            counts = [self.text.get(key) for key in (HEADS, KV_HEADS)]
            heads, kv_heads = (count if isinstance(count, int) and count > 0 else 0 for count in counts)
            fits = heads and kv_heads and shape[0] % (heads + 2 * kv_heads) == 0
            return (HEADS, KV_HEADS, KV_HEADS) if fits else None
        equal = len({*layer.sizes}) == 1 and sum(layer.sizes) == shape[0]
        return (None,) * len(layer.sizes) if equal else None

    def _find_fused_groups(self) -> None:
        """Find fused layers; if one of them stays unquantized, or no rule can name them together, all stay."""
        for module in self.modules:
            members = [template(member) for member in self.modules[module].fused if template(member) in self.kinds]
            if template(module) in members:
                merged = (name for member in members for name in (*self.fused_groups.get(member, ()), member))
                group = tuple(dict.fromkeys(merged))
                self.fused_groups |= dict.fromkeys(group, group)
        for group in dict.fromkeys(self.fused_groups.values()):
            reasons = dict.fromkeys(why for member in group if (why := self.kinds[member].why) is not None)
            if len({*map(parent_of, group)}) > 1:
                reasons = {FUSED_ELSEWHERE: None}
            elif any(self.kinds[member].why is None for member in group):
                # A narrow layer that is fused with wider ones is no gate.
                reasons.pop(NARROW_LAYER, None)
            for member in group:
                self.kinds[member] = self.kinds[member]._replace(why=next(iter(reasons), None))

    def split(self) -> dict[str, Sequence[int]]:
        """Return the shapes of the tensors of an output, whose experts are separate, by name."""
        stacks = self._stacked()
        shapes: dict[str, Sequence[int]] = {}
        for name, shape in self.shapes.items():
            module = name.removesuffix(".weight")
            if template(module) not in stacks:
                shapes[name] = shape
                continue
            experts, stacked = stacks[template(module)]
            path = parent_of(module) + (f".{experts.path.rpartition('.')[2]}" if experts.beside else "")
            rows, columns = (shape[2], shape[1]) if stacked.transposed else (shape[1], shape[2])
            for number in range(shape[0]):
                for part in stacked.parts:
                    shapes[f"{path}.{number}.{part}.weight"] = (rows // len(stacked.parts), columns)
        return shapes

    def check_unstacked(self, modules: Mapping[str, EngineModule]) -> None:
        """Leave stacks unquantized if the engine does not load separate experts in the same order.

        Args:
            modules: what the engine makes of separate experts, by module; empty if it failed.
        """
        loadable = []
        for part in self.experts:
            (experts,) = part.experts
            path = compile_pattern(experts.path)
            names = [name for stack in experts.stacked for name in stack.parts]
            separate = [engine for module, engine in modules.items() if path.fullmatch(module.rsplit(".", 2)[0])]
            are_read = separate and all(
                engine.layer is not None and engine.layer.experts and engine.read for engine in separate
            )
            orders = {tuple(last_parts(engine.layer.modules)) for engine in separate if engine.layer is not None}
            if not experts.stacked or (are_read and orders == {tuple(names)}):
                loadable.append(part)
                continue
            for pattern in self.stacks:
                if pattern.rpartition(".")[0] == experts.place:
                    self.kinds[pattern] = self.kinds[pattern]._replace(why=NOT_LOADED_SEPARATELY)
        self.experts = loadable

    def entry(self) -> Architecture:
        """Return the registry entry.

        Raises:
            PlanError: the engine quantizes nothing, or would quantize layers that must stay as they are, whatever the
                ignore list says.
        """
        entry = self.unnamed()
        if not entry.compress:
            raise PlanError(
                f"vLLM {self.answer.version} builds no layer of {self.name} that could be quantized",
                "--architecture generic goes by names and shapes alone",
            )
        return self._with_engine_names(entry)

    def unnamed(self) -> Architecture:
        """Return the registry entry without the engine's names for modules.

        Raises:
            PlanError: experts would have to stay as they are.
        """
        kept, compress = [EMBEDDING, HEAD], []
        splits: list[ParallelSplit] = []
        cached: list[CachedRows] = []
        fused: dict[tuple[str, ...], FusedLayers] = {}
        for pattern, (name, engine, why) in self.kinds.items():
            members = self.fused_groups.get(pattern, ())
            are_words = all(PLAIN_NAME.fullmatch(self.kinds[member].name) for member in members)
            # Unquantized layers too: the ignore list has them under the name of the fused layer.
            if members and are_words and len({*map(parent_of, members)}) == 1:
                merged = next(filter(None, (self.kinds[member].engine.merged for member in members)), None)
                fused[members] = FusedLayers(_either(members), merged)
            if why is not None and engine.layer is not None and engine.layer.experts:
                raise PlanError(f"{name} cannot be quantized, nor left out: {why}", ADD_ENTRY_HINT)
            if why is not None:
                if PLAIN_NAME.fullmatch(name) and not is_head_or_embedding(name):
                    divided = why in (HEAD.why, EMBEDDING.why) or bool(engine.layer and engine.layer.axis)
                    kept.append(Keep(pattern, why, divided))
                continue
            layer = engine.layer
            assert layer is not None
            if layer.experts:
                continue
            compress.append(pattern)
            splits += self._split(pattern, name, engine, layer)
            cached += self._cached(pattern, engine, layer)
        heads = next((layer for layer in self.answer.layers if HEAD_LAYER in layer.kinds), None)
        return Architecture(
            self.name,
            layers=self.layers,
            compress=(*compress, *(pattern for part in self.experts for pattern in part.compress)),
            keep=tuple(kept),
            fused=(*fused.values(), *(layers for part in self.experts for layers in part.fused)),
            splits=(*splits, *(split for part in self.experts for split in part.splits)),
            experts=tuple(layout for part in self.experts for layout in part.experts),
            cached=tuple(cached),
            text_config=self.text_config_key,
            draft_layers=LAYERS,
            rest=UNKNOWN,
            head_refused=None if heads is None or heads.asked else "the engine builds it without a quantization",
            embedding=self._embedding(),
            decided=f"decided as vLLM {self.answer.version} builds {self.name}: look at the plan; what SGLang makes of "
            "it is not known",
        )

    def _embedding(self) -> Literal["name", "class"] | None:
        """Return how the engine finds the embedding's scheme; None if it builds it without a quantization."""
        for layer in self.answer.layers:
            # A tied head, which is an embedding by its class, holds the embedding too.
            is_lookup = EMBEDDING_LAYER in layer.kinds and HEAD_LAYER not in layer.kinds
            if layer.asked and is_lookup and any(map(is_embedding, layer.modules)):
                return "name" if layer.prefix else "class"
        return None

    def _split(self, pattern: str, name: str, engine: EngineModule, layer: EngineLayer) -> Iterator[ParallelSplit]:
        if layer.axis is None:
            return
        if _is_cut(layer, engine):
            parts = self._parts(layer, self.shapes[f"{name}.weight"])
            assert parts is not None
            yield ParallelSplit(pattern, "out", replicated=parts[0] is not None, parts=parts)
        elif "QKVParallelLinear" in layer.kinds and len(engine.fused) > 1 and template(engine.fused[0]) != pattern:
            yield ParallelSplit(pattern, "out", KV_HEADS, replicated=True)
        else:
            mixer = STATE_HEADS if parent_of(name) in self.mixers and STATE_HEADS in self.text else None
            yield ParallelSplit(pattern, layer.axis, HEADS if parent_of(pattern) in self.attention else mixer)

    def _cached(self, pattern: str, engine: EngineModule, layer: EngineLayer) -> Iterator[CachedRows]:
        if "QKVParallelLinear" in layer.kinds and (_is_cut(layer, engine) or template(engine.fused[0]) != pattern):
            yield CachedRows(pattern, KV_HEADS)

    def _with_engine_names(self, entry: Architecture) -> Architecture:
        """Add the names by which the engine looks up modules that it would not find by the checkpoint's names."""
        spellings: dict[tuple[str, ...], None] = {}
        renames: dict[tuple[str, str], None] = {}
        unfound = [layer for layer in self.answer.layers if layer.linear and layer.holds and not layer.own]
        for layer in unfound:
            module = layer.modules[0]
            ours, theirs = self._engine_name(module, layer).split("."), layer.prefix.split(".")
            tail: list[str] = []
            while len(ours) > 1 and len(theirs) > 1 and ours[-1] == theirs[-1]:
                ours, theirs, tail = ours[:-1], theirs[:-1], ours[-1:]
            same = 0
            while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
                same += 1
            if any(part.isdecimal() for part in (*ours[same:], *theirs[same:])):
                continue
            if same == 0:
                spellings[f"{'.'.join(ours)}.", f"{'.'.join(theirs)}."] = None
            elif same < min(len(ours), len(theirs)):
                renames[f".{'.'.join(ours[same - 1 :])}", f".{'.'.join(theirs[same - 1 :])}"] = None
            elif tail:
                # One name has a part that the other lacks.
                renames[f".{'.'.join(ours[same:] + tail)}", f".{'.'.join(theirs[same:] + tail)}"] = None
        fused = tuple(
            rename for rename in FUSED_NAMES if any(pattern.endswith(rename[0]) for pattern in entry.compress)
        )
        entry = replace(entry, spellings=tuple(spellings), renames=(*renames, *fused))
        rules = ModuleRules(entry)
        for layer in unfound:
            modules = layer.modules
            if all(rules.rule(module).keep is None for module in modules):
                continue
            listed = rules.engine_names(modules)
            parent_in_checkpoint = parent_of(modules[0])
            parent_in_engine = parent_of(self._engine_name(modules[0], layer))
            names = {*listed, *(name.replace(parent_in_checkpoint, parent_in_engine, 1) for name in listed)}
            parent, _, last = layer.prefix.rpartition(".")
            # For fused layers vLLM looks up the members, if the class names them.
            members = {f"{parent}.{member}" for member in self.answer.packed.get(last, (last,))}
            if not layer.named or (layer.prefix not in names and not members <= names):
                raise PlanError(
                    f"vLLM {self.answer.version} builds {layer.prefix} quantized, whatever config.json lists, and "
                    f"{modules[0]} is to stay as it is",
                    ADD_ENTRY_HINT,
                )
        return entry

    def _engine_name(self, module: str, layer: EngineLayer) -> str:
        """Return a module's name by the engine's renaming; for fused layers, that of the merged layer."""
        merged = len(layer.modules) > 1
        name = self.answer.renamed.get(module) or module
        return f"{parent_of(name)}.{layer.prefix.rpartition('.')[2]}" if merged else name


def _is_conv(shape: Sequence[int]) -> bool:
    """Return whether a tensor is the weight of a convolution along a sequence, [channels, 1, width]."""
    return len(shape) == 3 and shape[1] == 1


def _is_cut(layer: EngineLayer, engine: EngineModule) -> bool:
    """Return whether the engine cuts a single tensor into parts, each of which it divides among ranks."""
    return not engine.fused and (len(layer.sizes) > 1 or "QKVParallelLinear" in layer.kinds)


def _either(members: Sequence[str]) -> str:
    return f"{parent_of(members[0])}.{{{','.join(member.rpartition('.')[2] for member in members)}}}"
