"""What the plan decides: joined sets, experts, blocks, --ignore, tensor parallelism, refusals."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conftest import change_json
from openquant import compress, verify
from openquant.errors import PlanError, UsageError
from openquant.files.checkpoint import open_checkpoint
from openquant.files.shardfile import TensorInfo
from openquant.formats.schemes import (
    BLOCK,
    BLOCK_COMPRESSED,
    CHANNEL,
    INT4_SHIFTED,
    INT4_SHIFTED_64,
    INT4_W4A16,
    INT4_W4A16_64,
    INT8_W8A8,
    INT8_W8A16,
    INTEGER_GROUPS,
    MXFP8,
    NVFP4,
    TENSOR,
    TENSOR_COMPRESSED,
    TENSOR_COMPRESSED_STATIC,
    Scheme,
)
from openquant.models import MODELS
from openquant.plan import summary
from openquant.plan.architecture import find_architecture
from openquant.plan.decisions import PlanOptions, gptq_weights
from openquant.plan.plan import Plan, Planner, ignored_layers, make_plan
from openquant.version import SGLANG, VLLM
from support import small_checkpoints
from support.published_checkpoints import with_few_experts
from support.rows import for_each

INT6 = INTEGER_GROUPS[6][0]


def plan_of(root: Path, scheme: Scheme = TENSOR, *ignore: str) -> Plan:
    return make_plan(open_checkpoint(root), scheme, PlanOptions(ignore))


def quantized(plan: Plan) -> set[str]:
    return {name for line in plan.lines if line.quantized for name in line.names}


def reason(plan: Plan, module: str) -> str:
    return next(line.why for line in plan.lines if module in line.names)


def test_plans_that_share_what_they_can_are_as_each_alone(subtests: pytest.Subtests) -> None:
    texts = {"documents": 1, "length": 2}
    all_options = (
        PlanOptions(fp8_kv_cache=True, texts=texts),
        PlanOptions(("**.o_proj",), scheme_for=(("**.down_proj", CHANNEL),), head=True, texts=texts),
        PlanOptions(texts=texts),
    )
    for name in ("Qwen3MoeForCausalLM", "quantized/Qwen3MoeForCausalLM"):
        checkpoint = with_few_experts(name)
        planner = Planner(checkpoint)
        for scheme, options in itertools.product((TENSOR_COMPRESSED_STATIC, INT4_W4A16, BLOCK_COMPRESSED), all_options):
            with subtests.test(f"{name} {scheme.name} {options}"):
                shared = planner.make(scheme, options)
                alone = make_plan(checkpoint, scheme, options)
                assert (shared.digest, shared.lines, shared.notes) == (alone.digest, alone.lines, alone.notes)
                assert shared.decisions == alone.decisions
                assert planner.make(scheme, options, with_notes=False) == replace(shared, notes=(), source_notes=())

    odd = TensorInfo("model.layers.0.odd.weight", "BF16", (8, 8))
    where = {**checkpoint.where, odd.name: next(iter(checkpoint.where.values()))}
    planner = Planner(replace(checkpoint, tensors={**checkpoint.tensors, odd.name: odd}, where=where))
    assert planner.make(CHANNEL, PlanOptions(("**.odd",)))
    with pytest.raises(PlanError, match="matches no pattern"):
        planner.make(CHANNEL, PlanOptions())


def test_digest_depends_on_options_source_and_entry(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, name = open_checkpoint(source), "Qwen3ForCausalLM"
    before = make_plan(checkpoint, TENSOR).digest
    digests = {
        before,
        make_plan(checkpoint, BLOCK).digest,
        make_plan(checkpoint, CHANNEL).digest,
        make_plan(checkpoint, TENSOR, PlanOptions(("**.layers.0.**",))).digest,
        make_plan(checkpoint, TENSOR, None, "another source").digest,
        make_plan(checkpoint, BLOCK, PlanOptions(tp=2)).digest,
        make_plan(checkpoint, BLOCK_COMPRESSED).digest,
        make_plan(checkpoint, BLOCK_COMPRESSED, PlanOptions(tp=2)).digest,
        make_plan(checkpoint, BLOCK_COMPRESSED, PlanOptions(scheme_for=(("**.o_proj", CHANNEL),))).digest,
        make_plan(checkpoint, BLOCK_COMPRESSED, PlanOptions(scheme_for=(("**.o_proj", TENSOR_COMPRESSED),))).digest,
    }
    assert len(digests) == 10
    assert make_plan(checkpoint, TENSOR).digest == before
    rounded = make_plan(checkpoint, INT4_W4A16_64, PlanOptions(gptq={"documents": 1, "length": 2})).with_rounded({})
    assert rounded.lacks == set()
    # A run that begins under one version of an entry is not continued under another.
    monkeypatch.setitem(MODELS, name, replace(MODELS[name], fused=()))
    assert make_plan(checkpoint, TENSOR).digest != before


def test_unknown_architecture_names_the_nearest(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3MoForCausalLM"]}))
    with pytest.raises(PlanError) as caught:
        plan_of(source)
    assert caught.value.message == (
        f"Qwen3MoForCausalLM is not a known architecture; of {len(MODELS)} that are, the nearest are "
        "Qwen3MoeForCausalLM, Qwen3ForCausalLM, Qwen3_5MoeForCausalLM"
    )
    with pytest.raises(PlanError, match="; of [0-9]+ that are, none has a name like it"):
        find_architecture(open_checkpoint(source), "xyz")
    assert caught.value.hint == (
        "if it is one of them by another name, say which with --architecture; --architecture auto goes by "
        "names and shapes alone; or add an entry to openquant/registry (docs/adding-an-architecture.md)"
    )


def test_all_misfits_are_listed_at_once(tmp_path: Path) -> None:
    def told(weights: dict[str, torch.Tensor]) -> tuple[str, str | None]:
        with pytest.raises(PlanError) as caught:
            plan_of(small_checkpoints.write(tmp_path / "source", weights=weights))
        return caught.value.message, caught.value.hint

    plain = small_checkpoints.tensors("Qwen3ForCausalLM")
    more = {f"model.layers.{layer}.mlp.router.weight": torch.zeros(4, 256) for layer in (0, 1)}
    more |= {"model.extra": torch.zeros(2, 2)}
    more |= {"model.layers.0.self_attn.q_proj.weight": torch.zeros(256, 256, dtype=torch.float64)}
    assert told(plain | more) == (
        "model.layers.0.self_attn.q_proj.weight is F64, not one of BF16, F16, F32; "
        "model.extra, model.layers.{0..1}.mlp.router.weight matches no pattern of Qwen3ForCausalLM",
        "it is no part of Qwen3ForCausalLM: the checkpoint is damaged, merged wrongly or of another class (if it "
        "belongs there, leave it as it is with --ignore)",
    )
    other = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(256, 256, dtype=torch.float64)}
    assert told(plain | other)[1] == "save the model again in bfloat16"
    # Without number they make a short message.
    message, _ = told({f"what.{chr(97 + n // 26)}{chr(97 + n % 26)}.weight": torch.ones(2, 2) for n in range(600)})
    assert message.startswith("what.aa.weight, what.ab.weight, ")
    assert message.endswith(", what.dv.weight, 500 more matches no pattern of Qwen3ForCausalLM")

    for name in (
        *("self_attn.q_proj.base_layer.weight", "self_attn.q_proj.lora_A.default.weight", "mlp.up_proj.lora_B.weight"),
        *("mlp.gate.modules_to_save.default.weight", "mlp.gate.original_module.weight"),
    ):
        assert told({f"model.layers.0.{name}": torch.ones(2, 2)}) == (
            f"model.layers.0.{name} matches no pattern of Qwen3ForCausalLM",
            "merge the adapter first (merge_and_unload), then save_pretrained; if it is merged, save without these tensors",
        )


def test_the_hint_says_that_a_wrapped_model_was_saved(tmp_path: Path) -> None:
    def refuse(what: str, weights: dict[str, torch.Tensor]) -> None:
        with pytest.raises(PlanError, match=f"{re.escape(what)}.* matches no pattern") as caught:
            plan_of(small_checkpoints.write(tmp_path / what, weights=weights))
        assert str(caught.value.hint).startswith("the wrapped model was saved: save what it wraps")

    weights = small_checkpoints.tensors("Qwen3ForCausalLM")
    for prefix in ("module.", "_orig_mod.", "base_model.model."):
        refuse(prefix, {f"{prefix}{name}": weight for name, weight in weights.items()})

    up = weights.pop("model.layers.0.mlp.up_proj.weight")
    refuse("_fsdp_wrapped_module.", weights | {"model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight": up})


def test_a_config_of_another_model_is_noted(tmp_path: Path) -> None:
    root = small_checkpoints.write(tmp_path / "a", "Qwen3MoeForCausalLM")
    dense = small_checkpoints.write(tmp_path / "b")
    attention = "model.layers.0.self_attn"

    def notes(root: Path, config: dict[str, Any], **changed: Any) -> tuple[str, ...]:
        assert changed.keys() <= config.keys()
        (root / "config.json").write_text(json.dumps(config | changed))
        # How many tensors do not fit stands at the end.
        return tuple(re.sub(r" \([0-9]+ tensors\)$", "", note) for note in plan_of(root).notes)

    configs = {held: json.loads((held / "config.json").read_text()) for held in (root, dense)}
    assert notes(root, configs[root]) == notes(dense, configs[dense]) == ()
    for held, key, number, difference in (
        (root, "hidden_size", 512, "is 512, and lm_head.weight is [512, 256]"),
        (root, "vocab_size", 500, "is 500, and lm_head.weight is [512, 256]"),
        (dense, "intermediate_size", 500, "is 500, and model.layers.0.mlp.gate_proj.weight is [512, 256]"),
        (root, "num_attention_heads", 8, f"is 8 and head_dim is 64, and {attention}.o_proj.weight is [256, 256]"),
        (root, "num_key_value_heads", 4, f"is 4 and head_dim is 64, and {attention}.k_proj.weight is [128, 256]"),
        (root, "num_experts", 3, "is 3, and model.layers.1.mlp.experts has 4"),
        (root, "num_hidden_layers", 1, "is 1, and the tensors have model.layers.1"),
    ):
        told = f"config.json does not fit the tensors: {key} {difference}"
        assert notes(held, configs[held], **{key: number}) == (told,)

    # Without head_dim, a wrong hidden_size is said once, not of the heads too.
    config = {key: value for key, value in configs[dense].items() if key != "head_dim"}
    for key, number, difference in (("hidden_size", 512, "is 512, and model.embed_tokens.weight is [512, 256]"),):
        (told,) = notes(dense, config, **{key: number})
        assert told.replace("layers.1", "layers.0") == f"config.json does not fit the tensors: {key} {difference}"


def test_tokens_without_a_row_are_noted(source: Path) -> None:
    """A token was added, and the embedding was not resized; tokens for images of a multimodal sister are no fault."""

    def notes(name: str, **tokenizer: Any) -> tuple[str, ...]:
        (source / name).write_text(json.dumps(tokenizer, indent=2))
        found = plan_of(source).notes
        (source / name).unlink()
        return found

    told = "{} does not fit the tensors: token '{}' has number {}, and model.embed_tokens.weight is [512, 256]".format
    for number, text, fits in ((511, "x", True), (512, "<image_soft_token>", True), (513, "<tool>", False)):
        added = {"added_tokens": [{"id": number, "content": text}], "model": {"vocab": {"a": 511}, "merges": []}}
        assert notes("tokenizer.json", **added) == (() if fits else (told("tokenizer.json", text, number),))
        added = {"added_tokens_decoder": {str(number): {"content": text}}}
        name = "tokenizer_config.json"
        assert notes(name, **added) == (() if fits else (told(name, text, number),))


def test_ignore_widens_to_the_joined_set_and_says_so(source: Path, tmp_path: Path) -> None:
    plan = plan_of(source, TENSOR, "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj")
    assert {f"model.layers.0.self_attn.{part}_proj" for part in "qkv"} <= set(ignored_layers(plan))
    assert {"model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"} <= set(ignored_layers(plan))
    assert "model.layers.0.self_attn.o_proj" in quantized(plan)
    assert "model.layers.1.mlp.down_proj" in quantized(plan)
    option = "--ignore model.layers.0.self_attn.k_proj"
    assert reason(plan, "model.layers.0.self_attn.k_proj") == option
    assert reason(plan, "model.layers.0.self_attn.q_proj") == f"same as k_proj ({option})"
    notes = sorted(plan.notes)
    assert [note.split(":")[0] for note in notes] == [
        f"{option} also applies to the layers fused with it",
        "--ignore model.layers.1.mlp.up_proj also applies to the layers fused with it",
    ]
    assert notes[1].endswith(": model.layers.1.mlp.gate_proj")

    # What is not quantized must divide among ranks too.
    sizes = summary.parallel_sizes(plan_of(source, TENSOR, "**.self_attn.*"))
    assert sizes == summary.parallel_sizes(plan_of(source)) == [1, 2, 4]
    with pytest.raises(UsageError) as caught:
        plan_of(source, TENSOR, "model.layers.0.**", "model.layers.9.**")
    assert caught.value.message == "--ignore model.layers.9.** matches no module"
    assert summary.quantized_tensors(plan_of(source, TENSOR, "lm_head")) == 14

    # It settles a tensor that no pattern matches.
    weights = small_checkpoints.tensors("Qwen3ForCausalLM") | {"model.layers.0.mlp.router.weight": torch.zeros(4, 256)}
    plan = plan_of(small_checkpoints.write(tmp_path / "a", weights=weights), TENSOR, "**.mlp.router")
    assert reason(plan, "model.layers.0.mlp.router") == "--ignore"
    assert "model.layers.0.mlp.router" in ignored_layers(plan)
    assert summary.quantized_tensors(plan) == 14


def test_experts_of_a_layer_share_status(tmp_path: Path) -> None:
    root = small_checkpoints.write(tmp_path / "a", "Qwen3MoeForCausalLM", shards=2)
    plan = plan_of(root, BLOCK, "model.layers.1.mlp.experts.2.down_proj")
    experts = [f"model.layers.1.mlp.experts.{e}.{p}_proj" for e in range(4) for p in ("gate", "up", "down")]
    assert {*experts, "model.layers.1.mlp.experts"} <= set(ignored_layers(plan))
    assert not set(experts) & quantized(plan)
    # The router, its neighbour, is kept for another reason.
    assert reason(plan, "model.layers.1.mlp.gate") == "router"

    # Dense layers of the same model are listed under the joined name too.
    plan = plan_of(root, BLOCK, "model.layers.0.mlp.gate_proj")
    listed = {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "gate_up")}
    assert listed <= set(ignored_layers(plan))
    assert "model.layers.0.mlp.gate_up_proj" not in ignored_layers(plan_of(root, BLOCK))

    # All stay where blocks of one do not divide.
    weights = small_checkpoints.tensors("Qwen3MoeForCausalLM")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    weights[name] = weights[name][:, :96].contiguous()
    plan = plan_of(small_checkpoints.write(tmp_path / "b", "Qwen3MoeForCausalLM", weights=weights), BLOCK)
    assert not any("experts" in module for module in quantized(plan))
    assert "model.layers.1.mlp.experts.0.gate_proj" in ignored_layers(plan)


def test_blocks_leave_a_whole_joined_set_when_one_member_does_not_divide(tmp_path: Path) -> None:
    weights = small_checkpoints.tensors("Qwen3ForCausalLM")
    for part in ("gate", "up"):
        weights[f"model.layers.0.mlp.{part}_proj.weight"] = torch.ones(320, 256, dtype=torch.bfloat16)
    weights["model.layers.0.mlp.down_proj.weight"] = torch.ones(256, 320, dtype=torch.bfloat16)
    weights["model.layers.1.self_attn.k_proj.weight"] = torch.ones(64, 256, dtype=torch.bfloat16)
    root = small_checkpoints.write(tmp_path / "a", weights=weights)
    plan = plan_of(root, BLOCK)
    kept = {f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")}
    kept |= {f"model.layers.1.self_attn.{part}_proj" for part in "qkv"}
    assert kept <= set(ignored_layers(plan))
    assert summary.quantized_tensors(plan) == 14 - 6
    assert reason(plan, "model.layers.0.mlp.down_proj") == "256 x 320 does not divide into 128 x 128 blocks"
    assert reason(plan, "model.layers.1.self_attn.q_proj") == (
        "same as k_proj (64 x 256 does not divide into 128 x 128 blocks)"
    )
    assert [note for note in plan.notes if "does not fit" not in note] == [
        "blocks do not divide, which leaves 6 of 14 layers (35.5 % of their bytes) unquantized; "
        "--scheme channel quantizes them too"
    ]
    assert summary.quantized_tensors(plan_of(root, TENSOR)) == 14


def test_sources_quantized_in_unknown_ways_are_refused(tmp_path: Path) -> None:
    weights, up = small_checkpoints.tensors("Qwen3ForCausalLM"), "model.layers.0.mlp.up_proj"
    codes = {f"{up}.weight": torch.zeros(512, 256, dtype=torch.uint8)}
    source = small_checkpoints.write(tmp_path / "codes", weights=weights | codes)
    config = json.loads((source / "config.json").read_text())
    nested = {"text_config": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}}}
    for change, told in (
        ({"compression_config": {"format": "x"}}, "the quant_method null"),
        (nested, 'the quant_algo "NVFP4_AWQ"'),
    ):
        (source / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(PlanError) as caught:
            plan_of(source)
        assert caught.value.message == f"the source is already quantized: config.json has {told}"

    # Without a config by their tensors.
    for name, tensor, message in (
        (f"{up}.weight", torch.zeros(512, 256).to(torch.float8_e4m3fn), "{} is F8_E4M3"),
        (f"{up}.weight_scale_inv", torch.zeros(4, 2), "it holds {}"),
        (f"{up}.qweight", torch.zeros(4, 2, dtype=torch.int32), "it holds {}"),
    ):
        root = small_checkpoints.write(tmp_path / "a", weights=weights | {name: tensor})
        with pytest.raises(PlanError, match="already quantized: " + message.format(name)):
            plan_of(root)


# Several schemes.


def mixed(root: Path, scheme: Scheme, *scheme_for: tuple[str, Scheme], ignore: tuple[str, ...] = ()) -> Plan:
    return make_plan(open_checkpoint(root), scheme, PlanOptions(ignore, scheme_for))


def targets(plan: Plan) -> list[list[str]]:
    return [group["targets"] for group in plan.quantization_config["config_groups"].values()]


def stored(plan: Plan, module: str) -> str:
    """What the plan's row says of a module."""
    line = next(line for line in plan.lines if module in line.names)
    return (line.why.split(":")[0] if line.why else plan.scheme.name) if line.quantized else "kept"


