"""Faults planted in sound outputs are found: verify names the tensor, eval the layer that answers otherwise. Of sound outputs
eval suspects nothing.

All that is made of a model is held against it in one evaluation, so that the source runs once. The dense model is the
trained example. The mixture's weights are random, of which KL says too little.
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
from openquant import compress, verify
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
    """What is done to a copy of a sound output, what verify must name, and all that eval must suspect where it shows there,
    with one of some verdicts.
    """

    of: str
    plant: Callable[[Path], None]
    named: set[str]
    suspects: frozenset[str] = frozenset()
    verdict: tuple[str, ...] = ()


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
    "rope_theta changed": Fault("block", other_rope, {"rope_parameters.rope_theta"}),
    "a scale twice too large, of one group that GPTQ rounded": Fault(
        "int4, GPTQ", scaled(f"{UP}.weight_scale", 2, 5), {UP}
    ),
    "a scale twice too large, of one group, folded by AWQ": Fault(
        "int4, AWQ", scaled(f"{UP}.weight_scale", 2), {UP}, frozenset(["model.layers.2"]), ("similar", "changed")
    ),
    "KV scales fifty times too small": Fault(
        "channel, FP8 cache",
        cache_scaled(1 / 50),
        {f"model.layers.{number}.self_attn.{part}_scale" for number in range(4) for part in "kv"},
        frozenset(f"model.layers.{number}" for number in range(4)),
        ("changed", "broken"),
    ),
}
EXPERT = "model.layers.1.mlp.experts"
MIXED = {
    "an expert zeroed": Fault(
        "tensor",
        zeroed(*(f"{EXPERT}.3.{part}_proj.weight" for part in ("gate", "up", "down"))),
        {f"{EXPERT}.3.{part}_proj" for part in ("gate", "up", "down")},
    ),
    "a scale of an expert 1.1 times too large": Fault(
        "tensor", scaled(f"{EXPERT}.1.up_proj.weight_scale", 1.1), {f"{EXPERT}.1.up_proj"}
    ),
    "scales of two experts swapped": Fault(
        "channel",
        swapped(f"{EXPERT}.1.down_proj.weight_scale", f"{EXPERT}.2.down_proj.weight_scale"),
        {f"{EXPERT}.1.down_proj", f"{EXPERT}.2.down_proj"},
    ),
    "a router in codes": Fault("channel", router_in_codes("model.layers.1.mlp.gate"), {"model.layers.1.mlp.gate"}),
}


def planted(source: Path, faults: dict[str, Fault], root: Path) -> None:
    """Make the sound outputs, and a copy of one for each fault."""
    for name in sound_schemes(faults):
        compress(source, root / name, **SCHEMES[name])
    for name, fault in faults.items():
        shutil.copytree(root / fault.of, root / name)
        fault.plant(root / name)


def sound_schemes(faults: dict[str, Fault]) -> list[str]:
    """The outputs in which nothing must be suspected: all at night, by day those that have faults too."""
    return [name for name in SCHEMES if everything() or name in {fault.of for fault in faults.values()}]


def assess(source: Path, outputs: list[Path]) -> dict[str, dict[str, Any]]:
    """By name, what is found of outputs on a little text."""
    corpus = read_corpus(Texts(samples=2, length=128), load_tokenizer(source))
    first, *others = (ModelUnderTest(each.name, open_checkpoint(each)) for each in (source, *outputs))
    return {each["output"]["name"]: each for each in compare_outputs(first, others, corpus).outputs}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dense")
    planted(EXAMPLE, DENSE, root)
    return root


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixture")
    planted(write_mixture(root / "source"), MIXED, root)
    return root


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


def test_verify_names_what_is_wrong(dense: Path, mixture: Path, subtests: pytest.Subtests) -> None:
    for root, source, faults in ((dense, EXAMPLE, DENSE), (mixture, mixture / "source", MIXED)):
        for name in sound_schemes(faults):
            with subtests.test(name):
                assert verify(root / name, source, full=True).problems == ()
        for name, fault in faults.items():
            with subtests.test(name):
                problems = verify(root / name, source, full=True).problems
                assert [part for part in fault.named if not any(part in problem for problem in problems)] == []


def test_eval_names_the_layer_and_suspects_nothing_of_a_sound_output(dense: Path, mixture: Path) -> None:
    shown = {name: fault for name, fault in DENSE.items() if fault.suspects}
    sound = sound_schemes(DENSE)
    found = assess(EXAMPLE, [dense / name for name in (*sound, *shown)])
    for name, fault in shown.items():
        assert set(found[name]["suspects"]) == fault.suspects, found[name]["reasons"]
        assert found[name]["verdict"] in fault.verdict, found[name]["reasons"]
    for name in sound:
        assert found[name]["suspects"] == [], name
        assert found[name]["kl"]["mean"] <= 0.05, name

    small = found["KV scales fifty times too small"]
    assert small["kl"]["mean"] > 30 * found["channel, FP8 cache"]["kl"]["mean"]
    assert (found["channel, FP8 cache"]["kv_cache"], found["channel"]["kv_cache"]) == ("fp8", "auto")
    assert not any("routed_otherwise" in layer for layer in found["channel"]["layers"])

    routed = assess(mixture / "source", [mixture / name for name in sound_schemes(MIXED)])
    assert all(one["suspects"] == [] for one in routed.values())
    assert 0 < max(layer["routed_otherwise"] for layer in routed["channel"]["layers"]) < 0.2
