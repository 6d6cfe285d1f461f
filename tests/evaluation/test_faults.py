"""Faults planted in sound outputs are found, and placed; sound outputs have nothing to suspect.

All that is made of a model is held against it in one evaluation, so that the source runs once.

The dense model is the trained example. The mixture's weights are random, and its faults are placed by weights: of a small
one that was trained to a perplexity of 43 the KL says too little. There sound FP8 had 0.0012 to 0.0026 nats, a router in
codes 0.0017, two experts' scales swapped 0.0023, a scale 1.1 times too large 0.0026, and an expert zeroed 0.0057.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import EXAMPLE, change_json, everything
from openquant import compress
from openquant.data.corpus import read_corpus
from openquant.data.tokenizer import load_tokenizer
from openquant.evaluation.compare import compare_outputs
from openquant.evaluation.results import ModelUnderTest
from openquant.files.checkpoint import open_checkpoint
from openquant.options import Texts
from support import small_checkpoints

UP = "model.layers.2.mlp.up_proj"
FP8 = torch.float8_e4m3fn
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Fault:
    """What is done to a copy of a sound output, and what must be said of it: all suspects, and one of some verdicts."""

    of: str
    plant: Callable[[Path], None]
    suspects: set[str]
    verdict: tuple[str, ...] = ("same", "close", "similar")
    # May be suspected beside: that depends on the text, which is each Python version's own.
    also: frozenset[str] = frozenset()


def weights(change: Callable[[Weights], Any]) -> Callable[[Path], None]:
    return lambda root: small_checkpoints.change_weights(root, change)


def scaled(name: str, factor: float, entry: int | slice = slice(None)) -> Callable[[Path], None]:
    """A stored scale, or one of its entries, times a factor."""

    def change(held: Weights) -> None:
        held[name].view(-1)[entry] *= factor

    return weights(change)


def swapped(one: str, other: str) -> Callable[[Path], None]:
    def change(held: Weights) -> None:
        held[one], held[other] = held[other], held[one]

    return weights(change)


def zeroed(*names: str) -> Callable[[Path], None]:
    """Codes that are all zero."""

    def change(held: Weights) -> None:
        for name in names:
            held[name].view(torch.uint8).zero_()

    return weights(change)


def router_in_codes(layer: str) -> Callable[[Path], None]:
    """A router stored as the scheme "channel" stores a layer, and no longer named as one that stays."""

    def plant(root: Path) -> None:
        def change(held: Weights) -> None:
            weight = held[f"{layer}.weight"].float()
            scale = weight.abs().amax(1, keepdim=True) / 448
            held[f"{layer}.weight"] = (weight / scale).to(FP8)
            held[f"{layer}.weight_scale"] = scale.to(
                held[f"{layer.rpartition('.mlp')[0]}.self_attn.q_proj.weight_scale"].dtype
            )

        small_checkpoints.change_weights(root, change)
        change_json(root / "config.json", lambda found: found["quantization_config"]["ignore"].remove(layer))

    return plant


def cache_scaled(factor: float) -> Callable[[Path], None]:
    """The scales of all keys and values, times a factor."""

    def change(held: Weights) -> None:
        for name in held:
            if name.endswith((".k_scale", ".v_scale")):
                held[name] *= factor

    return weights(change)


def other_rope(root: Path) -> None:
    change_json(root / "config.json", lambda found: found["rope_parameters"].update(rope_theta=1e6))


FEW_TEXTS: dict[str, Any] = {"samples": 8, "length": 128}
# How each sound output is made: the arguments of compress().
SCHEMES: dict[str, dict[str, Any]] = {
    **{name: {"scheme": name} for name in ("tensor", "channel", "block", "mxfp8", "int8", "nvfp4", "mxfp4")},
    "channel, some in blocks": {"scheme": "channel", "scheme_for": {"**.down_proj": "block"}},
    "channel, FP8 cache": {"scheme": "channel", "kv_cache": "fp8", "calibrate": True, **FEW_TEXTS},
    "int4, GPTQ": {"scheme": "int4", "gptq": True, **FEW_TEXTS},
    "int4, asymmetric, GPTQ": {"scheme": "int4", "asymmetric": True, "group_size": "32", "gptq": True, **FEW_TEXTS},
    "channel, GPTQ": {"scheme": "channel", "gptq": True, **FEW_TEXTS},
    "int4, AWQ": {"scheme": "int4", "awq": True, **FEW_TEXTS},
    "int8, SmoothQuant": {"scheme": "int8", "smooth": 0.5, **FEW_TEXTS},
}
O_PROJ = "model.layers.{}.self_attn.o_proj"
DENSE = {
    "a scale 1.1 times too large, of one block": Fault("block", scaled(f"{UP}.weight_scale_inv", 1.1, 3), {UP}),
    "scales of two layers swapped": Fault(
        "channel",
        swapped(*(f"{O_PROJ.format(number)}.weight_scale" for number in (1, 3))),
        {O_PROJ.format(1), O_PROJ.format(3)},
    ),
    "a norm 1.1 times too large": Fault(
        "channel", scaled("model.layers.1.input_layernorm.weight", 1.1), {"model.layers.1.input_layernorm"}
    ),
    "rope_theta changed": Fault("block", other_rope, {"config.json"}, ("similar", "changed")),
    "a scale twice too large, of one group that GPTQ rounded": Fault(
        "int4, GPTQ", scaled(f"{UP}.weight_scale", 2, 5), {UP}
    ),
    "a scale twice too large, of one group, folded by AWQ": Fault(
        "int4, AWQ", scaled(f"{UP}.weight_scale", 2), {"model.layers.2"}, ("similar", "changed")
    ),
    "KV scales fifty times too small": Fault(
        "channel, FP8 cache",
        cache_scaled(1 / 50),
        {f"model.layers.{number}" for number in range(4)},
        ("changed", "broken"),
    ),
}
EXPERT = "model.layers.1.mlp.experts"
MIXED = {
    "an expert zeroed": Fault(
        "tensor",
        zeroed(*(f"{EXPERT}.3.{part}_proj.weight" for part in ("gate", "up", "down"))),
        {f"{EXPERT}.gate_up_proj[3]", f"{EXPERT}.down_proj[3]"},
        ("close", "similar", "changed"),
        frozenset(["model.layers.1"]),
    ),
    "a scale of an expert 1.1 times too large": Fault(
        "tensor", scaled(f"{EXPERT}.1.up_proj.weight_scale", 1.1), {f"{EXPERT}.gate_up_proj[1]"}
    ),
    "scales of two experts swapped": Fault(
        "channel",
        swapped(f"{EXPERT}.1.down_proj.weight_scale", f"{EXPERT}.2.down_proj.weight_scale"),
        {f"{EXPERT}.down_proj[1]", f"{EXPERT}.down_proj[2]"},
    ),
    "a router in codes": Fault("channel", router_in_codes("model.layers.1.mlp.gate"), {"model.layers.1.mlp.gate"}),
}


def evaluated(source: Path, faults: dict[str, Fault], root: Path) -> dict[str, dict[str, Any]]:
    """What eval finds of each sound output and of each with a fault, all in one pass."""
    schemes = sound_schemes(faults)
    for name in schemes:
        compress(source, root / name, **SCHEMES[name])
    for name, fault in faults.items():
        shutil.copytree(root / fault.of, root / name)
        fault.plant(root / name)
    return assess(source, [root / name for name in (*schemes, *faults)])


def sound_schemes(faults: dict[str, Fault]) -> list[str]:
    """The outputs in which nothing must be suspected: all at night, by day those that have faults too."""
    return [name for name in SCHEMES if everything() or name in {fault.of for fault in faults.values()}]


def assess(source: Path, outputs: list[Path]) -> dict[str, dict[str, Any]]:
    """By name, what is found of outputs on a little text."""
    corpus = read_corpus(Texts(samples=2, length=128), load_tokenizer(source))
    first, *others = (ModelUnderTest(each.name, open_checkpoint(each)) for each in (source, *outputs))
    return {each["output"]["name"]: each for each in compare_outputs(first, others, corpus).outputs}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return evaluated(EXAMPLE, DENSE, tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("mixture")
    return evaluated(write_mixture(root / "source"), MIXED, root)


def write_mixture(root: Path) -> Path:
    """A Qwen3 of four layers with four experts each, and the example's tokenizer."""
    held = {}
    for number in range(4):
        for name, tensor in small_checkpoints.tensors("Qwen3MoeForCausalLM", number, vocab=2048).items():
            if not name.startswith("model.layers.0."):
                held[name.replace("layers.1.", f"layers.{number}.")] = tensor
    small_checkpoints.write(root, "Qwen3MoeForCausalLM", vocab=2048, weights=held)
    change_json(root / "config.json", lambda found: found.update(num_hidden_layers=4, mlp_only_layers=[]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(EXAMPLE / name, root / name)
    return root


def test_faults_are_found_and_placed(
    dense: dict[str, dict[str, Any]], mixture: dict[str, dict[str, Any]], subtests: pytest.Subtests
) -> None:
    for found, faults in ((dense, DENSE), (mixture, MIXED)):
        for name, fault in faults.items():
            with subtests.test(name):
                one = found[name]
                assert fault.suspects <= set(one["suspects"]) <= fault.suspects | fault.also, one["reasons"]
                assert one["verdict"] in fault.verdict, one["reasons"]


def test_figures_say_how_far_a_fault_goes(dense: dict[str, dict[str, Any]], mixture: dict[str, dict[str, Any]]) -> None:
    sound, small = dense["channel, FP8 cache"], dense["KV scales fifty times too small"]
    assert small["kl"]["mean"] > 30 * sound["kl"]["mean"]
    assert (sound["kv_cache"], dense["channel"]["kv_cache"]) == ("fp8", "auto")
    shares = [layer["routed_otherwise"] for layer in mixture["channel"]["layers"]]
    assert 0 < max(shares) < 0.2
    assert not any("routed_otherwise" in layer for layer in dense["channel"]["layers"])


def test_nothing_is_suspected_of_a_sound_output(
    dense: dict[str, dict[str, Any]], mixture: dict[str, dict[str, Any]]
) -> None:
    for found, faults in ((dense, DENSE), (mixture, MIXED)):
        for name in sound_schemes(faults):
            assert found[name]["suspects"] == [], name
            assert found[name]["kl"]["mean"] <= 0.05, name
