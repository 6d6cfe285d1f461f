"""Builds a class of transformers without weights, for many configs, and sorts its tensors by name template."""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.core_model_loading import revert_weight_conversion  # noqa: E402

from openquant.models import MODELS  # noqa: E402
from openquant.plan.architecture import mtp_layer_finder  # noqa: E402
from openquant.registry.architecture import MTP_LAYER, ModuleRules  # noqa: E402
from support import small_checkpoints, small_models  # noqa: E402

Shape = tuple[int, ...]
Changes = frozenset[tuple[str, Any]]
BASE: Changes = frozenset()

# Keys that change no tensor: tokens, dropout, activations, training, generation.
_SKIPPED = re.compile(
    r".*(_token|_token_ids?|_token_index|_act|_std|_length|_coef)|.*(dropout|eps|initializer|activation|beam"
    r"|temperature|aux_loss|jitter|softcap|topk|top_k|routed_scaling|attentions|use_kernel|kernel_config).*|(rope|output|time"
    r"_step|scale|sliding_window).*|dtype|torch_dtype|transformers_version|architectures|model_type|use_cache|return_dict"
    r"|chunk_size_feed_forward|is_encoder_decoder|id2label|label2id|problem_type|_name_or_path|max_window_layers"
    r"|pretraining_tp|attention_chunk_size|n_group|norm_topk_prob"
)
# Of parts that small models do not have whole.
UNCHECKED = re.compile(r"model\.vision_tower\.timm_model\.|.*\.nin_shortcut\.")


class Entry(NamedTuple):
    """What a build has under one name template: the shape, and how many tensors if it counts experts and the like."""

    shape: Shape
    tensors: int


class Structure(NamedTuple):
    """A build's tensors by name template: those outside of lists, and those of each element of each list."""

    outside: dict[str, Entry]
    lists: dict[str, dict[int, dict[str, Entry]]]


# One axis of the tensors under a name template: (prefix of the list or "", element, name template, axis). Axis -1 is
# the number of tensors; with an empty template, the number of elements of the list.
Axis = tuple[str, int, str, int]


def build(architecture: str, config: dict[str, Any], published: bool = True) -> dict[str, Shape]:
    """Return the names and shapes that published files of a class have for this config.json.

    With `published` false, those that transformers saves, which may have experts one by one in place of stacks.
    """
    small = small_models.MODELS.get(architecture, small_models.Small(config["model_type"]))
    made_as, model_type = small.made_as or (architecture, small.model_type)
    arguments = config[small.text] if small.alone else config
    if small.known_as:
        arguments[small.known_as] = arguments.pop(small.text)
    if small.inside and small.outside:
        arguments |= arguments.pop(small.inside)
    arguments.pop("model_type", None)

    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = getattr(transformers, made_as)(transformers.AutoConfig.for_model(model_type, **arguments))
        unsaved = {*(model.all_tied_weights_keys or {}), *(model._keys_to_ignore_on_save or ())}
        weights = {name: weight for name, weight in model.state_dict().items() if name not in unsaved}
        weights = revert_weight_conversion(model, weights)

    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    if architecture == "Gemma3ForConditionalGeneration":
        shapes = {re.sub(r"^vision_tower", "vision_tower.vision_model", name): shape for name, shape in shapes.items()}
    for prefix, other in small.renames.items():
        shapes = {re.sub(f"^{prefix}", other, name): shape for name, shape in shapes.items()}
    for prefix, other in small.copies.items():
        if not is_mtp(architecture, f"{other}weight"):
            shapes |= {
                other + name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)
            }
    if not published:
        return shapes
    return {name: shape for name, shape in shapes.items() if not small.drop or not re.fullmatch(small.drop, name)}