def test_another_scheme_widens_to_the_joined_set_and_says_so(source: Path) -> None:
    plan = mixed(source, BLOCK_COMPRESSED, ("model.layers.0.self_attn.k_proj", CHANNEL))
    attention = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    assert [stored(plan, module) for module in attention] == ["channel"] * 3
    option = "--scheme-for model.layers.0.self_attn.k_proj=channel"
    assert reason(plan, attention[1]) == f"channel: {option}"
    assert reason(plan, attention[0]) == f"channel: same as k_proj ({option})"
    assert stored(plan, "model.layers.1.self_attn.k_proj") == "block"
    assert plan.notes == (f"{option} also applies to the layers fused with it: {attention[0]}, {attention[2]}",)
    assert summary.schemes(plan) == {BLOCK_COMPRESSED: 11, CHANNEL: 3}
    assert summary.title(plan) == "one scale per 128x128 block, 3 of 14 layers one scale per output row"
    assert summary.quantized_tensors(plan) == 14
    groups = plan.quantization_config["config_groups"]
    # With SGLang's name for what it merges them to.
    assert sorted(groups["group_1"]["targets"]) == sorted([*attention, "model.layers.0.self_attn.qkv_proj"])
    assert groups["group_0"]["targets"] == ["Linear"]
    for number, scheme in enumerate((BLOCK_COMPRESSED, CHANNEL)):
        alone = scheme.settings["config_groups"]["group_0"]
        assert groups[f"group_{number}"] | {"targets": ["Linear"]} == alone


