"""Hold what was written against the plan, with the safetensors library as an independent reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from ..formats.format import INPUT_SCALE
from ..formats.kernels import scale_values
from ..plan.layout import Encode, Layout


def verify_shard(path: Path, layout: Layout) -> None:
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
                owner, _, last = info.name.rpartition(".")
                if owner in quantized and last.startswith(("weight_scale", INPUT_SCALE)):
                    # numpy, and with it that library's own reading, has no bfloat16.
                    raw = np.fromfile(path, np.uint8, info.nbytes, offset=place) if info.dtype == "BF16" else None
                    scale = file.get_tensor(info.name) if raw is None else scale_values(raw, info.dtype)
                    if not (np.isfinite(scale).all() and (scale > 0).all()):
                        problems.append(f"{info.name} is not finite and positive")
                place += info.nbytes
    except SafetensorError as error:
        problems.append(str(error))
    if problems:
        raise RuntimeError(f"{layout.name} was written wrongly: {'; '.join(problems)}")
