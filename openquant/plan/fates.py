"""Sort a checkpoint's tensors: which can be quantized, which are kept and why, what must share its status.

Here the registry's patterns meet the names of a checkpoint; the user's options and the schemes' shapes have their say.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import PlanError, UsageError
from ..files.checkpoint import Checkpoint
from ..files.inputs import shown
from ..files.tensors import TensorInfo
from ..formats.format import FLOATS, Group
from ..formats.schemes import Scheme
from ..models import NEVER_QUANTIZED, Experts, Model, Refusal, Stacked
from ..patterns import MAX_DIGITS, collapse, compile_any, compile_pattern, template
from ..weights.encoded import Encoded
from ..weights.layers import Layer
from .parallel import indivisible, parts_of, text_config
from .roles import Entry, is_head

SOURCE_DTYPES = ("BF16", "F16", "F32")
# Misfits of each kind in a message: few if all are real.
_MOST_NAMED = 100
_SHARES = "shares its status with "


class Kept(NamedTuple):
    """A tensor of two or more axes that is copied, and why."""

    tensor: TensorInfo
    alike: str
    why: str


class Other(NamedTuple):
    """The scheme of a layer that is not stored in the plan's own, and why."""

    scheme: Scheme
    why: str


@dataclass(frozen=True)
class Options:
    """What the user asks for beside the scheme.

    Attributes:
        ignore: patterns over module names that stay unquantized.
        scheme_for: patterns over module names, each with the scheme of what matches; the first that matches counts.
        tp: a tensor-parallel size that must be able to serve the result.
        head: whether the output head is quantized too.
    """

    ignore: tuple[str, ...] = ()
    scheme_for: tuple[tuple[str, Scheme], ...] = ()
    tp: int | None = None
    head: bool = False


@dataclass(frozen=True)
class Fates:
    """What becomes of each tensor.

    Attributes:
        scheme: of all layers that have no other.
        layers: weights that could be quantized, by module.
        unstacked: those made from a stacked tensor, by its name.
        kept: other tensors of two or more axes.
        copied: tensors of fewer.
        sets: the whole set of each layer that is joined with others, itself included.
        reasons: why the layers that stay unquantized do.
        others: the layers that have another scheme.
    """

    scheme: Scheme
    layers: dict[str, Layer]
    unstacked: dict[str, list[Layer]]
    kept: list[Kept]
    copied: list[TensorInfo]
    sets: dict[str, tuple[str, ...]]
    reasons: dict[str, str]
    others: dict[str, Other]

    def scheme_of(self, module: str) -> Scheme:
        """What a layer is stored as, unless it stays unquantized."""
        other = self.others.get(module)
        return self.scheme if other is None else other.scheme

    @property
    def groups(self) -> list[tuple[Layer, Group]]:
        """All layers with what shares a scale in them; 1 x 1 where they stay unquantized."""
        return [
            (layer, (1, 1) if name in self.reasons else self.scheme_of(name).format.group)
            for name, layer in self.layers.items()
        ]

    @property
    def quantized(self) -> list[tuple[Layer, Scheme]]:
        """The layers that do not stay unquantized, with their schemes."""
        return [(layer, self.scheme_of(name)) for name, layer in self.layers.items() if name not in self.reasons]


def decide(
    checkpoint: Checkpoint, encoded: dict[str, Encoded], entry: Entry, scheme: Scheme, options: Options
) -> tuple[Fates, dict[str, Any], list[str]]:
    """What becomes of each tensor, the `quantization_config` that says so, and notes for the user.

    A source that is quantized in the scheme already keeps its choice of layers, whatever the registry says, but for
    embeddings, output heads and routers.

    Raises:
        PlanError: tensors no pattern covers, experts that engines do not load in their scheme, or layers that do not
            divide by the tensor-parallel size asked for, whatever they are stored as; or nothing would be quantized.
        UsageError: a pattern that matches nothing.
    """
    settled = bool(encoded) and all(stored.passes(scheme) for stored in encoded.values())
    layers, unstacked, kept, copied = _sort_tensors(checkpoint, entry, options.ignore, encoded, settled)
    sets, config = entry.joined_sets(layers), text_config(checkpoint, entry.model)
    if options.tp is not None:
        _refuse_size(entry, layers, config, options.tp)
    reasons, others, notes = _settle(
        entry,
        scheme,
        layers,
        _problem_finder(entry, layers, sets, config, options.tp),
        sets,
        options,
        {module for module, layer in layers.items() if settled and layer.encoded is None},
        [*(keep.tensor.module for keep in kept), *(info.module for info in copied)] if options.ignore else [],
    )
    notes += _lacking(entry.model, layers, copied, sets, config)
    fates = Fates(scheme, layers, unstacked, kept, copied, sets, reasons, others)
    _refuse_experts(entry, fates)
    return fates, scheme.config(_ignored_names(entry, fates), _targets(entry, fates)), notes