def test_the_first_pattern_that_matches_counts(source: Path) -> None:
    plan = mixed(
        source,
        CHANNEL,
        ("**.layers.0.mlp.up_proj", TENSOR_COMPRESSED),
        ("**.mlp.**", BLOCK_COMPRESSED),
        ("**.layers.0.**", TENSOR_COMPRESSED),
        ignore=("**.layers.1.mlp.down_proj",),
    )
    found = {module: stored(plan, module) for module in plan.layers}
    assert found == {
        **{f"model.layers.0.self_attn.{part}_proj": "tensor" for part in "qkvo"},
        **{f"model.layers.1.self_attn.{part}_proj": "channel" for part in "qkvo"},
        # The set goes by the first of its patterns.
        **{f"model.layers.0.mlp.{part}_proj": "tensor" for part in ("gate", "up")},
        "model.layers.0.mlp.down_proj": "block",
        **{f"model.layers.1.mlp.{part}_proj": "block" for part in ("gate", "up")},
        "model.layers.1.mlp.down_proj": "kept",
    }
    assert "model.layers.1.mlp.down_proj" in ignored_layers(plan)
    # What has one scale per tensor needs its set's other shards.
    assert any(len(plan.layout.sources(shard.name)) > 1 for shard in plan.layout.shards)


