"""openquant verify of outputs whose codes cannot be computed again: by GPTQ, and of a tool that is not known."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import EXAMPLE
from openquant import compress, verify
from support import small_checkpoints
from support.rows import for_each

UP = "model.layers.1.mlp.up_proj"
TEXTS: dict[str, Any] = {"samples": 2, "length": 64}
# Codes of each scheme, and what turns their signs.
CODES = {
    "int4": ("weight_packed", 0xFF),
    "nvfp4": ("weight_packed", 0x88),
    "channel": ("weight", 0x80),
    "int8": ("weight", 0xFF),
}


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The example by GPTQ, by scheme."""
    root = tmp_path_factory.mktemp("gptq")
    for scheme in CODES:
        compress(EXAMPLE, root / scheme, scheme, gptq=True, **TEXTS)
    return {scheme: root / scheme for scheme in CODES}


def zeroed(codes: torch.Tensor, signs: int) -> torch.Tensor:
    return torch.zeros_like(codes)


def negated(codes: torch.Tensor, signs: int) -> torch.Tensor:
    return codes ^ signs


def one_row_zeroed(codes: torch.Tensor, signs: int) -> torch.Tensor:
    codes[3] = 0
    return codes


def part_of_a_row_zeroed(codes: torch.Tensor, signs: int) -> torch.Tensor:
    """In words zero is the lowest code."""
    codes[3, -(codes.shape[1] // 2) :] = 0
    return codes


# Each does its damage to a matrix of its own.
DAMAGE = {
    "model.layers.0.mlp.up_proj": zeroed,
    "model.layers.0.mlp.gate_proj": negated,
    "model.layers.2.mlp.up_proj": one_row_zeroed,
    "model.layers.2.mlp.gate_proj": part_of_a_row_zeroed,
}


@contextmanager
def damaged(out: Path, changes: dict[str, Callable[[torch.Tensor], torch.Tensor]]) -> Iterator[None]:
    """With the bytes of some tensors [rows, bytes of a row] changed, by name."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        for name in changes.keys() & weights.keys():
            stored = weights[name]
            data = changes[name](stored.view(torch.uint8).clone()).contiguous()
            weights[name] = data.view(stored.dtype).reshape(stored.shape)

    before = {path: path.read_bytes() for path in out.glob("*.safetensors")}
    small_checkpoints.change_weights(out, change)
    yield
    for path, data in before.items():
        path.write_bytes(data)


@for_each(("scheme", "journal"), [("int4", False), *((scheme, True) for scheme in CODES)])
def test_codes_that_gptq_did_not_choose(tmp_path: Path, rounded: dict[str, Path], scheme: str, journal: bool) -> None:
    out = shutil.copytree(rounded[scheme], tmp_path / "out")
    if not journal:
        (out / ".openquant.json").unlink()
    last, signs = CODES[scheme]
    report = verify(out, EXAMPLE, full=True)
    assert report.problems == ()

    planted = [*DAMAGE] if scheme == "int4" else [*DAMAGE][:2]
    with damaged(out, {f"{name}.{last}": partial(DAMAGE[name], signs=signs) for name in planted}):
        problems = verify(out, EXAMPLE, full=True).problems
    assert len(problems) == len(planted), problems
    for name in planted:
        [problem] = [each for each in problems if f": {name}.{last} " in each]
        said = ("where GPTQ explains", "has one code in all of columns")
        assert any(text in problem for text in said), problem


def test_a_card_turns_nothing_off(tmp_path: Path) -> None:
    """Whoever writes a README may write any sentence of ours into it."""
    source = small_checkpoints.write(tmp_path / "source")
    out = tmp_path / "out"
    compress(source, out, "int4")
    path, row = out / "README.md", "| format |"
    planted = ("| rounded by | GPTQ, x |", "| codes | those of the source, with its scales |", "| scales | x |")
    path.write_text(path.read_text().replace(row, "\n".join([*planted, row])))
    with damaged(out, {f"{UP}.weight_packed": lambda codes: codes.index_fill(0, torch.tensor(3), 0)}):
        for kept in (True, False):
            if not kept:
                (out / ".openquant.json").unlink()
            [problem] = verify(out, source, full=True).problems
            assert f": {UP}.weight_packed " in problem
