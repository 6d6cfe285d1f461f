"""Where codes are computed: with numpy on the CPU, or with torch on a device."""

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
    """The loops of formats/kernels.py; of formats/compiled.py if `fast`, where numba is there."""
    if fast:
        # Installed it may be, and yet too old for this numpy.
        with suppress(ImportError, OSError):
            from ..formats import compiled

            return compiled
    return kernels


class CpuKernels:
    """What loops do to weights in memory.

    Args:
        loops: those of `loops`.
    """

    def __init__(self, loops: Loops) -> None:
        self.loops = loops

    def absmax(self, bits: Bits, dtype: str, group: Group) -> Floats:
        """The largest absolute weight of each group, float32 [rows / height, cols / width], of what `load` gave."""
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
        """Write the codes of weights to `out` as they are stored.

        Args:
            bits: the weights, as `load` gives them: uint16 or uint32 [rows, cols].
            dtype: their dtype: "BF16", "F16" or "F32".
            scale: float32 [rows / height, cols / width].
            format: how they are stored.
            out: uint8 [rows, cols / codes in a byte], contiguous.
            global_scale: float32 [1, 1], where the format has one.
            zero_point: float32 of the shape of `scale`, the values of the codes that stand for zero; 0 if None.
        """
        self.loops.encode_stored(bits, dtype, scale, format.group, out, format.number, global_scale, zero_point)

    def load(self, bits: Bits, dtype: str) -> Bits:
        """Weights as `absmax` and `encode` take them: here the bits themselves, uint16 or uint32 [rows, cols]."""
        del dtype
        return bits

    def memory(self, nbytes: int) -> Bytes:
        """A buffer of so many bytes, uint8 [nbytes], for weights or codes."""
        return np.empty(nbytes, np.uint8)


class TorchKernels:
    """The same methods on a torch device, with the arithmetic of formats/reference.py, which gives the same codes.

    Each worker has one of its own. On a GPU its buffers are pinned, so that copies go by DMA, and it works on its own
    stream, so that one worker's copies overlap another's arithmetic and the reads and writes of all.

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
        """Work on this worker's stream; an error of the device, such as having no memory left, is a UsageError."""
        try:
            with self.torch.cuda.stream(self.stream):
                yield
        except RuntimeError as error:
            raise UsageError(
                f"{self.device} failed: {first_line(error)}", "use fewer --workers, or --device cpu"
            ) from error

    def memory(self, nbytes: int) -> Bytes:
        """A buffer of so many bytes on the host, uint8 [nbytes], for weights or codes; pinned for a GPU."""
        with self._working():
            pinned = self.stream is not None
            return np.asarray(self.torch.empty(nbytes, dtype=self.torch.uint8, pin_memory=pinned).numpy())

    def load(self, bits: Bits, dtype: str) -> Any:
        """Weights as `absmax` and `encode` take them: a tensor [rows, cols] on the device, copied there once for both.

        Args:
            bits: uint16 or uint32 [rows, cols].
            dtype: what they hold, and the tensor's dtype: "BF16", "F16" or "F32".
        """
        signed = self.torch.from_numpy(np.ascontiguousarray(bits).view(f"i{bits.dtype.itemsize}"))
        with self._working():
            return signed.to(self.device, non_blocking=True).view(self.dtypes[dtype])

    def absmax(self, weight: Any, dtype: str, group: Group) -> Floats:
        """The largest absolute weight of each group, float32 [rows / height, cols / width], of what `load` gave."""
        from ..formats.reference import group_absmax

        del dtype  # the weight has it
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
        """Write the codes of weights to `out` as they are stored.

        Args:
            weight: the weights, as `load` gives them: a tensor [rows, cols] on the device.
            dtype, scale, format, out, global_scale, zero_point: as for CpuKernels.encode.
        """
        from ..formats.reference import encode

        del dtype, global_scale  # the weight has the one, scales the other
        with self._working():
            zeros = None if zero_point is None else self.torch.from_numpy(zero_point).to(self.device)
            codes = encode(weight, self.torch.from_numpy(scale).to(self.device), format, zeros)
            self.torch.from_numpy(out).copy_(codes.view(self.torch.uint8), non_blocking=True)
            if self.stream is not None:
                # Before the codes are written, and before the next weights are read into the same memory.
                self.stream.synchronize()