def test_experts_of_a_layer_share_their_scheme_and_have_one_target(tmp_path: Path) -> None:
    root = small_checkpoints.write(tmp_path / "a", "Qwen3MoeForCausalLM", shards=2)
    plan = mixed(root, BLOCK_COMPRESSED, ("model.layers.1.mlp.experts.2.down_proj", CHANNEL))
    for expert in range(4):
        for part in ("gate", "up", "down"):
            assert stored(plan, f"model.layers.1.mlp.experts.{expert}.{part}_proj") == "channel"
    assert targets(plan) == [["Linear"], [r"re:(.*[.])?layers[.]1[.]mlp[.]experts[.].*"]]
    # In a scheme of their own they need not be left out.
    plan = mixed(root, TENSOR_COMPRESSED, ("**.experts.**", CHANNEL))
    assert summary.quantized_tensors(plan) == 23
    with pytest.raises(PlanError, match="engines load no experts with one scale per tensor"):
        mixed(root, CHANNEL, ("**.experts.**", TENSOR_COMPRESSED))


@for_each(("architecture", "pattern", "expected"), [
    # The engine's name of the merged layer where it does not derive it from its members.
    ("StableLmForCausalLM", "model.layers.0.mlp.gate_proj",
     [f"model.layers.0.mlp.{part}_proj" for part in ("gate", "gate_up", "up")]),
    # Every spelling of a wrapper.
    ("Gemma3ForConditionalGeneration", "language_model.model.layers.0.self_attn.o_proj",
     ["language_model.model.layers.0.self_attn.o_proj", "model.language_model.layers.0.self_attn.o_proj"]),
    # What the engine calls the module.
    ("MiniMaxM2ForCausalLM", "model.layers.1.block_sparse_moe.experts.0.w1",
     [r"re:(.*[.])?layers[.]1[.]block_sparse_moe[.]experts[.].*", r"re:(.*[.])?layers[.]1[.]mlp[.]experts[.].*"]),
])  # fmt: skip
def test_layers_are_named_as_engines_name_them(
    tmp_path: Path, architecture: str, pattern: str, expected: list[str]
) -> None:
    plan = mixed(small_checkpoints.write(tmp_path / "a", architecture), CHANNEL, (pattern, BLOCK_COMPRESSED))
    assert sorted(targets(plan)[1]) == expected


LOST = "it silently drops the scales of blocks; --format compressed-tensors loads"
MXFP8_UNKNOWN = "it does not support mxfp8; try another scheme"
PLAIN = "it builds **.self_attn.* in bfloat16; it loads with --ignore for these"
NO_NAMES = "it finds none of these layers by name; it loads if all layers have the same scheme"
HEAD = "it builds the output head in bfloat16, whatever is stored; it loads without --quantize-lm-head"
BLOCKS = "it loads blocks only if most layers have them; it loads -w 128 with --scheme-for"
WORDS = (
    "it loads int32-packed experts only if all layers are int32-packed; give the experts --scheme-for nvfp4, or all "
    "layers the same scheme"
)
UNPACKED = "it accepts no packed codes for **.self_attn.q_a_proj; it loads with --ignore for these"
FIRST = ("**.layers.0.**",)
STACKED = "its loader of this architecture fails on experts that are not stacked; serve it with vLLM"
UNGATED = "--scheme tensor, -w 128 in the fp8 format, and --scheme-for '**.experts.**=nvfp4' load"


