"""What dequantize refuses, verify reports: both for each kind of damage; tests/fuzz draws more by chance."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conftest import EXAMPLE
from openquant import compress, dequantize, verify
from openquant.errors import OpenQuantError, SourceError
from support import small_checkpoints
from support.quantized_checkpoints import awq, awq_config, store

Weights = dict[str, torch.Tensor]
UP = "model.layers.0.mlp.up_proj"
SCHEMES = ["tensor", "block", "int4", "nvfp4"]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model in every scheme."""
    root = tmp_path_factory.mktemp("outputs")
    source = small_checkpoints.write(root / "source", "Qwen3ForCausalLM", vocab=128)
    for scheme in SCHEMES:
        compress(source, root / scheme, scheme)
    return {scheme: root / scheme for scheme in SCHEMES}


def refusal(directory: Path, out: Path) -> str | None:
    """Why dequantize refuses a directory; None if it does not."""
    try:
        dequantize(directory, out, workers=1)
    except OpenQuantError as error:
        return error.message
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return None


def problems(directory: Path) -> tuple[str, ...]:
    """What verify reports, or why it refuses to look."""
    try:
        return verify(directory, workers=1).problems
    except OpenQuantError as error:
        return (error.message,)


def scale_of(held: Weights) -> torch.Tensor:
    return next(held[f"{UP}.{last}"] for last in ("weight_scale", "weight_scale_inv") if f"{UP}.{last}" in held)


def codes_of(held: Weights) -> torch.Tensor:
    return next(held[f"{UP}.{last}"] for last in ("weight", "weight_packed") if f"{UP}.{last}" in held)


def broken_scale(held: Weights) -> None:
    scale_of(held).view(-1).view(torch.uint8)[:8] = 255


def second(last: str) -> Callable[[Weights], None]:
    """The weight in one more form."""

    def change(held: Weights) -> None:
        held[f"{UP}.{last}"] = codes_of(held).clone()

    return change


def without(*lasts: str) -> Callable[[Weights], None]:
    def change(held: Weights) -> None:
        for last in lasts:
            held.pop(f"{UP}.{last}", None)

    return change


DAMAGE: dict[str, Callable[[Weights], None]] = {
    "NaN in a scale": broken_scale,
    "the unquantized weight too": lambda held: held.update(
        {f"{UP}.weight": torch.ones(512, 256, dtype=torch.bfloat16)}
    ),
    "a qweight too": second("qweight"),
    "packed codes too": second("weight_packed"),
    "no scale": without("weight_scale", "weight_scale_inv"),
    "no shape": without("weight_shape"),
    "no global scale": without("weight_global_scale"),
}


def test_what_dequantize_refuses_is_a_problem(
    subtests: pytest.Subtests, outputs: dict[str, Path], tmp_path: Path
) -> None:
    for scheme, name in itertools.product(SCHEMES, DAMAGE):
        with subtests.test(scheme=scheme, damage=name):
            root = small_checkpoints.changed_copy(outputs[scheme], tmp_path / f"{scheme} {name}", DAMAGE[name])
            message = refusal(root, tmp_path / "plain")
            assert message is None or problems(root)


def test_a_weight_beside_its_qweight(tmp_path: Path) -> None:
    root = store(tmp_path / "awq", awq(), awq_config())
    small_checkpoints.change_weights(root, lambda held: held.update({f"{UP}.weight": torch.ones(8, 8)}))
    message = f"{UP}.weight is there twice, as {UP}.qweight too"
    assert refusal(root, tmp_path / "plain") == message
    assert f"model.safetensors: {UP}.qweight: {message}" in problems(root)


def test_files_that_engines_cannot_parse(tmp_path: Path) -> None:
    """A model whose tokenizer was copied by half is neither converted nor called sound."""
    source = shutil.copytree(EXAMPLE, tmp_path / "source")
    compress(source, tmp_path / "out")
    text = (EXAMPLE / "tokenizer.json").read_bytes()
    for root in (source, tmp_path / "out"):
        (root / "tokenizer.json").write_bytes(text[: len(text) // 2])

    with pytest.raises(SourceError) as caught:
        compress(source, tmp_path / "again")
    assert caught.value.message.startswith(f"{source / 'tokenizer.json'} is not valid JSON: ")
    assert not (tmp_path / "again").exists()
    [found] = [problem for problem in verify(tmp_path / "out").problems if "JSON" in problem]
    assert found.startswith(f"{tmp_path / 'out' / 'tokenizer.json'} is not valid JSON: ")
