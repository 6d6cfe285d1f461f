"""Published checkpoints by their tensor names: what the files in names/ say of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from openquant.files.checkpoint import Checkpoint
from openquant.files.shardfile import Location, TensorInfo
from openquant.models import MODELS

NAMES = Path(__file__).parents[1] / "names"
_RANGES = re.compile(r"\{([\d.,]+)\}")


def expand(name: str, experts: int | None = None) -> list[str]:
    """The names that ranges in braces stand for; of so many experts, if not of all."""
    found = _RANGES.search(name)
    if not found:
        return [name]
    bounds = [[int(bound) for bound in part.split("..")] for part in found[1].split(",")]
    # One number, the first and the last, or these and a step.
    numbers = [n for first, *rest in bounds for n in range(first, (rest or [first])[0] + 1, *rest[1:])]
    if experts is not None and name[: found.start()].endswith(".experts."):
        numbers = [number for number in numbers if number < experts]
    return [full for n in numbers for full in expand(name[: found.start()] + str(n) + name[found.end() :], experts)]


def published(name: str) -> Checkpoint:
    """The checkpoint of a file in names/, such as `Qwen3ForCausalLM` or `quantized/DeepseekV3ForCausalLM`."""
    return described((NAMES / f"{name}.txt").read_text(), Path(name).name.split("-")[0])


@cache
def with_few_experts(name: str, experts: int = 4) -> Checkpoint:
    """The same with the first of the experts that are stored one by one: all are named and sized alike."""
    return described((NAMES / f"{name}.txt").read_text(), Path(name).name.split("-")[0], experts)


def described(text: str, architecture: str, experts: int | None = None) -> Checkpoint:
    """A checkpoint as a names file describes it, all in one shard; nothing of it is on disk."""
    tensors: dict[str, TensorInfo] = {}
    config: dict[str, Any] = {}
    more: dict[str, Any] = {}
    quantization = None
    for line in text.splitlines():
        if line.startswith("# quantization_config "):
            quantization = json.loads(line.removeprefix("# quantization_config "))
        elif line.startswith("# config "):
            more = json.loads(line.removeprefix("# config "))
        elif line.startswith("#"):
            config |= {
                key: int(value)
                for key, value in re.findall(
                    r"(\bn_\w+|\w*(?:num_|_num|heads|head_dim|groups|norm_size)\w*) (\d+)", line
                )
            }
            config |= dict.fromkeys(re.findall(r"(\w+_\w+) true\b", line), True)
        if line.startswith("#"):
            continue
        pattern, count, shape, dtype = re.split(r"  +", line)
        names = expand(pattern, experts)
        assert experts is not None or len(names) == int(count)
        sizes = tuple(int(size) for size in re.findall(r"\d+", shape))
        tensors |= {full: TensorInfo(full, dtype, sizes) for full in names}
    where, offset = {}, 0
    for full, info in tensors.items():
        where[full] = Location("model.safetensors", offset)
        offset += info.nbytes
    inside = MODELS[architecture].text_config if architecture in MODELS else None
    for key in reversed(inside.split(".")) if inside else ():
        config = {key: config}
    config = _merged(config, more)
    if quantization is not None:
        config["quantization_config"] = quantization
    return Checkpoint(
        Path("nowhere"), config, architecture, {"model.safetensors": offset}, {}, tensors, where, False, {}, ()
    )


def _merged(config: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """A config with more keys, also in its parts."""
    parts = {key: _merged(config.get(key, {}), value) for key, value in more.items() if isinstance(value, dict)}
    return {**config, **more, **parts}


def shortened(checkpoint: Checkpoint) -> tuple[Checkpoint, Counter[str]]:
    """The same with three layers of each kind and four experts, and how many tensors each of its tensors stands for.

    Layers are of one kind if their tensors have equal names, shapes and dtypes. The third stands for all further ones, and
    the fourth expert for all further experts.
    """
    stands_for: Counter[str] = Counter()
    for name in checkpoint.tensors:
        stands_for[re.sub(r"\.experts\.(\d\d+|[4-9])\.", ".experts.3.", name)] += 1

    layers: dict[str, dict[str, list[TensorInfo]]] = {}
    for name in stands_for:
        prefix, number, _ = (
            re.split(r"\.(\d+)(?=\.)", name, maxsplit=1) if re.search(r"\.\d+\.", name) else (name, "", "")
        )
        layers.setdefault(prefix, {}).setdefault(number, []).append(checkpoint.tensors[name])

    found: Counter[str] = Counter()
    for prefix, by_number in layers.items():
        kinds: dict[frozenset[object], list[str]] = {}
        for number, tensors in by_number.items():
            place = f"{prefix}.{number}."
            kind = frozenset((info.name.removeprefix(place), info.shape, info.dtype) for info in tensors)
            numbers = kinds.setdefault(kind, [])
            numbers.append(number)
            for info in tensors:
                kept = f"{prefix}.{numbers[:3][-1]}.{info.name.removeprefix(place)}" if number else info.name
                found[kept] += stands_for[info.name]
    tensors = {name: checkpoint.tensors[name] for name in found}
    return replace(checkpoint, tensors=tensors, where={name: checkpoint.where[name] for name in found}), found


def lines_of(file: str) -> list[str]:
    """A list beside this file, without comments and empty lines."""
    lines = (Path(__file__).parents[1] / file).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]
