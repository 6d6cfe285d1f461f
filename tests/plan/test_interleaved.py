"""Layers whose queries, keys and values lie head by head, which engines sort as they load them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from openquant.files.checkpoint import open_checkpoint
from openquant.formats.schemes import (
    BLOCK,
    BLOCK_COMPRESSED,
    CHANNEL,
    INT4_SHIFTED,
    INT4_W4A16,
    MXFP8,
    NVFP4,
    TENSOR,
    TENSOR_COMPRESSED,
    Scheme,
)
from openquant.models import MODELS
from openquant.plan import summary
from openquant.plan.architecture import why_not_reordered
from openquant.plan.decisions import PlanOptions
from openquant.plan.plan import Plan, ignored_layers, make_plan
from openquant.registry.architecture import Architecture, ParallelSplit
from openquant.registry.parts import HEADS
from support import small_checkpoints
from support.rows import for_each

FALCON, BLOOM, TELECHAT2 = "FalconForCausalLM", "BloomForCausalLM", "TeleChat2ForCausalLM"
SORTED = "an engine sorts its rows by heads"


def split_of(name: str) -> ParallelSplit:
    return next(split for split in MODELS[name].splits if split.interleaved)


def without_turns(model: Architecture) -> Architecture:
    return replace(
        model, splits=tuple(replace(split, interleaved=False, interleaved_all=False) for split in model.splits)
    )


def plan_of(root: Path, scheme: Scheme) -> Plan:
    return make_plan(open_checkpoint(root), scheme, PlanOptions())


@for_each(("name", "scheme", "head", "problem"), [
    # What has an axis of outputs is sorted, a single scale is let be.
    (FALCON, TENSOR, 64, None),
    (FALCON, CHANNEL, 64, None),
    (FALCON, MXFP8, 64, None),
    (FALCON, INT4_W4A16, 64, None),
    (FALCON, BLOCK, 128, None),
    (FALCON, BLOCK, 64, f"{SORTED}, and the 64 rows of a head are not whole groups of 128"),
    # Zero points of eight rows share a word.
    (FALCON, INT4_SHIFTED, 64, None),
    (FALCON, INT4_SHIFTED, 4, f"{SORTED}, and the 4 rows of a head are not whole groups of 8"),
    # Whatever there is is sorted.
    (BLOOM, CHANNEL, 64, None),
    (BLOOM, MXFP8, 64, None),
    (BLOOM, BLOCK, 128, None),
    (BLOOM, BLOCK, 64, f"{SORTED}, and the 64 rows of a head are not whole groups of 128"),
    (BLOOM, TENSOR, 64, f"{SORTED}, and fails on its weight_scale, which has no rows for each head"),
    (BLOOM, INT4_W4A16, 64, f"{SORTED}, and fails on its weight_shape, which has no rows for each head"),
    (BLOOM, NVFP4, 64, f"{SORTED}, and fails on its weight_global_scale, which has no rows for each head"),
    # So is it, by counts of rows.
    (TELECHAT2, CHANNEL, 64, None),
    (TELECHAT2, MXFP8, 64, None),
    (TELECHAT2, TENSOR, 64, f"{SORTED}, and fails on its weight_scale, which has fewer rows"),
    (TELECHAT2, BLOCK, 128, f"{SORTED}, and fails on its weight_scale_inv, which has fewer rows"),
    (TELECHAT2, INT4_W4A16, 64, f"{SORTED}, and fails on its weight_shape, which has fewer rows"),
])  # fmt: skip
def test_what_shares_a_scale_must_stay_within_a_head(name: str, scheme: Scheme, head: int, problem: str | None) -> None:
    config = {HEADS: 4, "num_kv_heads": 2, "new_decoder_architecture": True}
    rows = (12 if name == BLOOM else 8) * head
    assert why_not_reordered((rows, 256), split_of(name), config, scheme.format) == problem
    assert why_not_reordered((rows, 256), replace(split_of(name), interleaved=False), config, scheme.format) is None


def test_a_layer_falls_back_and_says_why(tmp_path: Path) -> None:
    root, layer = small_checkpoints.write(tmp_path / "a", FALCON), "transformer.h.0.self_attention.query_key_value"
    note = "blocks do not divide, which leaves 2 of 8 layers (18.2 % of their bytes) unquantized"
    plan = plan_of(root, BLOCK)
    assert summary.schemes(plan) == {BLOCK: 6}
    assert plan.notes[0] == f"{note}; --scheme channel quantizes them too"
    assert layer in ignored_layers(plan)
    assert summary.schemes(plan_of(root, BLOCK_COMPRESSED)) == {BLOCK_COMPRESSED: 6, CHANNEL: 2}
    assert summary.schemes(plan_of(root, TENSOR)) == {TENSOR: 8}
    bloom = small_checkpoints.write(tmp_path / "b", BLOOM)
    assert summary.schemes(plan_of(bloom, BLOCK)) == {BLOCK: 8}
    plan = plan_of(bloom, TENSOR)
    assert summary.schemes(plan) == {TENSOR: 6}
    assert plan.notes[0].endswith("unquantized; --scheme channel quantizes them too")
    assert summary.schemes(plan_of(bloom, TENSOR_COMPRESSED)) == {TENSOR_COMPRESSED: 6, CHANNEL: 2}
    # The next smaller groups are of no help, and nothing says that they were taken.
    plan = plan_of(bloom, INT4_W4A16)
    assert summary.schemes(plan) == {INT4_W4A16: 6}
    assert plan.notes[0].startswith("groups do not divide, which leaves 2 of 8 layers")
    # What queries are joined with is what is sorted.
    telechat = small_checkpoints.write(tmp_path / "c", TELECHAT2)
    plan = plan_of(telechat, TENSOR)
    assert summary.schemes(plan) == {TENSOR: 8}
    assert {"transformer.h.1.self_attention.query", "transformer.h.1.self_attention.qkv_proj"} <= set(
        ignored_layers(plan)
    )


def test_without_sizes_only_what_needs_none_is_stored() -> None:
    unknown = "config.json does not say how many rows each of its parts has"
    for config in ({}, {HEADS: 5}, {HEADS: "4"}):
        assert why_not_reordered((768, 256), split_of(BLOOM), config, CHANNEL.format) == unknown
        assert why_not_reordered((768, 256), split_of(FALCON), config, BLOCK.format) == unknown
        assert why_not_reordered((768, 256), split_of(FALCON), config, CHANNEL.format) is None
