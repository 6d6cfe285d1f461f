"""What dequantize refuses, verify reports: both for each kind of damage, and for many drawn by chance."""

from __future__ import annotations

import itertools
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conftest import EXAMPLE, ROOT
from openquant import compress, dequantize, verify
from openquant.errors import OpenQuantError, SourceError
from support import small_checkpoints
from support.quantized_checkpoints import (
    BLOCKS,
    asymmetric,
    asymmetric_config,
    awq,
    awq_config,
    by_blocks,
    gptq,
    gptq_config,
    store,
)

sys.path.insert(0, str(ROOT / "tests" / "fuzz"))
import damage

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


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints as other tools lay them out."""
    root = tmp_path_factory.mktemp("foreign")
    layouts = {
        "fp8 blocks": (by_blocks(), BLOCKS),
        "asymmetric": (asymmetric(), asymmetric_config()),
        "awq": (awq(), awq_config()),
        "gptq": (gptq(act=True), gptq_config(act=True)),
    }
    return {name: store(root / name, make, config) for name, (make, config) in layouts.items()}


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


def overflowing(held: Weights) -> None:
    scale = scale_of(held)
    scale.fill_(torch.finfo(scale.dtype).max if scale.is_floating_point() else 254)


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
    "scales beyond bfloat16": overflowing,
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
            if name == "scales beyond bfloat16" and scheme in ("int4", "block"):
                assert "decodes to weights that overflow bfloat16: " in str(message)
                assert message in problems(root)


def test_a_weight_beside_its_qweight(foreign: dict[str, Path], tmp_path: Path) -> None:
    for name in ("awq", "gptq"):
        root = small_checkpoints.changed_copy(
            foreign[name], tmp_path / name, lambda held: held.update({f"{UP}.weight": torch.ones(8, 8)})
        )
        message = f"{UP}.weight is there twice, as {UP}.qweight too"
        assert refusal(root, tmp_path / "plain") == message
        assert f"model.safetensors: {UP}.qweight: {message}" in problems(root)


def test_scales_that_a_global_scale_makes_infinite(outputs: dict[str, Path], tmp_path: Path) -> None:
    root = small_checkpoints.changed_copy(
        outputs["nvfp4"], tmp_path / "out", lambda held: held[f"{UP}.weight_global_scale"].fill_(2.0**-126)
    )
    message = f"{UP}.weight_scale in model.safetensors holds inf, which is not a valid scale"
    assert refusal(root, tmp_path / "plain") == message
    assert message in problems(root)


def test_damage_by_chance(outputs: dict[str, Path], foreign: dict[str, Path], tmp_path: Path) -> None:
    """A few of what tests/fuzz plays by the thousand."""
    ways = [damage._tensor, damage._tensor, damage._tensor, damage._header, damage._quantization, damage._bytes]
    for seed in range(12):
        rng = random.Random(seed)
        root = shutil.copytree(rng.choice([*outputs.values(), *foreign.values()]), tmp_path / f"{seed}")
        done = rng.choice(ways)(rng, root)
        refused = refusal(root, tmp_path / "plain")
        assert refused is None or problems(root), (seed, done, refused)


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
