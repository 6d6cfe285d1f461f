"""modelopt's MIXED_PRECISION: a format for each layer, or for all layers below a module."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import change_json
from openquant import dequantize
from openquant.errors import PlanError, SourceError
from openquant.formats.quantization import read_quantization
from support import small_checkpoints
from support.mixed_precision import ARCHITECTURE, DENSE, EXPERTS, UNQUANTIZED, decoded, mixed_precision
from support.quantized_checkpoints import is_layer, ragged_blocks
from support.rows import for_each
from support.small_checkpoints import change_weights

Q = "model.layers.0.self_attn.q_proj"


@for_each("file", [False, True])
def test_dequantized_each_as_its_format_has_it(tmp_path: Path, file: bool) -> None:
    source = mixed_precision(tmp_path / "source", file=file)
    dequantize(source, tmp_path / "out")
    plain, stored = small_checkpoints.tensors(ARCHITECTURE), small_checkpoints.read(source)
    found = small_checkpoints.read(tmp_path / "out")
    assert set(found) == set(plain)
    for name, weight in plain.items():
        module = name.removesuffix(".weight")
        quantized = is_layer(name) and module != UNQUANTIZED
        assert torch.equal(found[name], decoded(stored, module).bfloat16() if quantized else weight), name
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == small_checkpoints.config(ARCHITECTURE)
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


def test_mtp_layers_in_another_format(tmp_path: Path) -> None:
    """Blocks of another size, under another name of the algorithm, with scales called weight_scale_inv."""
    source, module = mixed_precision(tmp_path / "source", shards=1), "mtp.layers.0.mlp.experts.0.up_proj"
    codes, scale = ragged_blocks(small_checkpoints.tensors(ARCHITECTURE)[f"{EXPERTS}.0.up_proj.weight"])
    scale = scale.repeat_interleave(2, 0)[: codes.shape[0] // 64].repeat_interleave(2, 1)[:, : codes.shape[1] // 64]
    scale = scale.bfloat16().contiguous()
    change_weights(source, lambda found: found.update({f"{module}.weight": codes, f"{module}.weight_scale_inv": scale}))
    layer = {"quant_algo": "FP8_BLOCK_SCALES", "group_size": 64}
    change_json(
        source / "config.json",
        lambda found: found["quantization_config"]["quantized_layers"].update({"mtp.layers.0.mlp.experts": layer}),
    )
    dequantize(source, tmp_path / "out")
    wide = scale.float().repeat_interleave(64, 0).repeat_interleave(64, 1)
    assert torch.equal(small_checkpoints.read(tmp_path / "out")[f"{module}.weight"], (codes.float() * wide).bfloat16())


@for_each(
    ("named", "stored"),
    [("language_model.model.layers.0", "model.language_model.layers.0"),
     ("model.language_model.layers.0", "language_model.model.layers.0")],
)  # fmt: skip
def test_names_of_language_models(named: str, stored: str) -> None:
    layers = {f"{named}.mlp": {"quant_algo": "W4A16_NVFP4"}, f"{named}.mlp.down_proj": {"quant_algo": "fp8"}}
    config = {"quant_method": "modelopt", "quant_algo": "mixed_precision", "quantized_layers": layers}
    found = read_quantization({"quantization_config": config})
    titles = [
        fmt and fmt.number.title
        for part in ("mlp.up_proj", "mlp.down_proj", "mlp_up", "self_attn.q_proj")
        for fmt in (found.format_of(f"{stored}.{part}"),)
    ]
    assert titles == ["FP4", "FP8", None, None]


UNKNOWN: list[tuple[Any, str]] = [
    (None, " has MIXED_PRECISION and no quantized_layers"),
    ({}, " has MIXED_PRECISION and no quantized_layers"),
    ({Q: "FP8"}, f": quantized_layers.{Q} is not a JSON object"),
    ({Q: {"quant_algo": "W4A8_AWQ"}}, f': quantized_layers.{Q} has the quant_algo "W4A8_AWQ"'),
    ({Q: {"quant_algo": "MIXED_PRECISION"}}, f': quantized_layers.{Q} has the quant_algo "MIXED_PRECISION"'),
    ({Q: {"quant_algo": "NVFP4", "group_size": 32}}, f": quantized_layers.{Q} has NVFP4 with the group_size 32"),
    ({Q: {"quant_algo": "FP8_PB_WO", "group_size": 0}}, f": quantized_layers.{Q} has FP8_PB_WO with the group_size 0"),
]  # fmt: skip


def test_configs_that_say_no_format_are_refused(tmp_path: Path) -> None:
    source = mixed_precision(tmp_path / "source")
    for layers, message in UNKNOWN:
        change_json(
            source / "config.json",
            lambda found, layers=layers: found["quantization_config"].update(quantized_layers=layers),
        )
        with pytest.raises(PlanError) as caught:
            dequantize(source, tmp_path / "out")
        assert caught.value.message == f"the source is already quantized: config.json{message}"
        assert not (tmp_path / "out").exists()


@for_each(
    ("change", "message"),
    [
        (lambda layers: layers.pop(Q), f"{Q}.weight is F8_E4M3, but no config group of config.json targets it"),
        (lambda layers: layers.update({Q: {"quant_algo": "NVFP4"}}),
         f"{Q}.weight is F8_E4M3, but config.json has its layer as FP4"),
        (lambda layers: layers.pop(EXPERTS),
         f"{EXPERTS}.0.down_proj.weight is U8, but no config group of config.json targets it"),
    ],
)  # fmt: skip
def test_layers_in_another_format_than_the_config_says(
    tmp_path: Path, change: Callable[[Any], object], message: str
) -> None:
    source = mixed_precision(tmp_path / "source", shards=1)
    change_json(source / "config.json", lambda found: change(found["quantization_config"]["quantized_layers"]))
    with pytest.raises(SourceError) as caught:
        dequantize(source, tmp_path / "out")
    assert caught.value.message == message


def test_factors_of_inputs_are_refused(tmp_path: Path) -> None:
    """modelopt's AWQ divides weights by factors that engines multiply the inputs by."""
    source, name = mixed_precision(tmp_path / "source", shards=1), f"{DENSE}.up_proj.pre_quant_scale"
    change_weights(source, lambda found: found.update({name: torch.ones(256)}))
    with pytest.raises(PlanError) as caught:
        dequantize(source, tmp_path / "out")
    assert caught.value.message == f"the source is already quantized: {name} is not supported"
