"""Hold what was written against the plan, with the safetensors library as an independent reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from ..files.tensors import TensorInfo
from ..formats.format import INPUT_SCALE
from ..formats.kernels import scale_values
from ..formats.numbers import Floats
from ..plan.layout import Encode, ShardLayout

# How the last parts of their names begin.
_SCALES = ("weight_scale", "weight_global_scale", INPUT_SCALE, "input_global_scale")
# Bytes of scales that are decoded together.
PIECE = 1 << 19


def verify_shard(path: Path, layout: ShardLayout) -> None:
    """Reopen a written shard: every planned tensor, its dtype and shape, and finite positive scales.

    Raises:
        RuntimeError: what is on disk is not what was planned, which is a fault of this program or of the disk.
    """
    problems: list[str] = []
    encoded = [job for job in layout.jobs if isinstance(job, Encode)]
    quantized = {piece.weight.module for job in encoded for piece in job.pieces}
    place = len(layout.header)
    try:
        with safe_open(path, framework="np") as file:
            if set(file.keys()) != {info.name for info in layout.tensors}:
                problems.append("its tensors are not those of the plan")
            for info in layout.tensors:
                found = file.get_slice(info.name)
                if found.get_dtype() != info.dtype or tuple(found.get_shape()) != info.shape:
                    problems.append(f"{info.name} is {found.get_dtype()} {found.get_shape()}")
                if info.name.rpartition(".")[0] in quantized and is_scale_tensor(info):
                    # numpy, and with it that library's own reading, has neither bfloat16 nor FP8.
                    own = info.dtype in ("BF16", "F8_E4M3")
                    sound = has_sound_scales(path, place, info) if own else _is_sound(file.get_tensor(info.name))
                    if not sound:
                        problems.append(f"{info.name} is not finite and positive")
                place += info.nbytes
    except SafetensorError as error:
        problems.append(str(error))
    if problems:
        raise RuntimeError(f"{layout.name} was written wrongly: {'; '.join(problems)}")


def is_scale_tensor(info: TensorInfo) -> bool:
    """Whether a tensor of a quantized layer holds scales."""
    return info.name.rpartition(".")[2].startswith(_SCALES)


def has_sound_scales(path: Path, offset: int, info: TensorInfo) -> bool:
    """Whether all scales of a tensor are finite and positive.

    Args:
        path: the file it lies in.
        offset: of its bytes, from the start of the file.
        info: the tensor.
    """
    return all(map(_is_sound, _pieces(path, offset, info)))


def _is_sound(scale: Floats) -> bool:
    return bool(np.isfinite(scale).all() and (scale > 0).all())


def _pieces(path: Path, place: int, info: TensorInfo) -> Iterator[Floats]:
    """The values of a tensor, a bounded number at a time."""
    for low in range(0, info.nbytes, PIECE):
        yield scale_values(np.fromfile(path, np.uint8, min(PIECE, info.nbytes - low), offset=place + low), info.dtype)
