"""Static activations with the scales of a calibration, by the kernel of vLLM that rounds activations by them.

On CPUs vLLM otherwise takes a kernel that leaves activations as they are, and a wrong scale would not show.
"""

from __future__ import annotations

import pytest
from engine_client import Answers, find_engine, rewrite

from conftest import EXAMPLE
from openquant import calibrate, compress
from support import small_checkpoints

pytestmark = pytest.mark.serve

# vLLM kernels/linear/scaled_mm/cpu.py: without it comes PerTensorTorchFP8ScaledMMLinearKernel, with W8A8.
UNROUNDED = "CPUFp8PerTensorScaledMMLinearKernel"


@pytest.fixture(scope="module")
def logprobs(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Of the source, with dynamic activations, with static ones in both formats, and with scales that are too small."""
    engine, root = find_engine(), tmp_path_factory.mktemp("static")
    found = calibrate(EXAMPLE, root / "calibration", samples=16)
    models = {"source": EXAMPLE, "dynamic": root / "dynamic"}
    compress(EXAMPLE, models["dynamic"])
    for format in ("fp8", "compressed-tensors"):
        models[format] = root / format
        compress(EXAMPLE, models[format], format=format, activation_scheme="static", calibration=found)
        tensors = small_checkpoints.read(models[format])
        smaller = {name: each / 4 if name.endswith("input_scale") else each for name, each in tensors.items()}
        models[f"{format}/4"] = rewrite(models[format], root / f"{format}-4", smaller)
    return engine.logprobs(models, root / "answers", "text", VLLM_DISABLED_KERNELS=UNROUNDED)


@pytest.mark.parametrize("format", ["fp8", "compressed-tensors"])
def test_static_scales_lose_no_more_than_dynamic_ones(format: str, logprobs: Answers) -> None:
    dynamic = logprobs.between("source", "dynamic")
    # Activations are rounded too: weights alone are 0.0013 off.
    assert dynamic > 0.002
    assert logprobs.between("source", format) <= 1.05 * dynamic


@pytest.mark.parametrize("format", ["fp8", "compressed-tensors"])
def test_control_scales_that_are_too_small_show(format: str, logprobs: Answers) -> None:
    """Four times smaller they cut off what is larger than half of the largest activation."""
    assert logprobs.between("source", f"{format}/4") > 2 * logprobs.between("source", "dynamic")