def unread_by_sglang(entry: Entry, fates: Fates) -> Refusal | None:
    """Why SGLang does not load what is decided, and what it loads instead; None if it does or nothing is quantized."""
    sglang = entry.model.sglang
    # Layers alike are many.
    kinds = {(layer.alike, scheme.name): (layer.module, scheme) for layer, scheme in fates.quantized}.values()
    quantized = [(module, scheme) for module, scheme in kinds if not is_head(module)]
    for _, scheme in quantized:
        if "SGLang" not in scheme.engines:
            return Refusal(None, None, f"it knows no {scheme.name}", "try another scheme")
        refusal = sglang.refusal(scheme.name, scheme.method)
        if refusal is not None:
            return refusal
    if any(entry.role(module).plain for module, _ in quantized):
        modules = ", ".join(f"**{pattern}" for pattern in sglang.plain)
        return Refusal(None, None, f"it builds {modules} in bfloat16", "with --ignore for that it loads")
    if sglang.head is not None and len(quantized) < len(kinds):
        return Refusal(None, None, sglang.head, "without --quantize-lm-head it loads")
    uneven = bool(fates.reasons) or any(not is_head(module) for module in fates.others)
    if quantized and uneven and fates.scheme.method in sglang.alike:
        return Refusal(None, None, "it finds none of these layers by name", "with all layers alike it loads")
    # It asks the group of all Linear layers for the size of blocks (compressed_tensors.py:272-279).
    blocks = (module for module, scheme in quantized if scheme.name == "block" and not entry.experts(module))
    if fates.scheme.name != "block" and any(blocks):
        return Refusal(None, None, "it loads blocks only where most layers have them", "-w 128 with --scheme-for loads")
    return None


def _sort_tensors(
    checkpoint: Checkpoint, entry: Entry, ignore: Sequence[str], encoded: dict[str, Encoded], settled: bool
) -> tuple[dict[str, Layer], dict[str, list[Layer]], list[Kept], list[TensorInfo]]:
    """Every tensor into one of: layers (by module), unstacked layers, kept with a reason, copied (fewer axes)."""
    model, drafted = entry.model, _draft_finder(entry.model, text_config(checkpoint, entry.model))
    ignored = compile_any(text.removesuffix(".weight") for text in ignore)
    # Neighbours have the same parent, which is looked at once.
    parent, draft = None, False
    layers: dict[str, Layer] = {}
    unstacked: dict[str, list[Layer]] = {}
    kept: list[Kept] = []
    copied: list[TensorInfo] = []
    misfits: dict[str, str] = {}
    for info in checkpoint.tensors.values():
        module, axes = info.module, len(info.shape)
        path = module.rpartition(".")[0]
        if path != parent:
            parent, draft = path, drafted(module)
        role = entry.role(module)
        if draft:
            role = role._replace(patterns=1, compress=False, stack=None, keep="draft layer")
        stored = encoded.get(info.name)
        if settled and stored is not None and role.keep not in NEVER_QUANTIZED:
            layers[module] = Layer(module, role.alike, info, (info.shape[0], info.shape[1]), encoded=stored)
        elif axes < 2 and not (role.compress and info.name != module) and role.stack is None:
            copied.append(info)
        elif role.patterns == 0 and ignored.fullmatch(module):
            kept.append(Kept(info, role.alike, "--ignore"))
        elif role.patterns == 0 and model.rest:
            kept.append(Kept(info, role.alike, model.rest))
        elif role.patterns == 0:
            misfits[info.name] = "matches no pattern"
        elif role.patterns > 1:
            misfits[info.name] = "matches more than one pattern"
        elif role.keep is not None:
            kept.append(Kept(info, role.alike, role.keep))
        elif info.dtype not in SOURCE_DTYPES:
            misfits[info.name] = f"is {info.dtype}, not one of {', '.join(SOURCE_DTYPES)}"
        elif role.compress and (axes != 2 or info.name == module):
            misfits[info.name] = f"is not a 2-D weight but {list(info.shape)}"
        elif role.compress:
            layers[module] = Layer(module, role.alike, info, (info.shape[0], info.shape[1]), encoded=stored)
        elif stored is not None:
            misfits[info.name] = f"is stored as {stored.codes.dtype} {list(stored.codes.shape)}, which is not read"
        elif role.stack is None or not _is_stack(info, role.stack[1]):
            misfits[info.name] = f"is not a stack of experts but {list(info.shape)}"
        else:
            unstacked[info.name] = _unstack(info, *role.stack)
    for layer in itertools.chain.from_iterable(unstacked.values()):
        if f"{layer.module}.weight" in checkpoint.tensors:
            misfits[f"{layer.module}.weight"] = "is in the stack of experts too"
        layers[layer.module] = layer
    misfits |= _wrongly_stacked(unstacked)
    if misfits:
        _raise_misfits(model, misfits)
    return layers, unstacked, kept, copied


