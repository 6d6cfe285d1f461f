"""Checkpoints of Quark, fbgemm and bitsandbytes are read; those of other tools are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from conftest import change_json
from openquant import compress, dequantize, verify
from openquant.errors import OpenQuantError, PlanError, SourceError, UsageError
from openquant.files.checkpoint import open_checkpoint
from openquant.formats import compiled, kernels
from openquant.formats.numbers import BITSANDBYTES
from openquant.formats.quantization import read_quantization
from openquant.weights.find import decoded_view
from openquant.weights.reading import Reader
from support import small_checkpoints
from support.other_tools import GROUP32, KINDS, TOKENS, bnb, fp8_tensor, quark, spec, stored_only, torchao_config
from support.quantized_checkpoints import Weights, is_layer, store
from support.rows import for_each
from support.small_checkpoints import change_weights

Q = "model.layers.0.self_attn.q_proj"
WRITTEN = sorted((Path(__file__).parent / "written").glob("*.safetensors"))


def stored(root: Path, kind: str, shards: int = 1) -> Path:
    make, config, _ = KINDS[kind]
    return store(root, stored_only(make), config, shards=shards)


@for_each("kind", KINDS)
def test_read_as_what_codes_stand_for_and_kept_in_their_own_scheme(tmp_path: Path, kind: str) -> None:
    make, _, same = KINDS[kind]
    source = stored(tmp_path / "source", kind, shards=3)
    assert dequantize(source, tmp_path / "plain").decoded_tensors == 14
    plain, weights = small_checkpoints.read(tmp_path / "plain"), small_checkpoints.tensors("Qwen3ForCausalLM")
    assert set(plain) == set(weights)
    for name, weight in weights.items():
        assert torch.equal(plain[name], make(weight)[1].bfloat16() if is_layer(name) else weight), name
    assert "quantization_config" not in open_checkpoint(tmp_path / "plain").config

    compress(source, tmp_path / "out", **(same or {"scheme": "block"}))
    report = verify(tmp_path / "out", source, full=True)
    assert (report.problems, len(report.errors)) == ((), 14)
    # Scales of int4 are written in bfloat16.
    kept = 0.004 if "int4" in kind else 0
    assert same is None or max(error.relative for error in report.errors) <= kept


@for_each("path", WRITTEN)
def test_the_tools_decode_to_the_same(tmp_path: Path, path: Path) -> None:
    """Files that the tools wrote (written/make.py), and what they decode them to."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        config = json.loads(file.metadata()["config"])
    expected = tensors.pop("decoded").numpy()
    save_file(tensors, tmp_path / "model.safetensors")
    told = {"architectures": ["LlamaForCausalLM"], "quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(told))
    view, weights = decoded_view(open_checkpoint(tmp_path))
    assert set(view.tensors) == {"layer.weight"}
    for loops in (kernels, compiled):
        reader = Reader(view.where, tmp_path.joinpath, loops=loops)
        [found] = [bits.view(np.float32) for bits in reader.rows(weights["layer.weight"], 1)]
        if path.stem == "bitsandbytes-int8":
            # It multiplies by the largest weight first, and then by 1 / 127.
            assert (abs(found - expected) <= abs(expected) * 2.0**-23).all()
        else:
            assert np.array_equal(found, expected)


def test_layers_of_quark_may_differ(tmp_path: Path) -> None:
    """The first pattern that matches counts, then the class, then what is for all."""
    layer = {"weight": spec("fp8_e4m3", "per_channel", ch_axis=0), "input_tensors": TOKENS}
    other = {"weight": spec("int8", "per_tensor")}
    config = quark(
        spec("fp8_e4m3", "per_tensor"),
        layer_quant_config={"*.q_proj": layer, "x.q_proj": other, "x.k_proj": other, "y": {"weight": None}},
    )
    found = read_quantization({"quantization_config": config})
    groups = {name: found.format_of(name) for name in ("x.q_proj", "x.k_proj", "x.v_proj", "y")}
    whole = ("FP8", (None, None))
    titles = [fmt and (fmt.number.title, fmt.group) for fmt in groups.values()]
    assert titles == [("FP8", (1, None)), ("INT8", (None, None)), whole, whole]
    inputs = found.inputs_of("x.q_proj")
    assert inputs is not None
    assert (inputs.number.title, inputs.group, inputs.static) == ("FP8", (1, None), False)
    assert found.inputs_of("x.v_proj") is None
    by_class = read_quantization({"quantization_config": config | {"layer_type_quant_config": {"Linear": other}}})
    assert by_class.format_of("x.v_proj") == found.format_of("x.k_proj")


def test_activations_of_quark() -> None:
    def read(inputs: Any) -> Any:
        config = quark(spec("fp8_e4m3", "per_tensor"), inputs)
        found = read_quantization({"quantization_config": config}).inputs_of("x")
        return found and (found.number.title, found.group, found.static, found.power_of_two, found.has_global_scale)

    assert read(None) is None
    assert read(spec("fp8_e4m3", "per_tensor")) == ("FP8", (None, None), True, False, False)
    assert read([TOKENS]) == ("FP8", (1, None), False, False, False)
    group = {"group_size": 32, "scale_format": "e8m0", "is_dynamic": True}
    assert read(spec("fp8_e4m3", "per_group") | group) == ("FP8", (1, 32), False, True, False)
    assert read(KINDS["quark nvfp4"].config["global_quant_config"]["input_tensors"]) == (
        "FP4", (1, 16), False, False, True
    )  # fmt: skip
    with pytest.raises(UsageError, match="which is not known here"):
        read(spec("fp4", "per_group") | group)
    with pytest.raises(UsageError, match="which is not known here"):
        read(spec("int8", "per_tensor", symmetric=False))


QUARK = (
    "known are FP8 per_tensor, per_channel and per_block, symmetric int8 per_tensor and per_channel, symmetric int4 and "
    "asymmetric uint4 per_group, MXFP4, MXFP8 and NVFP4; or start from the unquantized model"
)


UNREAD = [
    (quark(spec("fp6_e3m2", "per_group", **GROUP32)), 'weights of [{"dtype": "fp6_e3m2"'),
    (quark(spec("fp8_e4m3", "per_channel", ch_axis=1)), '"ch_axis": 1'),
    (quark(spec("int8", "per_channel", symmetric=False)), '"symmetric": false'),
    (quark(spec("uint4", "per_group", **GROUP32)), '"dtype": "uint4"'),
    (quark(spec("uint4", "per_group", symmetric=False, zero_point_type="float32", **GROUP32)), '"uint4"'),
    (quark(spec("int4", "per_group", group_size=12)), '"group_size": 12'),
    (quark(spec("int4", "per_channel")), '"qscheme": "per_channel"'),
    (quark(spec("fp8_e4m3", "per_block", block_size=[128, 1 << 20])), '"per_block"'),
    (quark(spec("fp8_e4m3", "per_block")), '"per_block"'),
    (quark([spec("fp8_e4m3", "per_tensor"), spec("int4", "per_channel")]), '{"dtype": "int4"'),
    (quark(["fp8"]), "weights of []"),
]


def test_weights_of_quark_that_are_not_read() -> None:
    for config, message in UNREAD:
        with pytest.raises(UsageError) as caught:
            read_quantization({"quantization_config": config})
        assert caught.value.message.startswith("config.json: global_quant_config of Quark has weights of [")
        assert message in caught.value.message
        assert caught.value.hint == QUARK.partition(";")[0]


TORCHAO = "known are Float8WeightOnlyConfig and Float8DynamicActivationFloat8WeightConfig with float8_e4m3fn, by row or tensor"
PLAIN = spec("fp8_e4m3", "per_tensor")


CONFIGS: list[tuple[dict[str, Any], str, str]] = [
    (quark(PLAIN, export={"weight_format": "fake_quantized"}), 'config.json has the weight_format "fake_quantized"', "known is real_quantized"),
    (quark(PLAIN, export={"pack_method": "x"}), 'config.json has the pack_method "x"', "known are reorder and order"),
    (quark(PLAIN, export=[1]), "config.json: export is not an object", "mend quantization_config, or save the model again"),
    (quark(PLAIN, global_quant_config=None), "config.json: global_quant_config of Quark is not an object", "mend quantization_config, or save the model again"),
    (quark(PLAIN, global_quant_config={}), "config.json has no weights that Quark quantized", "mend quantization_config, or save the model again"),
    (quark(PLAIN, layer_quant_config={"x": {"weight": PLAIN, "bias": PLAIN}}), "config.json: x of Quark has a quantized bias", "known are weights"),
    ({"quant_method": "awq", "bits": 4, "group_size": 32, "pack_method": "order"}, 'config.json has the pack_method "order"', "known is reorder"),
    (bnb(3), "config.json has bitsandbytes with neither load_in_4bit nor load_in_8bit", "set one of them"),
    (bnb(4, bnb_4bit_quant_storage="bfloat16"), 'config.json has the bnb_4bit_quant_storage "bfloat16"', "known is uint8"),
    (bnb(4, bnb_4bit_quant_type=["nf4"]), 'config.json has the bnb_4bit_quant_type ["nf4"]', "known are nf4 and fp4"),
    ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, "config.json has torchao's Int4WeightOnlyConfig", TORCHAO),
    ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "config.json has torchao's None", TORCHAO),
    (
        torchao_config("PerBlock", weight_dtype=None),
        "config.json has torchao's Float8WeightOnlyConfig with "
        '{"weight_dtype": null, "granularity": {"_type": "PerBlock", "_version": 1, "_data": {}}}', TORCHAO,
    ),
    (
        torchao_config("PerRow", weight_dtype=None),
        "config.json has torchao's Float8WeightOnlyConfig with "
        '{"weight_dtype": null, "granularity": {"_type": "PerRow", "_version": 1, "_data": {}}}', TORCHAO,
    ),
]  # fmt: skip


