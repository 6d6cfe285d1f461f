"""GgufCheckpoint: a checkpoint whose tensors lie in GGUF files, under the names that a Hugging Face directory has.

Every tensor is a weight that a Reader decodes from blocks (formats/ggml.py), vectors too. So it is read as any other
quantized checkpoint is, and `decoded_view` has nothing to find. The room gguf makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..files.checkpoint import Checkpoint
from ..files.gguf import GgufTensor
from ..files.tensors import TensorInfo
from ..formats.format import Blocks
from ..formats.ggml import GgmlType, ggml_format
from ..patterns import template
from .weight import Weight


@dataclass(frozen=True)
class GgufCheckpoint(Checkpoint):
    """An opened GGUF file, or several that are one model.

    `shards` are output shards to be; each is a link to the GGUF file that has its tensors, with the size of that file.
    `tensors` are blocks as bytes, U8 [out, bytes of a row], and `where` has their offsets.

    Attributes:
        weights: the stored weight of each tensor, by tensor name.
        file: the GGUF file, of several the first.
    """

    weights: Mapping[str, Weight] = field(default_factory=dict)
    file: Path = Path()


def gguf_weight(name: str, shape: tuple[int, ...], stored: GgufTensor, number: GgmlType, blocks: Blocks) -> Weight:
    """Return a weight that lies in a GGUF file.

    Args:
        name: full tensor name in a Hugging Face directory.
        shape: its shape there: [out, in] or [out]. Vectors are read as one row.
        stored: the tensor of the file, or the part of it that one expert has.
        number: its tensor type.
        blocks: what is undone after blocks are decoded.
    """
    rows, cols = (1, *shape)[-2:]
    codes = TensorInfo(name, "U8", (rows, stored.nbytes // rows))
    module = name.removesuffix(".weight")
    source = TensorInfo(name, "BF16", shape)
    return Weight(module, template(module), source, (rows, cols), format=ggml_format(number, blocks), parts=(codes,))