def _raise_misfits(model: Model, misfits: dict[str, str]) -> None:
    problems = []
    for problem in dict.fromkeys(misfits.values()):
        names = collapse(name for name, found in misfits.items() if found == problem)
        names[_MOST_NAMED:] = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
        problems.append(f"{', '.join(names)} {problem} of {model.name}" if problem.startswith("matches")
                        else f"{', '.join(names)} {problem}")  # fmt: skip
    named = any(problem.startswith("matches") for problem in misfits.values())
    raise PlanError(
        "; ".join(problems),
        "list it under compress or keep in openquant/models.py, or leave it as it is with --ignore"
        if named
        else "save the model again with these weights as other checkpoints of this architecture have them",
    )


def _draft_finder(model: Model, config: dict[str, Any]) -> Callable[[str], bool]:
    """Whether a module belongs to a draft layer."""
    first = config.get(model.draft_layers) if model.draft_layers else None
    if not isinstance(first, int):
        return lambda _: False
    pattern = compile_pattern(f"{model.layers}.**")

    def drafted(module: str) -> bool:
        found = pattern.fullmatch(module)
        # Python converts no number of thousands of digits.
        return found is not None and found[1].isdecimal() and (len(found[1]) > MAX_DIGITS or int(found[1]) >= first)

    return drafted