def test_configs_that_are_not_read(tmp_path: Path) -> None:
    source = store(tmp_path / "source", lambda weight: fp8_tensor(weight)[0], {})
    for config, message, hint in CONFIGS:
        change_json(source / "config.json", lambda found, config=config: found.update(quantization_config=config))
        with pytest.raises(PlanError) as caught:
            compress(source, tmp_path / "out")
        assert caught.value.message == f"the source is already quantized: {message}"
        assert caught.value.hint == (hint if "unquantized" in hint else f"{hint}; or start from the unquantized model")
        assert not (tmp_path / "out").exists()


STATE = f"{Q}.weight.quant_state.bitsandbytes__nf4"


def replaced(last: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Weights], None]:
    def work(weights: Weights) -> None:
        tensor = change(weights.pop(f"{Q}.{last}"))
        if tensor is not None:
            weights[f"{Q}.{last}"] = tensor

    return work


def state(**changed: Any) -> Callable[[Weights], None]:
    def work(weights: Weights) -> None:
        found = {**json.loads(bytes(weights[STATE].tolist())), **changed}
        weights[STATE] = torch.tensor(list(json.dumps(found).encode()), dtype=torch.uint8)

    return work


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def work(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return work


NESTED, FLAT, INT8, WORDS = "bitsandbytes nf4, double", "bitsandbytes nf4", "bitsandbytes int8", "quark uint4"


DAMAGE: list[tuple[str, Callable[[Weights], Any], str]] = [
    (NESTED, lambda weights: weights.pop(STATE), f"{Q}.weight has no quant_state: {STATE} is missing"),
    (NESTED, replaced("weight.quant_map", lambda _: None), "has no quant_map"),
    (NESTED, replaced("weight.nested_absmax", lambda _: None), "has no nested_absmax"),
    (NESTED, replaced("weight.nested_quant_map", lambda tensor: tensor[:255].clone()), "it must be F32 [256]"),
    (NESTED, replaced("weight.absmax", lambda tensor: tensor[1:].clone()), "it must be F32 or U8 [1024]"),
    (NESTED, replaced("weight", lambda tensor: tensor[2:].clone()), "but its quant_state says 256 x 256"),
    (NESTED, replaced("weight.quant_map", first(-0.5)), "quant_map has other values than NF4"),
    (NESTED, replaced("weight.nested_absmax", first(float("nan"))), "absmax in model.safetensors holds nan"),
    (FLAT, replaced("weight.absmax", first(float("inf"))), "absmax in model.safetensors holds inf"),
    (NESTED, state(shape=[256, 255]), "but its quant_state says 256 x 255"),
    (NESTED, state(blocksize=48), "which do not divide into blocks of 48"),
    (NESTED, state(shape=[256, 0]), f"{STATE} has the shape [256, 0] and the blocksize 64, which are not those of a matrix"),
    (NESTED, state(nested_blocksize=0), f"{STATE} has no valid nested_blocksize and nested_offset"),
    (NESTED, replaced("weight.quant_state.bitsandbytes__nf4", lambda tensor: tensor[1:].clone()), f"{STATE} is not a JSON object"),
    (INT8, replaced("SCB", lambda _: None), f"{Q}.weight has no scale: {Q}.SCB is missing"),
    (INT8, replaced("SCB", first(float("nan"))), f"{Q}.SCB in model.safetensors holds nan"),
    (INT8, replaced("SCB", lambda tensor: tensor[1:].clone()), f"{Q}.SCB is [255]"),
    (INT8, replaced("weight_format", first(1)), f"{Q}.weight_format is not 0: codes do not lie in rows"),
    (INT8, lambda weights: weights.update({"model.norm.SCB": torch.ones(4)}), "is the scale of no quantized"),
    (FLAT, lambda weights: weights.update({"model.norm.absmax": torch.ones(4)}), "is the scale of no quantized"),
    (WORDS, replaced("weight_zero_point", lambda _: None), "has no weight_zero_point"),
    (WORDS, replaced("weight_scale", lambda tensor: tensor[:, 1:].clone()), "it must be F32 or BF16 or F16 [8, 256]"),
    ("quark int4", replaced("weight_zero_point", first(1)), "holds the zero point 9"),
    ("quark fp8", lambda weights: weights.update({f"{Q}.input_rotation": torch.ones(4, 4)}), f"{Q}.input_rotation: the inputs of its layer are rotated"),
    ("torchao by row", lambda weights: weights.update({f"{Q}._weight_act_pre_scale": torch.ones(4)}), f"{Q}._weight_act_pre_scale: the inputs of its layer are rotated or scaled"),
    ("torchao by row", replaced("_weight_scale", lambda _: None), f"{Q}._weight_scale is missing"),
    ("torchao by row", replaced("_weight_qdata", lambda _: None), "is the scale of no quantized weight"),
    ("quark nvfp4", replaced("weight_scale_2", lambda _: None), "weight_scale_2 is missing"),
    ("quark mxfp4", replaced("weight", lambda tensor: tensor.int()), "is I32 [256, 128], which is not supported"),
    ("fbgemm", replaced("weight_scale", lambda _: None), f"{Q}.weight_scale is missing"),
]  # fmt: skip


def test_damage(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for kind in {row[0]: None for row in DAMAGE}:
        stored(tmp_path / kind, kind)
    for kind, change, message in DAMAGE:
        file = tmp_path / kind / "model.safetensors"
        sound = file.read_bytes()
        change_weights(file.parent, change)
        with subtests.test(kind=kind, message=message):
            check_damage(file.parent, tmp_path / "out", message)
        file.write_bytes(sound)


def check_damage(source: Path, out: Path, message: str) -> None:
    with pytest.raises(OpenQuantError) as caught:
        dequantize(source, out)
    assert message in caught.value.message
    assert not out.exists()
    if isinstance(caught.value, SourceError):
        [problem] = verify(source).problems
        # It names the shard first, and words it otherwise that a scale is not valid.
        assert message.replace(" in model.safetensors", "").removesuffix(", which is not a valid scale") in (
            problem.replace(" in model.safetensors", "")
        )
    else:
        with pytest.raises(OpenQuantError) as refused:
            verify(source)
        assert (refused.value.message, refused.value.hint) == (caught.value.message, caught.value.hint)


class RemoteShard:
    """A shard that is on the Hub only."""

    def __init__(self, path: Path) -> None:
        self.content = path.read_bytes()
        self.size, self.digest = len(self.content), "0" * 64

    def read(self, offset: int, length: int) -> bytes:
        return self.content[offset : offset + length]


def test_quant_states_of_a_streamed_source_are_read_too(tmp_path: Path) -> None:
    source = stored(tmp_path / "source", NESTED, shards=2)
    local, paths = open_checkpoint(source), list(source.glob("*.safetensors"))
    remote = {path.name: RemoteShard(path) for path in paths}
    for path in paths:
        path.unlink()
    assert len(local.quant_states) == 14
    assert open_checkpoint(source, remote).quant_states == local.quant_states


def test_values_of_a_table_are_their_own_nearest() -> None:
    between = torch.linspace(-1.2, 1.2, 1000).numpy().clip(-1, 1)
    for number in BITSANDBYTES:
        values = number.values()
        assert (number.nearest(values) == values).all()
        error = abs(number.nearest(between) - between)
        assert (error <= number.bound(between, torch.ones(1000).numpy(), 0)).all(), number.name
