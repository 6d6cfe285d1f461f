"""Compute codes with numpy or numba on the CPU, or with torch on another device. Both give the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from ..errors import UsageError
from ..files.shardfile import Bytes
from ..formats import kernels
from ..formats.format import Format, Group
from ..formats.kernels import Bits, Loops
from ..formats.numbers import Codes, Floats
from ..machine import first_line


def loops(fast: bool) -> Loops:
    """Return the numpy loops of formats/kernels.py, or if `fast` the compiled ones of formats/compiled.py.

    Args:
        fast: whether to use numba; where it cannot be imported, the numpy loops are returned all the same.

    Returns:
        The module, whose functions choose scales, encode and decode.
    """
    if fast:
        # numba may be installed and yet too old for this numpy.
        with suppress(ImportError, OSError):
            from ..formats import compiled

            return compiled
    return kernels


class CpuKernels:
    """Computes scales' inputs and codes on the CPU.

    Args:
        loops: the result of `loops()`.
    """

    def __init__(self, loops: Loops) -> None:
        self.loops = loops

    def absmax(self, bits: Bits, dtype: str, group: Group) -> Floats:
        """Compute the largest absolute weight of each group.

        Args:
            bits: weights [rows, cols] of whole groups, as `load` returns them.
            dtype: dtype of the weights: "BF16", "F16" or "F32".
            group: (height, width) of a group; None is the whole axis.

        Returns:
            float32 [rows / height, cols / width]; NaN or infinity for a group that has one.
        """
        return self.loops.absmax(bits, dtype, group)

    def encode(
        self,
        bits: Bits,
        dtype: str,
        scale: Floats,
        format: Format,
        out: Codes,
        global_scale: Floats | None = None,
        zero_point: Floats | None = None,
    ) -> None:
        """Quantize weights and write their codes to `out` as they are stored.

        Args:
            bits: finite weights [rows, cols] of whole groups, as `load` returns them.
            dtype: dtype of the weights: "BF16", "F16" or "F32".
            scale: float32 [rows / height, cols / width], the scale of each group, divided by the global scale.
            format: format of the codes.
            out: uint8 [rows, cols / codes per byte], contiguous; is overwritten.
            global_scale: float32 [1, 1], by which `scale` is divided; None for formats without one.
            zero_point: float32 of the shape of `scale`: value of the code that stands for zero; None if it is 0.
        """
        self.loops.encode_stored(bits, dtype, scale, format.group, out, format.number, global_scale, zero_point)

    def load(self, bits: Bits, dtype: str) -> Bits:
        """Return the bits unchanged, uint16 or uint32 [rows, cols], for `absmax` and `encode`; `dtype` is ignored."""
        del dtype
        return bits

    def memory(self, nbytes: int) -> Bytes:
        """Allocate a buffer for weights or codes, uint8 [nbytes]."""
        return np.empty(nbytes, np.uint8)


class TorchKernels:
    """Computes the same as CpuKernels on a torch device, by formats/reference.py. Each worker has its own.

    On a GPU its buffers are pinned, so that copies go by DMA, and it works on its own stream, so that one worker's
    copies overlap another worker's arithmetic and the reads and writes of all.

    Its methods raise UsageError if the device fails, as for too little memory.

    Args:
        device: a torch device name such as "cuda:0".
    """

    def __init__(self, device: str) -> None:
        import torch

        self.torch = torch
        self.device = torch.device(device)
        self.dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
        self.stream: Any = None
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Work on this worker's stream, and turn errors of the device, such as too little memory, into UsageError."""
        try:
            with self.torch.cuda.stream(self.stream):
                yield
        except RuntimeError as error:
            raise UsageError(
                f"{self.device} failed: {first_line(error)}", "use fewer --workers, or --device cpu"
            ) from error

    def memory(self, nbytes: int) -> Bytes:
        """Allocate a host buffer for weights or codes, uint8 [nbytes]; pinned if the device is a GPU."""
        with self._working():
            pinned = self.stream is not None
            return np.asarray(self.torch.empty(nbytes, dtype=self.torch.uint8, pin_memory=pinned).numpy())

    def load(self, bits: Bits, dtype: str) -> Any:
        """Copy weights to the device, once for both `absmax` and `encode`.

        Args:
            bits: uint16 or uint32 [rows, cols], the bits of the weights.
            dtype: dtype of the weights: "BF16", "F16" or "F32".

        Returns:
            The weights as a torch tensor [rows, cols] of that dtype on the device.
        """
        signed = self.torch.from_numpy(np.ascontiguousarray(bits).view(f"i{bits.dtype.itemsize}"))
        with self._working():
            return signed.to(self.device, non_blocking=True).view(self.dtypes[dtype])

    def absmax(self, weight: Any, dtype: str, group: Group) -> Floats:
        """Compute the largest absolute weight of each group.

        Args:
            weight: tensor [rows, cols] of whole groups, as `load` returns it.
            dtype: ignored, since the tensor has it.
            group: (height, width) of a group; None is the whole axis.

        Returns:
            float32 [rows / height, cols / width], on the host; NaN or infinity for a group that has one.
        """
        from ..formats.reference import group_absmax

        del dtype
        with self._working():
            return np.asarray(group_absmax(weight, group).cpu().numpy())

    def encode(
        self,
        weight: Any,
        dtype: str,
        scale: Floats,
        format: Format,
        out: Codes,
        global_scale: Floats | None = None,
        zero_point: Floats | None = None,
    ) -> None:
        """Quantize weights and write their codes to `out` as they are stored.

        Args:
            weight: finite tensor [rows, cols] of whole groups, as `load` returns it.
            dtype: ignored, since the tensor has it.
            scale: float32 [rows / height, cols / width] on the host, the scale of each group divided by any global one.
            format: format of the codes.
            out: uint8 [rows, cols / codes per byte], contiguous, on the host; is overwritten.
            global_scale: ignored, since `scale` is divided by it already.
            zero_point: float32 of the shape of `scale`: value of the code that stands for zero; None if it is 0.
        """
        from ..formats.reference import encode

        del dtype, global_scale
        with self._working():
            zeros = None if zero_point is None else self.torch.from_numpy(zero_point).to(self.device)
            codes = encode(weight, self.torch.from_numpy(scale).to(self.device), format, zeros)
            self.torch.from_numpy(out).copy_(codes.view(self.torch.uint8), non_blocking=True)
            if self.stream is not None:
                # The codes must have arrived before they are written, and before the buffers are used again.
                self.stream.synchronize()