class Builds:
    """The builds of one class with changed configs."""

    def __init__(self, architecture: str, published: bool) -> None:
        self.architecture, self.published = architecture, published
        # Tensors that another tool than transformers makes.
        self.extra = _extra(architecture) if published else {}
        self.config = small_checkpoints.config(architecture)
        # Other names of keys: num_local_experts for num_experts.
        self.aliases: dict[str, str] = {}
        # Keys that the small model's config.json says.
        self.said = {path for path, _ in _flatten(self.config)}
        self.defaults = self._defaults()
        self._shapes: dict[Changes, dict[str, Shape] | None] = {}
        self._structures: dict[Changes, Structure | None] = {}
        self.counted: set[str] = set()

    def _defaults(self) -> dict[str, Any]:
        """All keys that config.json says or that have a default, by their path in config.json."""
        small = small_models.MODELS.get(self.architecture)
        said = dict(_flatten(self.config))
        self.aliases |= small.also if small else {}
        if small:
            said = {path: value for path, value in said.items() if path not in small.also}
            self.aliases = {other: path for path, other in small.also.items()}
        if small and (small.known_as or small.inside or small.alone):
            return said
        model_type = (small and small.made_as and small.made_as[1]) or self.config["model_type"]
        arguments = {key: value for key, value in copy.deepcopy(self.config).items() if key != "model_type"}
        config = transformers.AutoConfig.for_model(model_type, **arguments)
        defaults = dict(_flatten(config.to_dict()))
        for prefix, part in _parts(config):
            for name, other in part.attribute_map.items():
                path, other_path = f"{prefix}{name}", f"{prefix}{other}"
                if path in said:
                    defaults.pop(other_path, None)
                    self.aliases[path] = other_path
                else:
                    defaults.pop(path, None)
                    self.aliases[other_path] = path
        # Of parts that config.json has; setting a key of another would make it.
        return {**{path: value for path, value in defaults.items() if self._has_part(path)}, **said}

    def _has_part(self, path: str) -> bool:
        part: Any = self.config
        for key in path.split(".")[:-1]:
            part = part.get(key) if isinstance(part, Mapping) else None
        return isinstance(part, Mapping)

    def shapes(self, changes: Changes) -> dict[str, Shape] | None:
        """Return the shapes of a build; None if transformers refuses the config."""
        if changes not in self._shapes:
            config = copy.deepcopy(self.config)
            for path, value in sorted(changes, key=lambda change: change[0]):
                _set(config, path, copy.deepcopy(_thawed(value)), self.defaults)
            try:
                self._shapes[changes] = {**build(self.architecture, config, self.published), **self.extra}
            except Exception:
                self._shapes[changes] = None
        return self._shapes[changes]

    def taken(self, path: str, value: Any) -> Any:
        """Return what a class makes of a key's value: the last layer of some has full attention whatever it says."""
        small = small_models.MODELS.get(self.architecture)
        if small and (small.known_as or small.inside or small.alone):
            return value
        config = copy.deepcopy(self.config)
        _set(config, path, copy.deepcopy(_thawed(value)), self.defaults)
        model_type = (small and small.made_as and small.made_as[1]) or config["model_type"]
        config.pop("model_type")
        made = dict(_flatten(transformers.AutoConfig.for_model(model_type, **config).to_dict()))
        return made.get(path, value)

    def structure(self, changes: Changes) -> Structure | None:
        """Return a build's tensors by name template."""
        if changes not in self._structures:
            shapes = self.shapes(changes)
            self._structures[changes] = None if shapes is None else sort_tensors(shapes, self.counted)
        return self._structures[changes]

    def is_extra(self, axis: Axis) -> bool:
        """Whether transformers does not build the tensor of an axis."""
        prefix, element, template, _ = axis
        names = [f"{prefix}.{element}.{template}" if prefix else template]
        return bool(self.extra) and any(re.fullmatch(_as_regex(names[0]), name) for name in self.extra)

    def value(self, axis: Axis, changes: Changes) -> int | None:
        """Return the length of an axis in a build; None if the build lacks the tensor."""
        structure = self.structure(changes)
        if structure is None:
            return None
        prefix, element, template, number = axis
        if not template:
            return len(structure.lists.get(prefix, ())) or None
        entries = structure.lists.get(prefix, {}).get(element, {}) if prefix else structure.outside
        entry = entries.get(template)
        if entry is None or number >= len(entry.shape):
            return None
        return entry.tensors if number < 0 else entry.shape[number]


