"""Small models of the architectures that transformers can make. small_models.yaml has what each of them is."""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Small:
    """A small model.

    Attributes:
        model_type: as in config.json.
        config: what config.json says beside or instead of small_checkpoints.COMMON; where it has a text_config, that does.
        without: what of small_checkpoints.COMMON it does not say.
        also: keys that say what another does.
        vision: its vision_config, for wrappers.
        beside: what config.json of a wrapper says beside these two, such as an audio_config.
        inside: the key of config.json under which these are, where that is not its top.
        outside: whether transformers has at its top what is inside.
        text: the key that the language model's config has there.
        known_as: the key that transformers has for it, where that is another.
        made_as: the architecture and model type that transformers makes it as, where it knows it by another name.
        alone: whether it is the language model alone that transformers makes, of a wrapper.
        renames: prefixes that transformers saves, as published files have them.
        drop: expression of names that published files do not hold.
        copies: prefixes of tensors and of their likes that files hold as well (draft layers).
        extra: other tensors.
        zero_norms: norms add one to their weight.
        streamed: whether transformers computes with it under its own name.
        newer: whether the oldest transformers that models are run with has it not, or does not compute it.
        indices: ends of names of tensors whose rows hold different whole numbers, and the number that all are below.
    """

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    also: Mapping[str, str] = field(default_factory=dict)
    vision: Mapping[str, Any] | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)
    inside: str | None = None
    outside: bool = False
    text: str = "text_config"
    known_as: str | None = None
    made_as: tuple[str, str] | None = None
    alone: bool = False
    renames: Mapping[str, str] = field(default_factory=dict)
    drop: str | None = None
    copies: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Shape] = field(default_factory=dict)
    zero_norms: bool = False
    streamed: bool = True
    newer: bool = False
    indices: Mapping[str, int] = field(default_factory=dict)


def _read() -> dict[str, Small]:
    models = yaml.load(Path(__file__).with_suffix(".yaml").read_text(), yaml.CSafeLoader)["models"]
    found = {}
    for name, entry in models.items():
        for key in ("without", "made_as"):
            if key in entry:
                entry[key] = tuple(entry[key])
        # A layer's number may be 0 or 1.
        entry["extra"] = {
            tensor.replace("{0..1}", number): tuple(shape)
            for number in "01"
            for tensor, shape in entry.get("extra", {}).items()
            if number == "0" or "{0..1}" in tensor
        }
        found[name] = Small(**entry)
    return found


MODELS = _read()


def config(architecture: str, common: dict[str, Any]) -> dict[str, Any]:
    """config.json of a small model."""
    small = MODELS[architecture]
    top: dict[str, Any] = {"architectures": [architecture], "model_type": small.model_type}
    text = {key: value for key, value in {**common, **small.config}.items() if key not in small.without}
    text |= {key: text[other] for key, other in small.also.items()}
    if small.vision is None and not small.beside:
        return {**top, **text}
    towers = {"vision_config": dict(small.vision)} if small.vision else {}
    rest = {key: text[key] for key in ("dtype", "tie_word_embeddings")}
    found = {small.text: text, **towers, **rest}
    if small.inside:
        found = {small.inside: {**found, **small.beside[small.inside]}}
    return {**top, **small.beside, **found}


@cache
def saved(architecture: str, config: str) -> dict[str, tuple[Shape, torch.Tensor | None]]:
    """Every tensor of a small model: what transformers saves, as changed by its entry; whole numbers with their values."""
    import transformers
    from transformers.initialization import no_init_weights

    small = MODELS[architecture]
    made_as, model_type = small.made_as or (architecture, small.model_type)
    known = json.loads(config)[small.text] if small.alone else json.loads(config)
    if small.known_as:
        known[small.known_as] = known.pop(small.text)
    if small.inside and small.outside:
        known |= known.pop(small.inside)
    known.pop("model_type")
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as root:
        warnings.simplefilter("ignore")
        # Of its weights only the names and shapes count, but for whole numbers, which are no random ones.
        with no_init_weights():
            model = getattr(transformers, made_as)(transformers.AutoConfig.for_model(model_type, **known))
        model.tie_weights()
        model.save_pretrained(root)
        found: dict[str, tuple[Shape, torch.Tensor | None]] = {}
        with safe_open(f"{root}/model.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found[name] = tuple(part.get_shape()), file.get_tensor(name) if part.get_dtype() == "I64" else None
    for prefix, other in small.renames.items():
        found = {re.sub(f"^{prefix}", other, name): each for name, each in found.items()}
    for prefix, other in small.copies.items():
        found |= {other + name.removeprefix(prefix): each for name, each in found.items() if name.startswith(prefix)}
    kept = {name: each for name, each in found.items() if not small.drop or not re.fullmatch(small.drop, name)}
    return {**kept, **{name: (shape, None) for name, shape in small.extra.items()}}


def shapes(architecture: str, config: str) -> dict[str, Shape]:
    """The shapes of every tensor of a small model."""
    return {name: shape for name, (shape, _) in saved(architecture, config).items()}


def constants(architecture: str, config: str) -> dict[str, torch.Tensor]:
    """What a small model holds of whole numbers, which are the same in all of its kind."""
    return {name: value for name, (_, value) in saved(architecture, config).items() if value is not None}
