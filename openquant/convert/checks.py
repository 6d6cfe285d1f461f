"""Compare a written shard with its plan, read by the safetensors library, which shares no code with our writer."""

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

# Beginnings of the last part of a scale tensor's name.
_SCALE_NAMES = ("weight_scale", "weight_global_scale", INPUT_SCALE, "input_global_scale")
# Bytes of scales that are decoded at a time.
PIECE = 1 << 19


def verify_shard(path: Path, layout: ShardLayout) -> None:
    """Check that a written shard has the planned tensors with their dtypes and shapes, and sound scales.

    Args:
        path: the shard.
        layout: file name, header and tensors that the plan has for it.

    Raises:
        RuntimeError: the file is not what was planned: a fault of this program or of the disk. The message names the
            problems, up to the first that keeps the file from being read.
    """
    problems: list[str] = []
    formats = {
        piece.weight.module: job.scheme.format for job in layout.jobs if isinstance(job, Encode) for piece in job.pieces
    }
    offset = len(layout.header)
    try:
        with safe_open(path, framework="np") as file:
            if set(file.keys()) != {info.name for info in layout.tensors}:
                problems.append("its tensors are not those of the plan")
            for info in layout.tensors:
                written = file.get_slice(info.name)
                if written.get_dtype() != info.dtype or tuple(written.get_shape()) != info.shape:
                    problems.append(f"{info.name} is {written.get_dtype()} {written.get_shape()}")
                fmt = formats.get(info.name.rpartition(".")[0])
                if fmt is not None and is_scale_tensor(info):
                    signed = fmt.signed_scales
                    if info.dtype in ("BF16", "F8_E4M3"):
                        # numpy has neither of the two, so the library cannot read them into it.
                        sound = has_sound_scales(path, offset, info, signed)
                    else:
                        sound = _is_sound(file.get_tensor(info.name), signed)
                    if not sound:
                        problems.append(f"{info.name} is not finite and {'not zero' if signed else 'positive'}")
                offset += info.nbytes
    except SafetensorError as error:
        problems.append(str(error))
    if problems:
        raise RuntimeError(f"{layout.name} was written wrongly: {'; '.join(problems)}")


def is_scale_tensor(info: TensorInfo) -> bool:
    """Return whether a tensor holds scales of weights or activations, going by its name alone.

    Args:
        info: name, dtype and shape of a tensor of a quantized layer.
    """
    return info.name.rpartition(".")[2].startswith(_SCALE_NAMES)


def has_sound_scales(path: Path, offset: int, info: TensorInfo, signed: bool) -> bool:
    """Return whether all scales of a tensor are finite and positive, or of either sign.

    Args:
        path: the file that contains the tensor.
        offset: bytes from the start of the file to the tensor.
        info: the tensor's name, dtype (any in which scales are stored) and shape.
        signed: whether scales may be negative (`Format.signed_scales`).
    """
    return all(_is_sound(scale, signed) for scale in _read_pieces(path, offset, info))


def _is_sound(scale: Floats, signed: bool) -> bool:
    return bool(np.isfinite(scale).all() and (scale != 0 if signed else scale > 0).all())


def _read_pieces(path: Path, offset: int, info: TensorInfo) -> Iterator[Floats]:
    """Yield the values of a tensor, float32 [n], from at most PIECE bytes at a time."""
    for low in range(0, info.nbytes, PIECE):
        yield scale_values(np.fromfile(path, np.uint8, min(PIECE, info.nbytes - low), offset=offset + low), info.dtype)