def _lacking(
    model: Model,
    layers: dict[str, Layer],
    copied: Sequence[TensorInfo],
    sets: dict[str, tuple[str, ...]],
    config: dict[str, Any],
) -> list[str]:
    """Notes of what the source seems to lack: vLLM takes a quantized model without it, and computes noise."""
    notes = []
    count, pattern = config.get("num_hidden_layers"), compile_pattern(f"{model.layers}.**")
    # Norms, of which every decoder layer has some, or none has.
    numbers = {found[1] for info in copied if (found := pattern.fullmatch(info.module))}
    # Nothing bounds what config.json counts.
    wanted = (str(number) for number in range(count if numbers and isinstance(count, int) else 0))
    absent = list(itertools.islice((number for number in wanted if number not in numbers), 9))
    if absent:
        names = ", ".join(absent[:8]) + (", ..." if len(absent) > 8 else "")
        notes.append(
            f"the source lacks decoder layers that config.json counts (num_hidden_layers {shown(count)}): {names}"
        )
    counts = Counter(layer.alike for layer in layers.values())
    families: dict[str, list[str]] = {}
    for alike in counts:
        families.setdefault(alike.rpartition(".")[0], []).append(alike)
    uneven = {parent for parent, alikes in families.items() if len({counts[alike] for alike in alikes}) > 1}
    # Pairs, such as gate and up; in longer sets engines do without some members in some layers.
    pairs: dict[str, list[tuple[str, ...]]] = {}
    for module, members in sets.items() if uneven else ():
        if members[0] == module:
            pairs.setdefault(layers[module].alike.rpartition(".")[0], []).append(members)
    alone = [
        members[0] for found in pairs.values() if max(map(len, found)) == 2 for members in found if len(members) == 1
    ]
    if alone:
        notes.append(f"the source lacks what belongs to {', '.join(collapse(alone))} in other layers")
    experts: dict[str, int] = {}
    # Experts are many: where all have the same parts, one of these tells.
    watched = {
        alike
        for parent, alikes in families.items()
        if parent.endswith(".*")
        for alike in (alikes if parent in uneven else alikes[:1])
    }
    for layer in layers.values() if watched else ():
        if layer.alike in watched:
            path = layer.module.rsplit(".", 2)[0]
            experts[path] = experts.get(path, 0) + 1
    most = max(experts.values(), default=0)
    fewer = [path for path, found in experts.items() if found < most]
    if fewer:
        notes.append(f"the source lacks experts in {', '.join(collapse(fewer))}, beside other layers")
    return notes


def _wrongly_stacked(unstacked: dict[str, list[Layer]]) -> dict[str, str]:
    """Stacks whose experts do not fit together: down leads back from where gate and up lead to.

    A file with its stacks the other way around, as some tools write them, has the names of the right one.
    """
    widths: dict[str, tuple[str, tuple[int, ...]]] = {}
    misfits: dict[str, str] = {}
    for name, made in unstacked.items():
        path, widths_here = made[0].module.rsplit(".", 1)[0], made[0].shape
        if made[0].stacked and len(made[0].stacked.parts) == 1:
            widths_here = widths_here[::-1]
        other, widths_there = widths.setdefault(path, (name, widths_here))
        if widths_here != widths_there:
            misfits[name] = f"does not fit {other}: are the experts stacked the other way around?"
    return misfits


def _is_stack(info: TensorInfo, stacked: Stacked) -> bool:
    return len(info.shape) == 3 and info.shape[-1 if stacked.transposed else 1] % len(stacked.parts) == 0