def _parts(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A configuration and those inside it, each with the prefix of its keys."""
    yield prefix, config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if hasattr(part, "sub_configs"):
            yield from _parts(part, f"{prefix}{name}.")


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if not _SKIPPED.fullmatch(key):
            if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
                yield from _flatten(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value


def _set(config: dict[str, Any], path: str, value: Any, defaults: Mapping[str, Any]) -> None:
    """Change a key; lists with an entry for each layer are as long as the new number of layers."""
    *parents, last = path.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
        if not isinstance(config, dict):
            # A part that another change takes away.
            return
    old = config.get(last, defaults.get(path))
    config[last] = value
    if isinstance(value, int) and isinstance(old, int) and value > old > 1 and "layer" in last + "depth":
        for key, entries in list(config.items()):
            if isinstance(entries, (list, str)) and len(entries) == old:
                config[key] = (entries * value)[:value]


def _thawed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def prefixes_of(name: str) -> Iterator[tuple[str, int]]:
    """Each list that a name runs through, earlier numbers as `*`, with the number in it: ("model.layers", 3)."""
    parts: list[str] = []
    for part in name.split("."):
        if part.isdigit():
            yield ".".join(parts), int(part)
            parts.append("*")
        else:
            parts.append(part)


def lengths_of(shapes: Iterable[str]) -> dict[str, set[int]]:
    """Return the numbers of the elements of each list, by its prefix."""
    numbers: dict[str, set[int]] = {}
    for name in shapes:
        for prefix, number in prefixes_of(name):
            numbers.setdefault(prefix, set()).add(number)
    return numbers


def sort_tensors(shapes: Mapping[str, Shape], counted: set[str]) -> Structure:
    """Sort tensors by name template; `counted` are the lists whose numbers are `*`."""
    structure = Structure({}, {})
    for name, shape in shapes.items():
        pattern: list[str] = []
        stars: list[str] = []
        first: tuple[str, int] | None = None
        for part in name.split("."):
            if part.isdigit() and ".".join(stars) in counted and first is None:
                first, pattern = (".".join(pattern), int(part)), []
                stars.append("*")
            elif part.isdigit():
                pattern.append("*" if ".".join(stars) in counted else part)
                stars.append("*")
            else:
                pattern.append(part)
                stars.append(part)
        entries = structure.lists.setdefault(first[0], {}).setdefault(first[1], {}) if first else structure.outside
        template = ".".join(pattern)
        count = entries[template].tensors if template in entries else 0
        entries[template] = Entry(shape, count + 1)
    return structure


def _as_regex(template: str) -> str:
    return re.escape(template).replace(r"\*", r"\d+")


def _extra(architecture: str) -> dict[str, Shape]:
    """The tensors of a small model that transformers does not make, but for MTP layers."""
    small = small_models.MODELS.get(architecture)
    if small is None:
        return {}
    return {
        name: shape
        for name, shape in small.extra.items()
        if not is_mtp(architecture, name) and not UNCHECKED.match(name)
    }


def is_mtp(architecture: str, name: str) -> bool:
    """Whether a tensor of a small model belongs to an MTP layer."""
    model, config = MODELS[architecture], small_checkpoints.config(architecture)
    for key in (model.text_config or "").split("."):
        config = config.get(key, config)
    module = name.rpartition(".")[0]
    return mtp_layer_finder(model, config)(module) or ModuleRules(model).rule(module).keep == MTP_LAYER or "mtp" in name
