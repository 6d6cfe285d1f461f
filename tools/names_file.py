"""Prints the names file of a checkpoint, as tests/names/ has one for each architecture.

    python tools/names_file.py MODEL [--revision REV] > tests/names/Qwen3ForCausalLM.txt

MODEL is a directory, or a Hub repository of which only config.json, the index and the shards' headers are fetched.
docs/adding-an-architecture.md says what the lines mean.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

try:
    import openquant  # noqa: F401
except ModuleNotFoundError:
    # Run from a checkout that nobody has installed.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from openquant.errors import OpenQuantError
from openquant.files.checkpoint import Checkpoint, open_checkpoint
from openquant.formats.quantization import find_quantization
from openquant.hub.source import Source, find_source

_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9]\d{0,17})(?=\.|$)")
# What plans ask config.json for: how many there are of heads, layers and experts, and sizes of heads and groups. The
# tests read these keys (tests/support/published_checkpoints.py), and those that are true.
_COUNT = re.compile(r"n_\w+|\w*(?:num_|_num|heads|head_dim|groups|norm_size)\w*")


def describe(checkpoint: Checkpoint, source: Source) -> list[str]:
    """The lines of a names file: comments, then one for all tensors alike, such as

    "model.layers.{0..27}.self_attn.k_proj.weight  28  [1024, 2048]  BF16"
    """
    text = checkpoint.config.get("text_config")
    config = text if isinstance(text, dict) else checkpoint.config
    counts = {key: value for key, value in config.items() if _COUNT.fullmatch(key) and type(value) is int}
    switches = [f"{key} true" for key, value in config.items() if re.fullmatch(r"\w+_\w+", key) and value is True]
    origin = source.identity or "a directory"
    lines = [
        f"# {source.name}, {len(checkpoint.tensors)} tensors",
        f"# names, shapes and dtypes: the headers of the shards of {origin}",
        "# " + ", ".join([*(f"{key} {value}" for key, value in counts.items()), *switches]),
    ]
    quantization = find_quantization(checkpoint.config)
    if quantization is not None:
        lines.append(f"# quantization_config {json.dumps(quantization)}")
    alike: dict[tuple[tuple[str, ...], tuple[int, ...], str], list[tuple[int, ...]]] = {}
    for info in checkpoint.tensors.values():
        numbers = tuple(map(int, _NUMBER.findall(info.name)))
        alike.setdefault((tuple(_NUMBER.split(info.name)), info.shape, info.dtype), []).append(numbers)
    for (parts, shape, dtype), found in alike.items():
        for ranges, count in factors(found):
            name = parts[0] + "".join(text + part for text, part in zip(ranges, parts[1:], strict=True))
            lines.append(f"{name}  {count}  {list(shape)}  {dtype}")
    return lines


def factors(found: Iterable[tuple[int, ...]]) -> Iterator[tuple[list[str], int]]:
    """Tuples of numbers as products of ranges: (0, 0), (0, 1), (1, 0), (1, 1) are one, ["{0..1}", "{0..1}"], of 4."""
    tails: dict[int, set[tuple[int, ...]]] = {}
    for numbers in found:
        if not numbers:
            yield [], 1
            return
        tails.setdefault(numbers[0], set()).add(numbers[1:])
    heads: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for head, rest in tails.items():
        heads.setdefault(frozenset(rest), []).append(head)
    for following, firsts in heads.items():
        for ranges, count in factors(sorted(following)):
            yield [in_braces(firsts), *ranges], len(firsts) * count


def in_braces(numbers: list[int]) -> str:
    """ "7", "{0..27}", "{0..2,4}" or, of numbers at equal distances, "{3..39..4}"."""
    ordered = sorted(numbers)
    steps = {after - before for before, after in pairwise(ordered)}
    if len(ordered) == 1:
        return str(ordered[0])
    if len(steps) == 1 and len(ordered) > 2 and steps != {1}:
        return f"{{{ordered[0]}..{ordered[-1]}..{steps.pop()}}}"
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(str(low) if low == high else f"{low}..{high}" for low, high in runs) + "}"


def main() -> int:
    """Print the file, or what is wrong with the checkpoint; 0 or 2."""
    parser = argparse.ArgumentParser(description="Print the names file of a checkpoint, from its headers alone.")
    parser.add_argument("model", metavar="MODEL", help="a directory, or a Hub repository")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hub repository")
    arguments = parser.parse_args()
    try:
        source = find_source(arguments.model, arguments.revision)
        checkpoint = open_checkpoint(source.root, source.remote, source.absent)
    except OpenQuantError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return 2
    print("\n".join(describe(checkpoint, source)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