def _unstack(info: TensorInfo, experts_at: Experts, stacked: Stacked) -> list[Layer]:
    """One layer for each expert and part of a stacked tensor [E, in, parts*out] or [E, parts*out, in]."""
    experts, rows, cols = info.shape
    count = len(stacked.parts)
    shape = (cols // count, rows) if stacked.transposed else (rows // count, cols)
    path = info.module.rsplit(".", 1)[0]
    if experts_at.beside:
        path += "." + experts_at.path.rsplit(".", 1)[1]
    return [
        Layer(f"{path}.{expert}.{part}", template(f"{path}.0.{part}"), info, shape, expert, number, stacked)
        for expert in range(experts)
        for number, part in enumerate(stacked.parts)
    ]


def _refuse_size(entry: Entry, layers: dict[str, Layer], config: dict[str, Any], size: int) -> None:
    for layer in {(layer.alike, layer.shape): layer for layer in layers.values()}.values():
        problem = indivisible(layer.shape, entry.role(layer.module).split, config, (1, 1), size)
        if problem:
            raise PlanError(
                f"--tp {size} cannot serve this model: {layer.alike}: {problem}",
                "no scheme helps: give a size by which its heads and layers divide; --dry-run lists some",
            )


def _problem_finder(
    entry: Entry,
    layers: dict[str, Layer],
    sets: dict[str, tuple[str, ...]],
    config: dict[str, Any],
    size: int | None,
) -> Callable[[Layer, Scheme], str | None]:
    """A function from a layer and a scheme to why engines cannot load it so; None if they can.

    Args:
        entry: the entry.
        layers: all layers, by module.
        sets: for each that is joined with others, all of its set.
        config: the part of config.json with the language model's sizes.
        size: also on that many ranks.
    """
    problems: dict[tuple[str, tuple[int, int], str, bool], str | None] = {}

    def look(layer: Layer, scheme: Scheme) -> str | None:
        if not scheme.head and is_head(layer.module):
            return "engines load no output head that is stored so"
        role = entry.role(layer.module)
        if not scheme.follows_rows and role.reordered:
            return "engines reorder its rows but not its scales"
        split, problem = role.split, None
        # What the source has so, engines load so: also blocks that are smaller at the edges.
        for rows, _ in () if layer.passes(scheme) else ((layer.shape[0], None), *parts_of(layer.shape, split, config)):
            problem = problem or scheme.format.misfit((rows, layer.shape[1]))
            if not rows and scheme.format.group[0] not in (1, None):
                problem = problem or "config.json does not tell the sizes of what it holds"
        if problem is None and size is not None:
            problem = indivisible(layer.shape, split, config, scheme.format.group, size)
            return problem and f"--tp {size}: {problem}"
        return problem

    def find(layer: Layer, scheme: Scheme) -> str | None:
        if scheme.format.static and (problem := _no_input_scale(layer)):
            return problem
        key = layer.alike, layer.shape, scheme.name, layer.passes(scheme)
        if key not in problems:
            problems[key] = look(layer, scheme)
        return problems[key] or straddles(layer, scheme)

    def straddles(layer: Layer, scheme: Scheme) -> str | None:
        # Of a joined set only the last may end within a block (vLLM 0.32.0, layers/quantization/utils/fp8_utils.py:
        # 1329-1344), as kv_a_proj_with_mqa does.
        height = scheme.format.group[0] or 1
        if layer.shape[0] % height == 0:
            return None
        ragged = [module for module in sets.get(layer.module, ()) if layers[module].shape[0] % height]
        return "engines join it with others, and its rows end within a block" if len(ragged) > 1 else None

    return find


def _no_input_scale(layer: Layer) -> str | None:
    """Why a layer's activations cannot be static; None if they can."""
    found = layer.input_scale
    if found is None:
        return "the source has no input_scale for it"
    if found.dtype not in (*FLOATS, "F64") or math.prod(found.shape) != 1:
        return f"its input_scale is {found.dtype} {list(found.shape)}, not a single float"
    return None


def _settle(
    entry: Entry,
    scheme: Scheme,
    layers: dict[str, Layer],
    find_problem: Callable[[Layer, Scheme], str | None],
    sets: dict[str, tuple[str, ...]],
    options: Options,
    left: set[str],
    known: Iterable[str],
) -> tuple[dict[str, str], dict[str, Other], list[str]]:
    """The layers that stay unquantized with the reason, those of another scheme, and notes.

    What engines join moves together: joined sets, and all experts of a layer.
    """
    wanted = {f"--scheme-for {text}={other.name}": (text, other) for text, other in options.scheme_for}
    ignored = _matches({f"--ignore {text}": text for text in options.ignore}, layers, known)
    mixed = _matches({option: text for option, (text, _) in wanted.items()}, layers, None)
    chosen_by_hand = bool(ignored or mixed or left)
    if layers and not chosen_by_hand and not any(find_problem(layer, scheme) for layer in layers.values()):
        return {}, {}, []
    together: dict[str, list[str]] = {}
    for module in layers:
        together.setdefault(entry.experts(module) or sets.get(module, (module,))[0], []).append(module)
    reasons: dict[str, str] = {}
    others: dict[str, Other] = {}
    widened: dict[str, list[str]] = {}
    fallen: dict[str, list[str]] = {}
    unfit: list[str] = []
    for modules in together.values():
        own = {module: ignored[module] for module in modules if module in ignored}
        if own:
            reasons |= _spread(modules, own, widened)
            continue
        own = {module: "the source has it unquantized" for module in modules if module in left}
        if own:
            reasons |= _spread(modules, own)
            continue
        chosen = scheme
        own = {module: mixed[module] for module in modules if module in mixed}
        if own:
            option = min(own.values(), key=list(wanted).index)
            chosen = wanted[option][1]
            own = _spread(modules, {module: option for module in modules if own.get(module) == option}, widened)
        problems = _look_at(modules, layers, chosen, find_problem)
        if problems and chosen.fallback is not None:
            own, chosen = problems, chosen.fallback
            fallen.setdefault(chosen.title, []).extend(modules)
            problems = _look_at(modules, layers, chosen, find_problem)
        if problems:
            reasons |= problems
            unfit += modules
        elif chosen != scheme:
            others |= {module: Other(chosen, own[module]) for module in modules}
    notes = [
        f"{option} widened to what engines join with it: {', '.join(collapse(modules))}"
        for option, modules in widened.items()
    ]
    for title, modules in fallen.items():
        notes.append(f"{title} instead for {_share(modules, layers)}: {', '.join(collapse(modules))}")
    if len(reasons) == len(layers):
        _refuse_nothing(entry.model, reasons, options)
        notes.append("nothing is quantized")
    if unfit and scheme.format.static:
        notes.append(f"the source has no usable input_scale for {_share(unfit, layers)}, which stay unquantized")
    elif unfit:
        ranks = f" on {options.tp} ranks" if options.tp is not None else ""
        notes.append(
            f"blocks do not divide{ranks}, which leaves {_share(unfit, layers)} unquantized; "
            "--scheme tensor or channel quantizes them too"
        )
    return reasons, others, notes


def _refuse_nothing(model: Model, reasons: dict[str, str], options: Options) -> None:
    """A plan that quantizes nothing is an error, unless --ignore says so."""
    causes = Counter(reason for reason in reasons.values() if not reason.startswith(_SHARES))
    if options.ignore and all(reason.startswith("--ignore ") for reason in causes):
        return
    found = [f"{cause} ({count} layers)" for cause, count in causes.most_common(3)]
    raise PlanError(
        f"nothing would be quantized: {'; '.join(found) or f'{model.name} has no layer here that could be'}",
        "choose other options, or say --ignore '**' if a copy is what you want",
    )


def _matches(patterns: dict[str, str], layers: dict[str, Layer], known: Iterable[str] | None) -> dict[str, str]:
    """The first option that names each layer, by module.

    Args:
        patterns: by option, as the user typed it.
        layers: what can be quantized.
        known: other modules, which an option may name to no effect; None if it may not.
    """
    found: dict[str, str] = {}
    for option, text in patterns.items():
        pattern = compile_pattern(text.removesuffix(".weight"))
        matched = [
            layer.module
            for layer in layers.values()
            if pattern.fullmatch(layer.module) or pattern.fullmatch(layer.source.module)
        ]
        if not matched and not any(pattern.fullmatch(module) for module in known or ()):
            raise UsageError(
                f"{option} matches no module{'' if known is not None else ' that can be quantized'}",
                "module names are tensor names without .weight, ** stands for any part; --dry-run -v lists them",
            )
        for module in matched:
            found.setdefault(module, option)
    return found


def _spread(modules: list[str], own: dict[str, str], widened: dict[str, list[str]] | None = None) -> dict[str, str]:
    """The reason of each of the modules that share their status: its own, or another's."""
    first = next(module for module in modules if module in own)
    shared = f"{_SHARES}{first.rsplit('.', 1)[-1]} ({own[first]})"
    if widened is not None and len(own) < len(modules):
        widened.setdefault(own[first], []).extend(module for module in modules if module not in own)
    return {module: own.get(module, shared) for module in modules}


def _look_at(
    modules: list[str], layers: dict[str, Layer], scheme: Scheme, find_problem: Callable[[Layer, Scheme], str | None]
) -> dict[str, str]:
    """Why modules that share their status cannot be stored in a scheme, each of them; empty if they can."""
    own = {module: problem for module in modules if (problem := find_problem(layers[module], scheme))}
    return _spread(modules, own) if own else {}


def _share(modules: list[str], layers: dict[str, Layer]) -> str:
    """So many layers, and how much of all that could be quantized they are."""
    share = sum(layers[module].nbytes for module in modules) / sum(layer.nbytes for layer in layers.values())
    return f"{len(modules)} of {len(layers)} layers ({100 * share:.1f} % of their bytes)"


def _refuse_experts(entry: Entry, fates: Fates) -> None:
    if all(scheme.experts for scheme in (fates.scheme, *(other.scheme for other in fates.others.values()))):
        return
    refused: dict[str, Scheme] = {}
    for layer, scheme in fates.quantized:
        if not scheme.experts and (path := entry.experts(layer.module)):
            refused[path] = scheme
    if refused:
        scheme = next(iter(refused.values()))
        raise PlanError(
            f"{', '.join(collapse(refused))}: engines load no experts with {scheme.title} in the {scheme.method} "
            "format",
            "use --scheme channel or --format fp8, give them another scheme with --scheme-for, or leave them as they "
            "are with --ignore",
        )


def _ignored_names(entry: Entry, fates: Fates) -> list[str]:
    """What must be listed as ignored: checkpoint names without .weight, and the engines' other names for them.

    SGLang 0.5.23 has towers' modules under names that no rule tells, and takes whole subtrees: those it lists by a name
    in the fp8 format (layers/quantization/utils.py:51-64) and by an expression in the other.

    vLLM 0.32.0 compares for equality (layers/quantization/utils/quant_utils.py:617-691, for compressed-tensors
    utils/config_utils.py:226-293); experts match by the path that holds them all, for compressed-tensors by the names
    of the first. lm_head is listed unless it is quantized: transformers would quantize one tied to the embedding.
    """
    quantized = (module for module in fates.layers if module not in fates.reasons)
    names: dict[str, None] = {} if any(map(is_head, quantized)) else {"lm_head": None}
    modules = [
        keep.tensor.module
        for keep in fates.kept
        if len(keep.tensor.shape) == 2 and keep.tensor.name.endswith(".weight")
    ]
    for module in (*modules, *(module for module in fates.layers if module in fates.reasons)):
        experts = entry.experts(module)
        if experts:
            names[experts] = None
            # SGLang 0.5.23 asks by these, whatever the projections are called (compressed_tensors.py:883).
            names |= {f"{experts}.0.{part}_proj": None for part in ("gate", "up", "down")}
        names[module] = None
    towers = [
        tower
        for tower in entry.model.towers
        if any(tower in module.split(".") for module in names)
        and not any(tower in layer.module.split(".") for layer, _ in fates.quantized)
    ]
    if fates.scheme.method == "compressed-tensors":
        towers = [f"re:(.*[.])?{tower}[.].*" for tower in towers]
    return [*entry.engine_names(names), *towers]


def _targets(entry: Entry, fates: Fates) -> dict[Scheme, list[str]]:
    """The names under which engines find the layers that have another scheme, by scheme; and the output head's.

    vLLM 0.32.0 (quantization/compressed_tensors/utils.py:73-119) and compressed-tensors 0.20 (utils/match.py:116-151)
    look for a layer's name before its class, so the group for all Linear layers does not get these. An output head
    is no Linear to vLLM, and is found by name only. Experts have one entry for each layer of them: they are many, and
    transformers 5.23 takes an expression that says "experts" for theirs. vLLM renames no expression, so it begins at
    the number of the layer.
    """
    found: dict[Scheme, tuple[dict[str, None], dict[str, None], dict[str, None]]] = {}
    for module in fates.layers:
        head = is_head(module) and module not in fates.reasons
        if head or module in fates.others:
            modules, experts, heads = found.setdefault(fates.scheme_of(module), ({}, {}, {}))
            path = entry.experts(module)
            if head:
                heads[f"re:(.*[.])?{module.rsplit('.', 1)[-1]}"] = None
            elif path:
                experts[path] = None
            else:
                modules[module] = None
    return {
        scheme: [
            *entry.engine_names(modules),
            *dict.fromkeys(_expression(path) for path in entry.engine_names(experts)),
            *heads,
        ]
        for scheme, (modules, experts, heads) in found.items()
    }


def _expression(path: str) -> str:
    """What matches all experts below a path, whatever an engine puts before the layer's number."""
    parts = path.split(".")
    number = next(number for number, part in enumerate(parts) if part.isdecimal())
    return "re:(.*[.])?" + "[.]".join([*map(re.escape, parts[number - 1 :]), ".*"])