@for_each(("architecture", "scheme", "options", "says"), [
    ("LlamaForCausalLM", BLOCK, PlanOptions(), LOST),
    ("LlamaForCausalLM", BLOCK_COMPRESSED, PlanOptions(), None),
    ("Qwen3ForCausalLM", MXFP8, PlanOptions(), MXFP8_UNKNOWN),
    ("OlmoForCausalLM", TENSOR, PlanOptions(), PLAIN),
    ("OlmoForCausalLM", TENSOR, PlanOptions(("**.self_attn.*",)), None),
    ("Gemma2ForCausalLM", TENSOR, PlanOptions(FIRST), NO_NAMES),
    ("Gemma2ForCausalLM", BLOCK_COMPRESSED, PlanOptions(scheme_for=(("**.o_proj", CHANNEL),)), NO_NAMES),
    ("Qwen3VLForConditionalGeneration", TENSOR, PlanOptions(FIRST), None),
    ("Qwen3VLForConditionalGeneration", CHANNEL, PlanOptions(FIRST), NO_NAMES),
    ("Qwen3VLForConditionalGeneration", BLOCK_COMPRESSED, PlanOptions(head=True), None),
    ("Qwen3ForCausalLM", CHANNEL, PlanOptions(head=True), None),
    ("PhiForCausalLM", CHANNEL, PlanOptions(head=True), HEAD),
    ("Qwen3ForCausalLM", CHANNEL, PlanOptions(scheme_for=(("**.o_proj", BLOCK_COMPRESSED),)), BLOCKS),
    ("Qwen3MoeForCausalLM", CHANNEL, PlanOptions(scheme_for=(("**.experts.**", BLOCK_COMPRESSED),)), None),
    ("Qwen3MoeForCausalLM", CHANNEL, PlanOptions(scheme_for=(("**.experts.**", INT4_W4A16),)), WORDS),
    ("Qwen3MoeForCausalLM", CHANNEL, PlanOptions(scheme_for=(("**.experts.**", NVFP4),)), None),
    ("Qwen3MoeForCausalLM", INT4_W4A16, PlanOptions(scheme_for=(("**.self_attn.*", INT8_W8A16),)), None),
    ("Qwen3ForCausalLM", INT4_W4A16, PlanOptions(scheme_for=(("**.self_attn.*", CHANNEL),)), None),
    ("Qwen3MoeForCausalLM", INT4_SHIFTED, PlanOptions(),
     "it loads no experts in int4 with zero points; give them another scheme with --scheme-for, or leave them "
     "unquantized with --ignore"),
    ("DeepseekV3ForCausalLM", NVFP4, PlanOptions(), UNPACKED),
    ("DeepseekV3ForCausalLM", NVFP4, PlanOptions(("**.q_a_proj",)), None),
    ("AfmoeForCausalLM", TENSOR, PlanOptions(),
     "it builds **.mlp.experts.** in bfloat16; it loads with --ignore for these"),
    ("NemotronHForCausalLM", TENSOR, PlanOptions(), None),
    ("NemotronHForCausalLM", CHANNEL, PlanOptions(),
     "in the compressed-tensors format it loads no experts without a gate in channel; " + UNGATED),
    ("NemotronHForCausalLM", CHANNEL, PlanOptions(scheme_for=(("**.experts.**", NVFP4),)), None),
    ("NemotronHForCausalLM", CHANNEL, PlanOptions(("**.experts.**",)), None),
    ("GraniteMoeHybridForCausalLM", CHANNEL, PlanOptions(), STACKED),
    ("GraniteMoeHybridForCausalLM", TENSOR, PlanOptions(("**.experts.**",)), STACKED),
    ("JambaForCausalLM", CHANNEL, PlanOptions(), "it has no class of this name; serve it with vLLM"),
])  # fmt: skip
def test_the_plan_says_what_sglang_does_not_load(
    tmp_path: Path, architecture: str, scheme: Scheme, options: PlanOptions, says: str | None
) -> None:
    plan = make_plan(open_checkpoint(small_checkpoints.write(tmp_path / "a", architecture)), scheme, options)
    notes = [note for note in plan.notes if note.startswith("SGLang")]
    assert notes == ([] if says is None else [f"{SGLANG} does not load this output: {says}"])
    assert summary.engines(plan) == (("vLLM",) if says else ("vLLM", "SGLang"))


def test_sglang_s_names_are_listed(tmp_path: Path) -> None:
    listed = ignored_layers(plan_of(small_checkpoints.write(tmp_path / "a"), CHANNEL, *FIRST))
    assert {"model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj"} <= set(listed)
    assert not any("layers.1" in name for name in listed)
    listed = ignored_layers(plan_of(small_checkpoints.write(tmp_path / "b", "DeepseekV3ForCausalLM"), TENSOR))
    assert "model.layers.2.self_attn.fused_qkv_a_proj_with_mqa" in listed
    assert "model.layers.1.self_attn.fused_qkv_a_proj_with_mqa" not in listed
    listed = ignored_layers(plan_of(small_checkpoints.write(tmp_path / "c", "MixtralForCausalLM"), CHANNEL, *FIRST))
    assert {f"layers.0.block_sparse_moe.experts.0.{part}_proj" for part in ("gate", "up", "down")} <= set(listed)
    listed = ignored_layers(plan_of(small_checkpoints.write(tmp_path / "d", "Phi3ForCausalLM"), TENSOR, *FIRST))
    assert {f"model.layers.0.self_attn.{part}_proj" for part in "qkv"} <= set(listed)
    root = small_checkpoints.write(tmp_path / "e", "Gemma3ForConditionalGeneration")
    assert ignored_layers(plan_of(root, TENSOR))[-1] == "vision_tower"
    assert ignored_layers(plan_of(root, CHANNEL))[-1] == "re:(.*[.])?vision_tower[.].*"


