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
    """The loops of formats/kernels.py, or of formats/compiled.py where numba is there and worth it."""
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
        """Largest absolute value of each group, as float32 [rows/height, cols/width]."""
        return self.loops.absmax(bits, dtype, group)

    def encode(
        self,
        bits: Bits,
        dtype: str,
        scale: Floats,
        format: Format,
        out: Codes,
        divisor: Floats | None = None,
        zero: Floats | None = None,
    ) -> None:
        """Write the codes of weights that `load` gave to `out`, as they are stored."""
        self.loops.encode_stored(bits, dtype, scale, format.group, out, format.number, divisor, zero)

    def load(self, bits: Bits, dtype: str) -> Bits:
        """Weights as `absmax` and `encode` take them: here the bits themselves."""
        del dtype
        return bits

    def memory(self, nbytes: int) -> Bytes:
        """A buffer of so many bytes, for weights or codes."""
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
        """A buffer of so many bytes on the host, for weights or codes; pinned for a GPU."""
        with self._working():
            pinned = self.stream is not None
            return np.asarray(self.torch.empty(nbytes, dtype=self.torch.uint8, pin_memory=pinned).numpy())

    def load(self, bits: Bits, dtype: str) -> Any:
        """Weights as `absmax` and `encode` take them: a tensor on the device, copied there once for both."""
        signed = self.torch.from_numpy(np.ascontiguousarray(bits).view(f"i{bits.dtype.itemsize}"))
        with self._working():
            return signed.to(self.device, non_blocking=True).view(self.dtypes[dtype])

    def absmax(self, weight: Any, dtype: str, group: Group) -> Floats:
        """Largest absolute value of each group, as float32 [rows/height, cols/width]."""
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
        divisor: Floats | None = None,
        zero: Floats | None = None,
    ) -> None:
        """Write the codes of weights that `load` gave to `out`, as they are stored."""
        from ..formats.reference import encode

        del dtype, divisor  # the weight has the one, scales the other
        with self._working():
            shift = None if zero is None else self.torch.from_numpy(zero).to(self.device)
            codes = encode(weight, self.torch.from_numpy(scale).to(self.device), format, shift)
            self.torch.from_numpy(out).copy_(codes.view(self.torch.uint8), non_blocking=True)
            if self.stream is not None:
                # Before the codes are written, and before the next weights are read into the same memory.
                self.stream.synchronize()
