"""Weights in GGUF files are decoded by pieces of rows to what the package gguf makes of them at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from openquant.errors import SourceError
from openquant.files.shardfile import Location
from openquant.formats.format import Blocks, ggml_types
from openquant.gguf.source import GgufTensor, gguf_weight
from openquant.weights import reading
from openquant.weights.reading import Reader, memory_of
from openquant.weights.weight import Weight
from support.gguf_files import DECODABLE, random_blocks
from support.rows import for_each

SHAPE = 48, 512
BEFORE = 100


def write_weight(
    directory: Path, blocks: np.ndarray, kind: GGMLQuantizationType, layout: Blocks, shape: tuple[int, ...] = SHAPE
) -> tuple[Weight, Reader]:
    """Write blocks to a file, and return their weight with a reader of the file."""
    (directory / "x.gguf").write_bytes(bytes(BEFORE) + blocks.tobytes() + bytes(50))
    stored = GgufTensor("blk.0.x.weight", int(kind), shape, BEFORE, blocks.nbytes)
    weight = gguf_weight("model.x.weight", shape, stored, ggml_types()[int(kind)], layout)
    return weight, Reader({"model.x.weight": Location("x.gguf", BEFORE)}, directory.joinpath)


def read_rows(weight: Weight, reader: Reader, multiple: int = 1) -> list[np.ndarray]:
    return [bits.view(np.float32).copy() for bits in reader.rows(weight, multiple)]


@for_each("kind", DECODABLE)
def test_every_type_is_decoded_by_pieces(kind: GGMLQuantizationType, tmp_path: Path, monkeypatch) -> None:
    # Ten rows of float32.
    monkeypatch.setattr(reading, "BUFFER", 10 * 4 * SHAPE[1])
    blocks = random_blocks(SHAPE, kind, np.random.default_rng(1))
    expected = np.array(dequantize(blocks, kind))
    weight, reader = write_weight(tmp_path, blocks, kind, Blocks())
    pieces = read_rows(weight, reader)
    assert [len(piece) for piece in pieces] == [10, 10, 10, 10, 8]
    assert np.array_equal(np.concatenate(pieces), expected)
    assert weight.dtype == "F32"
    assert weight.stored_nbytes == blocks.nbytes
    # Whole heads, and what the caller asks for.
    weight, reader = write_weight(tmp_path, blocks, kind, Blocks(head_rows=8))
    pieces = read_rows(weight, reader)
    assert [len(piece) for piece in pieces] == [8] * 6
    assert [len(piece) for piece in read_rows(weight, reader, 3)] == [24, 24]
    heads = expected.reshape(6, 4, 2, SHAPE[1]).swapaxes(1, 2).reshape(SHAPE)
    assert np.array_equal(np.concatenate(pieces), heads)


@for_each("value", [np.nan, np.inf, 3.4e38])
def test_what_is_no_bfloat16_is_refused(value: float, tmp_path: Path) -> None:
    rows = np.zeros(SHAPE, np.float32)
    rows[7, 3] = -value
    weight, reader = write_weight(tmp_path, rows.view(np.uint8), GGMLQuantizationType.F32, Blocks())
    message = "^model.x.weight in x.gguf decodes to NaN, infinity or a value that overflows bfloat16"
    with pytest.raises(SourceError, match=message):
        read_rows(weight, reader)


def test_memory_is_that_of_a_piece(tmp_path: Path) -> None:
    blocks = np.zeros((1, 144), np.uint8)
    shape = 1 << 20, 8192
    weight, _ = write_weight(tmp_path, blocks, GGMLQuantizationType.Q4_K, Blocks(head_rows=128), shape)
    assert memory_of(weight, 1) == (128 * 8192 * 4, 3 * 128 * 8192 * 4)
