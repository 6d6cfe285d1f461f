"""How tensor parallelism divides a layer, of itself."""

from __future__ import annotations

from pathlib import Path

from openquant.files.checkpoint import open_checkpoint
from openquant.formats.format import Group
from openquant.formats.schemes import TENSOR
from openquant.models import MODELS
from openquant.plan.architecture import check_parallel_sizes, fused_parts, why_indivisible
from openquant.plan.plan import make_plan
from openquant.registry.architecture import ModuleRules, ParallelSplit
from openquant.registry.parts import HEADS, KV_HEADS
from support import small_checkpoints
from support.rows import for_each

OUT, IN = ParallelSplit(".up", "out"), ParallelSplit(".down", "in")
QUERIES = ParallelSplit(".q", "out", heads=HEADS)
KEYS = ParallelSplit(".k", "out", heads=KV_HEADS, replicated=True)
BLOCKS: Group = (128, 128)
ROWS: Group = (1, None)
PIECES: Group = (1, 32)
COUNTS = {HEADS: 6, KV_HEADS: 2}


@for_each(("shape", "split", "group", "size", "problem"), [
    # What is on every rank as it is.
    ((7, 7), None, BLOCKS, 2, None),
    ((96, 64), OUT, ROWS, 4, None),
    ((96, 64), OUT, ROWS, 5, "96 does not divide by 5"),
    ((64, 96), IN, ROWS, 4, None),
    ((64, 96), IN, ROWS, 5, "96 does not divide by 5"),
    # A rank must have whole groups, along the axis that is divided.
    ((512, 100), OUT, BLOCKS, 4, None),
    ((512, 100), OUT, BLOCKS, 8, "512 / 8 = 64 is not a multiple of 128"),
    ((100, 512), IN, BLOCKS, 4, None),
    ((100, 512), IN, BLOCKS, 8, "512 / 8 = 64 is not a multiple of 128"),
    ((96, 64), OUT, PIECES, 96, None),
    ((96, 64), IN, PIECES, 2, None),
    ((96, 64), IN, PIECES, 4, "64 / 4 = 16 is not a multiple of 32"),
    ((96, 64), OUT, (None, None), 96, None),
    # One rank has the whole, whatever its size.
    ((100, 100), OUT, BLOCKS, 1, None),
    # Heads stay whole, though the rows would divide.
    ((96, 64), QUERIES, ROWS, 6, None),
    ((96, 64), QUERIES, ROWS, 4, "6 heads do not divide by 4"),
    ((96, 64), QUERIES, ROWS, 12, "6 heads do not divide by 12"),
    # Ranks beyond the number of heads have copies, and each head is one part.
    ((256, 64), KEYS, BLOCKS, 2, None),
    ((256, 64), KEYS, BLOCKS, 8, None),
    ((128, 64), KEYS, BLOCKS, 8, "128 / 2 = 64 is not a multiple of 128"),
    ((256, 64), KEYS, ROWS, 3, "2 heads cannot be copied evenly to 3 ranks"),
])  # fmt: skip
def test_what_divides(
    shape: tuple[int, int], split: ParallelSplit | None, group: Group, size: int, problem: str | None
) -> None:
    assert why_indivisible(shape, split, COUNTS, group, size) == problem


def test_the_parts_of_a_merged_layer() -> None:
    merged = ParallelSplit(".qkv", "out", replicated=True, parts=(HEADS, KV_HEADS, KV_HEADS))
    pair = ParallelSplit(".gate_up", "out", parts=(None, None))
    assert fused_parts((640, 64), merged, COUNTS) == [(384, HEADS), (128, KV_HEADS), (128, KV_HEADS)]
    assert fused_parts((640, 64), pair, {}) == [(320, None), (320, None)]
    assert fused_parts((640, 64), QUERIES, COUNTS) == [(640, HEADS)]
    assert fused_parts((640, 64), None, COUNTS) == [(640, None)]
    # Where the sizes are unknown no part has one.
    unknown = [(0, HEADS), (0, KV_HEADS), (0, KV_HEADS)]
    assert fused_parts((641, 64), merged, COUNTS) == unknown
    for config in ({HEADS: 6}, {HEADS: 6, KV_HEADS: 0}, {HEADS: -6, KV_HEADS: 2}, {HEADS: "6", KV_HEADS: 2}):
        assert fused_parts((640, 64), merged, config) == unknown
    # Each part must divide, and by its own heads.
    assert why_indivisible((640, 64), merged, COUNTS, ROWS, 2) is None
    assert why_indivisible((640, 64), merged, COUNTS, ROWS, 6) is None
    assert why_indivisible((640, 64), merged, COUNTS, ROWS, 4) == "6 heads do not divide by 4"
    assert why_indivisible((640, 64), merged, COUNTS, BLOCKS, 2) == "384 / 2 = 192 is not a multiple of 128"
    assert why_indivisible((6, 64), pair, {}, ROWS, 2) == "3 does not divide by 2"


def test_the_first_layer_that_does_not_divide_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(small_checkpoints.write(tmp_path / "a"))
    entry = ModuleRules(MODELS["Qwen3ForCausalLM"])
    layers = make_plan(checkpoint, TENSOR).layers
    unquantized = [(layer, None) for layer in layers.values()]
    sizes = check_parallel_sizes(checkpoint, entry, unquantized, None)
    heads = "model.layers.*.self_attn.o_proj: 4 heads do not divide by "
    assert sizes == {1: None, 2: None, 4: None, 8: f"{heads}8", 16: f"{heads}16"}
    asked = check_parallel_sizes(checkpoint, entry, unquantized, 3)
    assert asked[3] == "model.layers.*.mlp.down_proj: 512 does not divide by 3"
    assert [*asked] == [1, 2, 3, 4, 8, 16]
    # Only what is not divided is left.
    assert set(check_parallel_sizes(checkpoint, entry, [], 3).values()) == {None}
