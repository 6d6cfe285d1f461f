"""vLLM loads every architecture in four bits, and in five or six, some of which also compute what codes and scales
stand for and answer.

Plain torch multiplies where vLLM's CPU build has no kernel: FP4 anywhere, experts (shim/).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from chosen import CHOSEN, in_turn
from engine_client import TO_DEQUANTIZED, Answers, Engine, find_engine, rewrite, table_cells
from engine_layers import UNBUILT, Layers, built, written

from conftest import EXAMPLE
from openquant import compress, dequantize
from openquant.formats.schemes import find_scheme
from support import small_checkpoints

pytestmark = pytest.mark.serve

SCHEMES = ("int4", "nvfp4", "mxfp4")
WIDTHS = ("int5", "int6")
MOE = "Qwen3MoeForCausalLM"
SERVED = tuple(
    name
    for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM", MOE)
    if name in CHOSEN
)
# Beside FP8, whose activations are rounded; and with zero points.
BESIDE = tuple(f"{name}-nvfp4-beside-channel" for name in SERVED if name == MOE)
ASYMMETRIC = tuple(f"{name}-int4-asymmetric" for name in SERVED if name == MOE)
# Four schemes: experts, queries and what is joined with them, what attention ends with, and the layer without experts.
MIXED = tuple(f"{name}-int5-mixed" for name in SERVED if name == MOE)
MIXTURE = {"**.self_attn.{q,k,v}_proj": "channel", "**.o_proj": "nvfp4", "**.layers.0.mlp.*": "int8-weights"}
# Random weights: 0.025 to 0.05, in mxfp4 up to 0.06; equal ones 0.
TO_SOURCE = 0.1
LOADABLE = tuple(
    (name, scheme)
    for name in CHOSEN
    for scheme in (*SCHEMES, *WIDTHS)
    if name not in UNBUILT and small_checkpoints.refused(name, find_scheme(scheme)) is None
)
COMPUTED = (
    *in_turn(cell for cell in LOADABLE if cell[0] in SERVED and cell[0] != MOE and cell[1] in SCHEMES),
    *(cell for cell in LOADABLE if cell[0] == MOE),
)
# Each architecture in one, in turn.
LOADED = tuple(dict.fromkeys((*in_turn(LOADABLE), *COMPUTED)))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return find_engine()


@pytest.fixture(scope="module")
def outputs(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each architecture in each scheme, `<architecture>-<scheme>`; the sources too; of those that are served
    `<architecture>-<scheme>-plain`, and of experts mixtures and zero points.
    """
    root = tmp_path_factory.mktemp("four-bits")
    found = {}
    for name in dict.fromkeys(name for name, _ in LOADED):
        found[name] = small_checkpoints.write(root / name, name, vocab=2048)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(EXAMPLE / file, found[name])
    for name, scheme in LOADED:
        output = found[f"{name}-{scheme}"] = root / f"{name}-{scheme}"
        compress(found[name], output, scheme)
        if (name, scheme) in COMPUTED:
            found[f"{name}-{scheme}-plain"] = root / f"{name}-{scheme}-plain"
            dequantize(output, found[f"{name}-{scheme}-plain"])
    options: dict[str, dict[str, Any]] = {
        **{name: {"scheme_for": {"**.self_attn.*": "channel"}} for name in BESIDE},
        **{name: {"asymmetric": True} for name in ASYMMETRIC},
        **{name: {"scheme_for": MIXTURE} for name in MIXED},
    }
    for name, given in options.items():
        found[name], found[f"{name}-plain"] = root / name, root / f"{name}-plain"
        result = compress(found[MOE], found[name], name.split("-")[1], **given)
        assert name not in MIXED or len(result.schemes) == 4
        dequantize(found[name], found[f"{name}-plain"])
    return found


@pytest.fixture(scope="module")
def layers(engine: Engine, outputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Layers:
    asked = {f"{name}-{scheme}": outputs[f"{name}-{scheme}"] for name, scheme in LOADED}
    answers = engine.layers(list(asked.values()), tmp_path_factory.mktemp("layers") / "answers")
    return dict(zip(asked, answers, strict=True))


@pytest.fixture(scope="module")
def logprobs(engine: Engine, outputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Of the sources and outputs of those that are served, and of outputs with experts in each other's place."""
    loaded_alone = {f"{name}-{scheme}" for name, scheme in LOADED if (name, scheme) not in COMPUTED}
    asked = {
        name: path for name, path in outputs.items() if name.partition("-")[0] in SERVED and name not in loaded_alone
    }
    root = tmp_path_factory.mktemp("swapped")
    if MOE in SERVED:
        output = outputs[f"{MOE}-int4"]
        tensors = {swapped(name): tensor for name, tensor in small_checkpoints.read(output).items()}
        asked["swapped"] = rewrite(output, root / "swapped", tensors)
    return engine.logprobs(asked, tmp_path_factory.mktemp("logprobs") / "answers")


def swapped(name: str) -> str:
    """A tensor's name with the first two experts in each other's place."""
    return re.sub(r"(?<=[.]experts[.])[01](?=[.])", lambda number: str(1 - int(number[0])), name)


@pytest.mark.parametrize(("name", "scheme"), LOADED)
def test_every_layer_is_built_as_it_is_stored(name: str, scheme: str, outputs: dict[str, Path], layers: Layers) -> None:
    stored = written(outputs[f"{name}-{scheme}"])
    assert stored
    assert built(layers[f"{name}-{scheme}"], stored) == stored


def test_the_table_says_what_is_loaded_and_served() -> None:
    """One cell for int4, one for both kinds of FP4, which it names where they are not alike."""

    def of(scheme: str, cell: str) -> str:
        named = re.search(f"`{scheme}` (\\w+)", cell)
        return named[1] if named else cell.split(",")[0]

    said = {
        (name, scheme, word)
        for name, cells in table_cells().items()
        for schemes, cell in zip((SCHEMES[:1], SCHEMES[1:]), cells[3:5], strict=True)
        for scheme in schemes
        for word in ("served", "loaded")
        if of(scheme, cell) == word
    }
    assert said == {(*cell, "served" if cell[0] in SERVED else "loaded") for cell in LOADABLE if cell[1] in SCHEMES}


@pytest.mark.parametrize(("name", "scheme"), COMPUTED)
def test_computes_what_codes_and_scales_stand_for(name: str, scheme: str, logprobs: Answers) -> None:
    assert logprobs.between(f"{name}-{scheme}-plain", f"{name}-{scheme}") <= TO_DEQUANTIZED["tensor"]
    assert logprobs.between(name, f"{name}-{scheme}") <= TO_SOURCE


@pytest.mark.parametrize("name", [*BESIDE, *MIXED])
def test_experts_compute_beside_layers_in_fp8(name: str, logprobs: Answers) -> None:
    assert logprobs.between(f"{name}-plain", name) <= TO_DEQUANTIZED["channel"]


@pytest.mark.parametrize("name", ASYMMETRIC)
def test_experts_compute_with_zero_points(name: str, logprobs: Answers) -> None:
    assert logprobs.between(f"{name}-plain", name) <= TO_DEQUANTIZED["tensor"]
    assert logprobs.between(MOE, name) <= TO_SOURCE


@pytest.mark.skipif(MOE not in SERVED, reason="it is not asked for")
def test_control_an_expert_in_anothers_place_shows(logprobs: Answers) -> None:
    assert logprobs.between(f"{MOE}-int4-plain", "swapped") > 10 * TO_DEQUANTIZED["tensor"]
