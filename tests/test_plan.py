"""What the plan decides: joined sets, experts, blocks, --ignore, tensor parallelism, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tiny
from openquant.checkpoint import open_checkpoint
from openquant.errors import PlanError, UsageError
from openquant.fates import Options
from openquant.models import MODELS
from openquant.plan import Plan, make_plan
from openquant.schemes import BLOCK, BLOCK_COMPRESSED, CHANNEL, MXFP8, TENSOR, TENSOR_COMPRESSED, Scheme


def plan_of(root: Path, scheme: Scheme = TENSOR, *ignore: str) -> Plan:
    return make_plan(open_checkpoint(root), scheme, Options(ignore))


def quantized(plan: Plan) -> set[str]:
    return {name for group in plan.groups if group.quantized for name in group.names}


def reason(plan: Plan, module: str) -> str:
    return next(group.why for group in plan.groups if module in group.names)


@pytest.mark.parametrize("architecture", tiny.HAND_MADE)
def test_digest_depends_on_options_and_source(tmp_path: Path, architecture: str) -> None:
    checkpoint = open_checkpoint(tiny.write(tmp_path / "a", architecture))
    digests = {
        make_plan(checkpoint, TENSOR).digest,
        make_plan(checkpoint, BLOCK).digest,
        make_plan(checkpoint, CHANNEL).digest,
        make_plan(checkpoint, TENSOR, Options(("**.layers.0.**",))).digest,
        make_plan(checkpoint, TENSOR, None, "another source").digest,
    }
    assert len(digests) == 5
    assert make_plan(checkpoint, TENSOR).digest in digests


def test_unknown_architecture_lists_the_known_ones(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["FooForCausalLM"]}))
    with pytest.raises(PlanError) as caught:
        plan_of(source)
    assert caught.value.message == (
        f"FooForCausalLM is not a known architecture; known are {', '.join(sorted(MODELS))}"
    )
    assert caught.value.hint == (
        "if it is one of them by another name, say which with --architecture; --architecture generic goes by names and "
        "shapes alone; or add an entry to openquant/models.py (README: Adding an architecture)"
    )


def test_all_misfits_are_listed_at_once(tmp_path: Path) -> None:
    weights = tiny.tensors("Qwen3ForCausalLM")
    for layer in (0, 1):
        weights[f"model.layers.{layer}.mlp.router.weight"] = torch.zeros(4, 256)
    weights["model.extra"] = torch.zeros(2, 2)
    weights["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(256, 256, dtype=torch.float64)
    root = tiny.write(tmp_path / "a", weights=weights)
    with pytest.raises(PlanError) as caught:
        plan_of(root)
    assert caught.value.message == (
        "model.layers.0.self_attn.q_proj.weight is F64, not one of BF16, F16, F32; "
        "model.extra, model.layers.{0..1}.mlp.router.weight matches no pattern of Qwen3ForCausalLM"
    )
    assert "--ignore" in caught.value.hint


def test_ignore_settles_a_tensor_no_pattern_matches(tmp_path: Path) -> None:
    weights = tiny.tensors("Qwen3ForCausalLM") | {"model.layers.0.mlp.router.weight": torch.zeros(4, 256)}
    root = tiny.write(tmp_path / "a", weights=weights)
    plan = plan_of(root, TENSOR, "**.mlp.router")
    assert reason(plan, "model.layers.0.mlp.router") == "--ignore"
    assert "model.layers.0.mlp.router" in plan.ignored_layers
    assert plan.quantized_tensors == 14


def test_ignore_widens_to_the_joined_set_and_says_so(source: Path) -> None:
    plan = plan_of(source, TENSOR, "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj")
    assert {f"model.layers.0.self_attn.{part}_proj" for part in "qkv"} <= set(plan.ignored_layers)
    assert {"model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"} <= set(plan.ignored_layers)
    assert "model.layers.0.self_attn.o_proj" in quantized(plan)
    assert "model.layers.1.mlp.down_proj" in quantized(plan)
    assert reason(plan, "model.layers.0.self_attn.k_proj") == "--ignore model.layers.0.self_attn.k_proj"
    assert reason(plan, "model.layers.0.self_attn.q_proj") == (
        "shares its status with k_proj (--ignore model.layers.0.self_attn.k_proj)"
    )
    notes = sorted(plan.notes)
    assert [note.split(":")[0] for note in notes] == [
        "--ignore model.layers.0.self_attn.k_proj widened to what engines join with it",
        "--ignore model.layers.1.mlp.up_proj widened to what engines join with it",
    ]
    assert notes[1].endswith(": model.layers.1.mlp.gate_proj")


def test_ignore_that_matches_nothing_is_an_error(source: Path) -> None:
    with pytest.raises(UsageError) as caught:
        plan_of(source, TENSOR, "model.layers.0.**", "model.layers.9.**")
    assert caught.value.message == "--ignore model.layers.9.** matches no module"
    assert plan_of(source, TENSOR, "lm_head").quantized_tensors == 14


def test_experts_of_a_layer_share_status(tmp_path: Path) -> None:
    root = tiny.write(tmp_path / "a", "Qwen3MoeForCausalLM", shards=2)
    plan = plan_of(root, BLOCK, "model.layers.1.mlp.experts.2.down_proj")
    experts = [f"model.layers.1.mlp.experts.{e}.{p}_proj" for e in range(4) for p in ("gate", "up", "down")]
    assert {*experts, "model.layers.1.mlp.experts"} <= set(plan.ignored_layers)
    assert not set(experts) & quantized(plan)
    # The router, its neighbour, is kept for another reason.
    assert reason(plan, "model.layers.1.mlp.gate") == "router"


def test_qwen3_moe_lists_ignored_dense_layers_under_the_joined_name_too(tmp_path: Path) -> None:
    root = tiny.write(tmp_path / "a", "Qwen3MoeForCausalLM")
    plan = plan_of(root, BLOCK, "model.layers.0.mlp.gate_proj")
    listed = {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "gate_up")}
    assert listed <= set(plan.ignored_layers)
    assert "model.layers.0.mlp.gate_up_proj" not in plan_of(root, BLOCK).ignored_layers


def test_blocks_leave_a_whole_joined_set_when_one_member_does_not_divide(tmp_path: Path) -> None:
    weights = tiny.tensors("Qwen3ForCausalLM")
    for part in ("gate", "up"):
        weights[f"model.layers.0.mlp.{part}_proj.weight"] = torch.ones(320, 256, dtype=torch.bfloat16)
    weights["model.layers.0.mlp.down_proj.weight"] = torch.ones(256, 320, dtype=torch.bfloat16)
    weights["model.layers.1.self_attn.k_proj.weight"] = torch.ones(64, 256, dtype=torch.bfloat16)
    root = tiny.write(tmp_path / "a", weights=weights)
    plan = plan_of(root, BLOCK)
    kept = {f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")}
    kept |= {f"model.layers.1.self_attn.{part}_proj" for part in "qkv"}
    assert kept <= set(plan.ignored_layers)
    assert plan.quantized_tensors == 14 - 6
    assert reason(plan, "model.layers.0.mlp.down_proj") == "256 x 320 does not divide into 128 x 128 blocks"
    assert reason(plan, "model.layers.1.self_attn.q_proj") == (
        "shares its status with k_proj (64 x 256 does not divide into 128 x 128 blocks)"
    )
    assert plan.notes == ("some layers do not divide into blocks; --scheme tensor or channel quantizes them too",)
    assert plan_of(root, TENSOR).quantized_tensors == 14


def test_blocks_leave_all_experts_when_they_do_not_divide(tmp_path: Path) -> None:
    weights = tiny.tensors("Qwen3MoeForCausalLM")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    weights[name] = weights[name][:, :96].contiguous()
    plan = plan_of(tiny.write(tmp_path / "a", "Qwen3MoeForCausalLM", weights=weights), BLOCK)
    assert not any("experts" in module for module in quantized(plan))
    assert "model.layers.1.mlp.experts.0.gate_proj" in plan.ignored_layers


def test_lm_head_is_listed_also_when_tied_and_absent(tmp_path: Path) -> None:
    root = tiny.write(tmp_path / "a", "Gemma3ForCausalLM")
    assert "lm_head.weight" not in open_checkpoint(root).tensors
    config = plan_of(root).quantization_config
    assert config["ignored_layers"] == config["modules_to_not_convert"] == ["lm_head", "model.embed_tokens"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "the source is already quantized (gptq)"),
        ({"compression_config": {"format": "x"}}, "the source is already quantized (unknown method)"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "the source is already quantized (fp8)"),
    ],
)
def test_quantized_sources_are_refused_by_their_config(source: Path, change: dict[str, object], message: str) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(PlanError) as caught:
        plan_of(source)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(512, 256).to(torch.float8_e4m3fn), "{} is F8_E4M3"),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", torch.zeros(4, 2), "it holds {}"),
        ("model.layers.0.mlp.up_proj.qweight", torch.zeros(4, 2, dtype=torch.int32), "it holds {}"),
    ],
)
def test_quantized_sources_are_refused_by_their_tensors(
    tmp_path: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    root = tiny.write(tmp_path / "a", weights=tiny.tensors("Qwen3ForCausalLM") | {name: tensor})
    with pytest.raises(PlanError, match="already quantized: " + message.format(name)):
        plan_of(root)


def test_an_fp8_output_is_refused_as_a_source(source: Path) -> None:
    from openquant import compress

    compress(source, source.parent / "out")
    with pytest.raises(PlanError, match=r"already quantized \(fp8\)"):
        compress(source.parent / "out", source.parent / "again")


def test_tensor_parallel_sizes_for_one_scale_per_tensor(source: Path) -> None:
    plan = plan_of(source)
    # 4 heads; 2 key and value heads, copied where there are more ranks.
    assert plan.parallel_sizes == [1, 2, 4]
    assert plan.parallel[3].problem is not None
    assert plan.parallel[3].problem.endswith("4 heads do not divide by 8")


def test_tensor_parallel_sizes_for_blocks(tmp_path: Path) -> None:
    # 8 heads of 128, 2 key and value heads; the MLP's 1280 = 10 blocks forbids 4.
    config = tiny.config("Qwen3ForCausalLM") | {"num_attention_heads": 8, "head_dim": 128, "num_hidden_layers": 1}
    weights = {
        "model.layers.0.self_attn.q_proj.weight": torch.ones(1024, 256),
        "model.layers.0.self_attn.k_proj.weight": torch.ones(256, 256),
        "model.layers.0.self_attn.v_proj.weight": torch.ones(256, 256),
        "model.layers.0.self_attn.o_proj.weight": torch.ones(256, 1024),
        "model.layers.0.mlp.gate_proj.weight": torch.ones(1280, 256),
        "model.layers.0.mlp.up_proj.weight": torch.ones(1280, 256),
        "model.layers.0.mlp.down_proj.weight": torch.ones(256, 1280),
    }
    root = tiny.write(tmp_path / "a", weights=weights)
    (root / "config.json").write_text(json.dumps(config))
    plan = plan_of(root, BLOCK)
    assert [(entry.size, entry.problem) for entry in plan.parallel] == [
        (1, None),
        (2, None),
        (4, "model.layers.*.mlp.down_proj: 1280 / 4 = 320 is not a multiple of 128"),
        (8, "model.layers.*.mlp.down_proj: 1280 / 8 = 160 is not a multiple of 128"),
        (16, "model.layers.*.mlp.down_proj: 1280 / 16 = 80 is not a multiple of 128"),
    ]
    # Without the MLP the key and value heads, copied to 4 and 8 ranks, are no obstacle.
    assert plan_of(root, BLOCK, "**.mlp.*").parallel_sizes == [1, 2, 4, 8]


def test_rows_divide_wherever_tensors_do(tmp_path: Path) -> None:
    weights = tiny.tensors("Qwen3ForCausalLM")
    weights["model.layers.0.mlp.down_proj.weight"] = torch.ones(256, 320, dtype=torch.bfloat16)
    root = tiny.write(tmp_path / "a", weights=weights)
    plan = plan_of(root, CHANNEL)
    assert plan.quantized_tensors == 14
    assert plan.parallel_sizes == plan_of(root, TENSOR).parallel_sizes
    assert plan.ignored_layers == plan.quantization_config["ignore"] == ["lm_head", "model.embed_tokens"]


def test_rows_need_no_other_shard_but_joined_layers_share_their_status(tmp_path: Path) -> None:
    root = tiny.write(tmp_path / "a", shards=3)
    plan = plan_of(root, CHANNEL, "model.layers.0.self_attn.k_proj")
    assert {f"model.layers.0.self_attn.{part}_proj" for part in "qkv"} <= set(plan.ignored_layers)
    for shard in plan.shards:
        assert plan.sources(shard.name) == {shard.name}
    assert any(len(plan_of(root, TENSOR).sources(shard.name)) > 1 for shard in plan.shards)


def test_experts_are_refused_where_engines_load_none(tmp_path: Path) -> None:
    for name in ("Qwen3MoeForCausalLM", "Llama4ForCausalLM"):
        root = tiny.write(tmp_path / name, name)
        with pytest.raises(PlanError) as caught:
            plan_of(root, TENSOR_COMPRESSED)
        path = "mlp" if name.startswith("Qwen3") else "feed_forward"
        assert caught.value.message == (
            f"model.layers.1.{path}.experts: engines load no experts with one scale per tensor in the "
            "compressed-tensors format"
        )
        assert caught.value.hint == (
            "use --scheme channel or --format fp8, or leave the experts as they are with --ignore"
        )
        assert plan_of(root, TENSOR_COMPRESSED, "**.experts.**").quantized_tensors > 0


def test_reordered_rows_stay_where_the_scales_would_not_follow(tmp_path: Path) -> None:
    root = tiny.write(tmp_path / "a", "Llama4ForCausalLM")
    plan = plan_of(root, BLOCK_COMPRESSED)
    attention = "model.layers.0.self_attn"
    assert reason(plan, f"{attention}.q_proj") == "engines reorder its rows but not its scales"
    assert reason(plan, f"{attention}.v_proj").startswith("shares its status with ")
    assert f"{attention}.o_proj" in quantized(plan)
    assert plan.notes == ()
    assert f"{attention}.q_proj" in quantized(plan_of(root, BLOCK))
    assert f"{attention}.q_proj" in quantized(plan_of(root, CHANNEL))


def test_mxfp8_needs_32_inputs_and_no_number_of_outputs(tmp_path: Path) -> None:
    weights = tiny.tensors("Qwen3ForCausalLM")
    weights["model.layers.0.mlp.down_proj.weight"] = torch.ones(251, 528, dtype=torch.bfloat16)
    weights["model.layers.1.mlp.down_proj.weight"] = torch.ones(251, 544, dtype=torch.bfloat16)
    root = tiny.write(tmp_path / "a", weights=weights)
    plan = plan_of(root, MXFP8)
    assert reason(plan, "model.layers.0.mlp.down_proj") == "251 x 528 does not divide into 1 x 32 blocks"
    assert plan.quantized_tensors == 13
    assert [entry.problem for entry in plan.parallel][:2] == [
        None,
        "model.layers.*.mlp.down_proj: 544 / 2 = 272 is not a multiple of 32",
    ]


def test_every_output_tensor_is_aligned_to_its_element(tmp_path: Path) -> None:
    root = tiny.write(tmp_path / "a", dtype="float32")
    plan = plan_of(root, BLOCK)
    for shard in plan.shards:
        layout = plan.lay_out(shard.name)
        end = len(layout.header)
        for info in layout.tensors:
            assert end % (4 if info.dtype == "F32" else 1) == 0
            end += info.nbytes
        assert end == layout.size == shard.nbytes + len(layout.header)