def test_what_blocks_do_not_divide_has_rows_where_the_format_mixes(tmp_path: Path) -> None:
    weights = small_checkpoints.tensors("Qwen3MoeForCausalLM")
    for name in ("model.layers.1.mlp.experts.3.down_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        weights[name] = weights[name][:, :96].contiguous()
    plan = plan_of(small_checkpoints.write(tmp_path / "a", "Qwen3MoeForCausalLM", weights=weights), BLOCK_COMPRESSED)
    assert summary.quantized_tensors(plan) == 23
    assert summary.schemes(plan) == {BLOCK_COMPRESSED: 10, CHANNEL: 13}
    assert reason(plan, "model.layers.0.mlp.down_proj") == "channel: 256 x 96 does not divide into 128 x 128 blocks"
    assert reason(plan, "model.layers.1.mlp.experts.0.gate_proj") == (
        "channel: same as down_proj (256 x 96 does not divide into 128 x 128 blocks)"
    )
    assert stored(plan, "model.layers.0.mlp.gate_proj") == "block"
    assert sum("does not fit" not in note for note in plan.notes) == 1
    assert plan.notes[0].startswith(
        "one scale per output row instead of one scale per 128x128 block for 13 of 23 layers ("
    )
    assert set(ignored_layers(plan)) == {"lm_head", "model.embed_tokens", "model.layers.1.mlp.gate"}


# Tensor parallelism.


def sized(root: Path, scheme: Scheme, tp: int) -> Plan:
    return make_plan(open_checkpoint(root), scheme, PlanOptions(tp=tp))


def test_a_size_that_blocks_do_not_serve_makes_layers_fall_back(source: Path) -> None:
    # 2 key and value heads of 64: half of k_proj and v_proj is no block.
    attention = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    plan = sized(source, BLOCK_COMPRESSED, 2)
    assert [stored(plan, module) for module in attention] == ["channel"] * 3
    assert stored(plan, "model.layers.0.self_attn.o_proj") == "block"
    assert reason(plan, attention[1]) == "channel: --tp 2: 128 / 2 = 64 is not a multiple of 128"
    assert summary.parallel_sizes(plan) == [1, 2]
    names = ", ".join(f"model.layers.{{0..1}}.self_attn.{part}_proj" for part in "qkv")
    assert plan.notes == (
        "one scale per output row instead of one scale per 128x128 block for 6 of 14 layers (22.2 % of their bytes): "
        f"{names}; --tp 2: 128 / 2 = 64 is not a multiple of 128",
    )
    assert summary.schemes(sized(source, BLOCK_COMPRESSED, 1)) == {BLOCK_COMPRESSED: 14}
    assert 4 in summary.parallel_sizes(sized(source, BLOCK_COMPRESSED, 4))
    # The fp8 format has one scheme only.
    plan = sized(source, BLOCK, 2)
    assert [stored(plan, module) for module in attention] == ["kept"] * 3
    assert reason(plan, attention[1]) == "--tp 2: 128 / 2 = 64 is not a multiple of 128"
    assert summary.parallel_sizes(plan) == [1, 2]
    assert plan.notes == (
        "blocks do not divide on 2 ranks, which leaves 6 of 14 layers (22.2 % of their bytes) unquantized; "
        "--scheme channel quantizes them too",
    )
    # What needs no blocks needs no way out.
    for scheme in (TENSOR, CHANNEL, TENSOR_COMPRESSED):
        assert sized(source, scheme, 4).digest == plan_of(source, scheme).digest


# The output head.


def with_head(root: Path, scheme: Scheme, ignore: tuple[str, ...] = ()) -> Plan:
    return make_plan(open_checkpoint(root), scheme, PlanOptions(ignore, head=True))


def test_output_head_is_named_among_what_is_quantized(source: Path, tmp_path: Path) -> None:
    for scheme in (TENSOR_COMPRESSED, CHANNEL, MXFP8):
        plan = with_head(source, scheme)
        assert targets(plan) == [["Linear", "re:(.*[.])?lm_head"]]
        assert ignored_layers(plan) == ["model.embed_tokens"]
        assert summary.quantized_tensors(plan) == 15
        assert [note for note in plan.notes if "SGLang" not in note] == []
        assert plan.digest != plan_of(source, scheme).digest
        assert ignored_layers(with_head(source, scheme, ("lm_head",))) == ["lm_head", "model.embed_tokens"]

    # It has no blocks.
    plan = with_head(source, BLOCK_COMPRESSED)
    assert targets(plan) == [["Linear"], ["re:(.*[.])?lm_head"]]
    assert reason(plan, "lm_head") == "channel: engines load no output head in this scheme"
    assert plan.notes == (
        "one scale per output row instead of one scale per 128x128 block for 1 of 15 layers (10.0 % of their bytes): "
        "lm_head; engines load no output head in this scheme",
    )
    plan = with_head(small_checkpoints.write(tmp_path / "a", "Llama4ForConditionalGeneration"), CHANNEL)
    assert "language_model.lm_head" in quantized(plan)
    assert targets(plan) == [["Linear", "re:(.*[.])?lm_head"]]
    assert "lm_head" not in ignored_layers(plan)


LEFT_OUT = "leave --quantize-lm-head out"
TIED = "the output head is the embedding, which stays unquantized"
IN_FP8 = "engines load no quantized output head in the fp8 format"
OTHER = "use --scheme channel or --format compressed-tensors"
NAMELESS = f"AfmoeForCausalLM: its output head stays unquantized: {VLLM} builds it without a name to find its scheme by"


def test_output_heads_that_engines_cannot_load_are_refused(tmp_path: Path) -> None:
    headless = small_checkpoints.tensors("Qwen3ForCausalLM")
    del headless["lm_head.weight"]
    small_checkpoints.write(tmp_path / "headless", weights=headless)
    for name, scheme, message, hint in (
        ("Qwen3ForCausalLM", TENSOR, IN_FP8, OTHER),
        ("Qwen3ForCausalLM", BLOCK, IN_FP8, OTHER),
        ("Gemma3ForCausalLM", CHANNEL, TIED, LEFT_OUT),
        ("Gemma3ForConditionalGeneration", CHANNEL, TIED, LEFT_OUT),
        ("AfmoeForCausalLM", CHANNEL, NAMELESS, LEFT_OUT),
        ("headless", CHANNEL, TIED, LEFT_OUT),
    ):
        root = tmp_path / name
        if not root.exists():
            small_checkpoints.write(root, name)
        with pytest.raises(PlanError) as caught:
            with_head(root, scheme)
        assert (caught.value.message, caught.value.hint) == (message, hint)


# The input embedding.


def with_embedding(root: Path, scheme: Scheme, **options: Any) -> Plan:
    return make_plan(open_checkpoint(root), scheme, PlanOptions(**options, embedding=True))


def test_embedding_has_the_scheme_of_the_plan_or_int8(source: Path) -> None:
    plan = with_embedding(source, INT4_W4A16_64)
    assert targets(plan) == [["Linear", "model.embed_tokens"]]
    assert ignored_layers(plan) == ["lm_head"]
    assert plan.digest != plan_of(source, INT4_W4A16_64).digest
    for scheme in (CHANNEL, BLOCK_COMPRESSED, NVFP4, INT4_SHIFTED_64, INT6):
        plan = with_embedding(source, scheme)
        assert reason(plan, "model.embed_tokens") == "int8-weights: --quantize-embeddings"
        assert targets(plan) == [["Linear"], ["model.embed_tokens"]]
    chosen = with_embedding(source, CHANNEL, scheme_for=(("model.embed_tokens", INT4_W4A16_64),))
    assert reason(chosen, "model.embed_tokens") == "int4: --scheme-for model.embed_tokens=int4"
    ignored = with_embedding(source, CHANNEL, ignore=("**.embed_tokens",))
    assert ignored_layers(ignored) == ["lm_head", "model.embed_tokens"]
    unloaded = "it loads no quantized embedding; it loads without --quantize-embeddings"
    assert f"{SGLANG} does not load this output: {unloaded}" in with_embedding(source, CHANNEL).notes
    # GPTQ leaves head and embedding alone.
    decisions = with_embedding(source, INT4_W4A16_64, head=True).decisions
    rounded = {weight.module for weight, _ in gptq_weights(decisions)}
    assert {weight.module for weight, _ in decisions.quantized} - rounded == {"lm_head", "model.embed_tokens"}


def test_schemes_for_head_and_embedding_that_are_refused(source: Path) -> None:
    for scheme, name in ((CHANNEL, "channel"), (INT4_SHIFTED_64, "int4 with zero points")):
        with pytest.raises(PlanError) as caught:
            with_embedding(source, INT8_W8A8, scheme_for=(("**.embed_tokens", scheme),))
        assert caught.value.message == f"model.embed_tokens: no engine loads an embedding in {name}"
        assert caught.value.hint == (
            f"{VLLM} loads int8-weights, int4 and int2 without zero points: give it one of these with --scheme-for"
        )
    for pattern, what in (
        ("lm_head", "output head is quantized with --quantize-lm-head"),
        ("**.embed_tokens", "input embedding is quantized with --quantize-embeddings"),
    ):
        with pytest.raises(UsageError) as caught:
            make_plan(open_checkpoint(source), CHANNEL, PlanOptions(scheme_for=((pattern, INT8_W8A16),)))
        assert caught.value.message == f"--scheme-for {pattern}=int8-weights matches no module that can be quantized"
        assert caught.value.hint == f"the {what} only: give that too"


@for_each(("architecture", "names"), [
    ("LlamaForCausalLM", ["model.embed_tokens", "Embedding"]),
    ("Qwen3VLForConditionalGeneration", ["model.language_model.embed_tokens"]),
])  # fmt: skip
def test_embedding_is_named_as_vllm_finds_it(tmp_path: Path, architecture: str, names: list[str]) -> None:
    """Where vLLM builds it without a name, by the end of VocabParallelEmbedding."""
    plan = with_embedding(small_checkpoints.write(tmp_path / "a", architecture), CHANNEL, head=True)
    first, second = targets(plan)
    assert first == ["Linear", "re:(.*[.])?lm_head"]
    assert set(names) <= set(second)
    assert ("Embedding" in second) == (architecture == "LlamaForCausalLM")


NO_ENGINE = "no engine loads a quantized embedding beside --scheme"
EMBEDDED = f"the embedding is the output head too, and {VLLM} ties no quantized one to it"
KEPT = "leave --quantize-embeddings out"
UNBUILT = (
    f"MixtralForCausalLM: its embedding stays unquantized: {VLLM} builds it without a quantization, and no other engine "
    "loads a quantized one"
)


def test_embeddings_that_engines_cannot_load_are_refused(tmp_path: Path) -> None:
    other = "use --scheme channel or int8-weights"
    for name, scheme, message, hint in (
        ("Qwen3ForCausalLM", BLOCK, f"{NO_ENGINE} block in the fp8 format", f"{other}, or --format compressed-tensors"),
        ("Qwen3ForCausalLM", MXFP8, f"{NO_ENGINE} mxfp8 in the compressed-tensors format", other),
        ("MixtralForCausalLM", CHANNEL, UNBUILT, KEPT),
        ("Gemma3ForCausalLM", CHANNEL, EMBEDDED, KEPT),
    ):
        with pytest.raises(PlanError) as caught:
            with_embedding(small_checkpoints.write(tmp_path / name, name), scheme)
        assert (caught.value.message, caught.value.hint) == (message, hint)
    # One of its own must be there.
    for lacking, message in (
        ("lm_head.weight", EMBEDDED),
        ("model.embed_tokens.weight", "the source has no embed_tokens.weight"),
    ):
        weights = small_checkpoints.tensors("Qwen3ForCausalLM")
        del weights[lacking]
        with pytest.raises(PlanError) as caught:
            with_embedding(small_checkpoints.write(tmp_path / "a", weights=weights), CHANNEL)
        assert caught.value.message == message


@for_each(("architecture", "name"), [
    ("Glm4MoeForCausalLM", "mtp.safetensors"),
    ("DeepseekV3ForCausalLM", "model-mtp.safetensors"),
])  # fmt: skip
def test_mtp_layers_that_the_index_does_not_name_are_taken_in(tmp_path: Path, architecture: str, name: str) -> None:
    """As some tools save GLM-4.7: the output is what it is of a source whose index names them."""
    weights = small_checkpoints.tensors(architecture)
    whole = small_checkpoints.write(tmp_path / "whole", architecture, weights=weights)
    mtp = {key: weights.pop(key) for key in list(weights) if key.startswith("model.layers.2.")}
    source = small_checkpoints.write(tmp_path / "source", architecture, weights=weights, shards=2)
    save_file(mtp, source / name)
    note = (
        f"{name} is taken in: model.safetensors.index.json does not name it, so vLLM does not load these MTP layers; "
        "the output's does"
    )
    result = compress(source, tmp_path / "out", "channel")
    assert result.notes.count(note) == 1
    compress(whole, tmp_path / "expected", "channel")
    found, expected = small_checkpoints.read(tmp_path / "out"), small_checkpoints.read(tmp_path / "expected")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert {index["weight_map"][key] for key in mtp if key in expected} == {name}
    assert verify(tmp_path / "out", source, full=True).problems == ()
    # An index without them is damaged.
    index["weight_map"] = {key: shard for key, shard in index["weight_map"].items() if shard != name}
    (tmp_path / "out" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"{name} holds weights that model.safetensors.index.json does not name" in verify(tmp_path / "out").problems
    # A file whose layers the index has elsewhere is left out, and so is one of layers that the model does not have.
    twice = small_checkpoints.write(tmp_path / "twice", architecture, weights=weights | mtp, shards=2)
    save_file(mtp, twice / name)
    change_json(source / "config.json", lambda config: config.update(num_nextn_predict_layers=0))
    assert open_checkpoint(twice).left_out == open_checkpoint(source).left_out == (name,)


def as_class(root: Path, architecture: str, weights: dict[str, torch.Tensor], **config: Any) -> Path:
    """A small Qwen3 whose config.json names another class."""
    source = small_checkpoints.write(root, weights=weights)
    found = json.loads((source / "config.json").read_text()) | {"architectures": [architecture], **config}
    (source / "config.json").write_text(json.dumps(found))
    return source


def body() -> dict[str, torch.Tensor]:
    weights = small_checkpoints.tensors("Qwen3ForCausalLM")
    del weights["lm_head.weight"]
    return weights


def test_weights_that_not_all_engines_compute_with_are_noted(tmp_path: Path) -> None:
    root = small_checkpoints.write(tmp_path / "a", shards=2)
    for name in ("mtp.safetensors", "model.safetensors", "adapter_model.safetensors", "consolidated.safetensors"):
        shutil.copy(root / "model-00001-of-00002.safetensors", root / name)
    assert plan_of(root).notes == (
        "model.safetensors is left out: it lies beside model.safetensors.index.json, and "
        "transformers loads it in place of the shards",
        "mtp.safetensors is left out: model.safetensors.index.json does not name it, so engines do not load it",
        "adapter_model.safetensors: the adapter beside the model is not merged into it",
    )

    tied = small_checkpoints.write(tmp_path / "b")
    change_json(tied / "config.json", lambda config: config.update(tie_word_embeddings=True))
    assert plan_of(tied).notes == (
        "the source has an output head, and config.json ties it to the embedding: vLLM computes with the head, SGLang "
        "with the embedding; if the head was trained, set tie_word_embeddings to false",
    )
    with pytest.raises(PlanError) as caught:
        make_plan(open_checkpoint(tied), CHANNEL, PlanOptions(head=True))
    assert caught.value.message == "config.json ties the output head to the embedding, although the source has one"


def test_reward_models_whose_head_vllm_takes_for_quantized(tmp_path: Path) -> None:
    def source(architecture: str) -> Path:
        return as_class(tmp_path / architecture, architecture, {**body(), "score.2.weight": torch.zeros(1, 256).half()})

    why = "builds the head of {} without a name, and reads it as quantized"
    name = "Qwen2ForRewardModel"
    assert f"{VLLM} {why.format(name)}: serve this output in SGLang" in plan_of(source(name)).notes
    name = "Qwen2ForProcessRewardModel"
    with pytest.raises(PlanError, match=f"^{VLLM} {why.format(name)}; {SGLANG} has no such class"):
        plan_of(source(name))
    assert plan_of(source("Qwen3ForRewardModel")).notes == ()


def test_what_has_the_right_name_and_another_form_is_refused(tmp_path: Path) -> None:
    weights = small_checkpoints.tensors("Llama4ForCausalLM")
    weights["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(256, 256, 1)
    weights["model.layers.1.feed_forward.experts.gate_up_proj"] = torch.zeros(4, 256, 255)
    with pytest.raises(PlanError) as caught:
        plan_of(small_checkpoints.write(tmp_path / "a", "Llama4ForCausalLM", weights=weights))
    assert caught.value.message == (
        "model.layers.0.self_attn.q_proj.weight is not a 2-D weight but [256, 256, 1]; "
        "model.layers.1.feed_forward.experts.gate_up_proj is not a stack of experts but [4, 256, 255]"
    )


def test_a_layer_that_vllm_builds_without_a_name_has_the_scheme_of_most(tmp_path: Path) -> None:
    source = open_checkpoint(small_checkpoints.write(tmp_path / "a", "MiniCPM3ForCausalLM"))
    with pytest.raises(PlanError) as caught:
        make_plan(source, CHANNEL, PlanOptions(ignore=("**.self_attn.*",)))
    assert caught.value.message == (
        f"model.layers.{{0..1}}.self_attn.q_a_proj: {VLLM} builds it without a name and so reads it in the scheme of most "
        "layers (--ignore **.self_attn.*)"
    )
    assert summary.quantized_tensors(make_plan(source, CHANNEL, PlanOptions(ignore=("**.o_proj",)))) == 12


def test_no_quantized_head_for_what_has_none(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="^Qwen3Model has no output head"):
        with_head(as_class(tmp_path / "a", "Qwen3Model", body()), CHANNEL)


def test_what_does_not_fit_or_lacks_is_noted(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    for gone in ("model.layers.1.mlp.", "model.embed_tokens"):
        left = {name: info for name, info in checkpoint.tensors.items() if not name.startswith(gone)}
        [note] = make_plan(replace(checkpoint, tensors=left), CHANNEL).notes
        assert note.startswith("the source lacks ") and gone.rstrip(".").rpartition(".")[2] in note
    # As a finetune that was saved in float32.
    wide = {"model.embed_tokens.weight": TensorInfo("model.embed_tokens.weight", "F32", (151_936, 256))}
    notes = make_plan(replace(checkpoint, tensors={**checkpoint.tensors, **wide}), CHANNEL).notes
    assert any(note.startswith("what is not quantized stays float32 (0.156 GB), ") for note in notes)

    texts = {"documents": 1, "length": 200}
    notes = make_plan(checkpoint, INT4_W4A16_64, PlanOptions(gptq=texts, head=True)).notes
    assert any(note.endswith("--samples 3 gives enough") for note in notes)
    assert any(note.endswith("--scheme-for lm_head=int8-weights gives it 8 bits") for note in notes)


def test_a_classifier_without_its_head_and_a_tied_head(tmp_path: Path) -> None:
    lacks = "the source lacks the head of its task: no tensor is named score, classifier or the like"
    assert plan_of(as_class(tmp_path / "a", "Qwen3ForSequenceClassification", body())).notes == (lacks,)
    tied = plan_of(small_checkpoints.write(tmp_path / "b", "Gemma3ForCausalLM"))
    assert ignored_layers(tied) == ["lm_head", "model.embed_tokens"]


def test_shards_are_made_of_their_own_and_say_that_their_tensors_are_pytorch_s(source: Path) -> None:
    """transformers loads no file that does not. A single scale needs the shards of all that are fused."""
    for scheme, alone in ((CHANNEL, True), (TENSOR, False)):
        layout = plan_of(source, scheme).layout
        assert all(layout.sources(shard.name) == {shard.name} for shard in layout.shards) == alone
        for shard in layout.shards:
            header = layout.lay_out(shard.name).header
            assert json.loads(header[8:])["__metadata__"] == {"format": "pt"}
            assert len(header) % 8 == 0
