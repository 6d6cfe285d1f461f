"""GPUs by name: how much memory each has, and which kernels engines have for it.

Memory is what CUDA reports (`torch.cuda.mem_get_info`), which is what engines take their share of. It is 0.5 to 4 %
less than the driver's own figure. That of H100 and H200 was measured; the others are what users report, rounded down,
with ECC on where the card is sold with it.

    find_gpu("rtx-4090")        # GPU("RTX 4090", 24, 25233981440, "Ada")
    nearest_gpus("4900")        # ("RTX 4090",)
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

# More characters than any name has.
LONGEST = 60


@dataclass(frozen=True)
class GPU:
    """A GPU that users name.

    Attributes:
        name: its name: "RTX 4090".
        gigabytes: memory as it is advertised; None for the CPU.
        memory: bytes that CUDA reports; None for the CPU, whose memory is the machine's.
        hardware: one of HARDWARE in hardware.py, which says what engines have kernels for.
    """

    name: str
    gigabytes: int | None
    memory: int | None
    hardware: str


def _gpu(name: str, gigabytes: int, gib: float, hardware: str) -> GPU:
    return GPU(name, gigabytes, int(gib * 2**30), hardware)


GPUS = (
    _gpu("T4", 16, 14.5, "Turing"),
    _gpu("RTX 3090", 24, 23.5, "Ampere"),
    _gpu("RTX 3090 Ti", 24, 23.5, "Ampere"),
    _gpu("A10", 24, 21.9, "Ampere"),
    _gpu("A10G", 24, 21.9, "Ampere"),
    _gpu("A40", 48, 44.3, "Ampere"),
    _gpu("A6000", 48, 47.4, "Ampere"),
    _gpu("A100-40", 40, 39.3, "Ampere"),
    _gpu("A100-80", 80, 79.1, "Ampere"),
    _gpu("RTX 4060 Ti 16GB", 16, 15.5, "Ada"),
    _gpu("RTX 4070", 12, 11.6, "Ada"),
    _gpu("RTX 4070 Super", 12, 11.6, "Ada"),
    _gpu("RTX 4070 Ti", 12, 11.6, "Ada"),
    _gpu("RTX 4070 Ti Super", 16, 15.6, "Ada"),
    _gpu("RTX 4080", 16, 15.6, "Ada"),
    _gpu("RTX 4080 Super", 16, 15.6, "Ada"),
    _gpu("RTX 4090", 24, 23.5, "Ada"),
    _gpu("L4", 24, 22.0, "Ada"),
    _gpu("L40S", 48, 44.3, "Ada"),
    _gpu("RTX 6000 Ada", 48, 44.4, "Ada"),
    _gpu("H100", 80, 79.1, "Hopper"),
    _gpu("H200", 141, 139.8, "Hopper"),
    _gpu("RTX 5070 Ti", 16, 15.4, "Blackwell"),
    _gpu("RTX 5080", 16, 15.4, "Blackwell"),
    _gpu("RTX 5090", 32, 31.3, "Blackwell"),
    _gpu("RTX PRO 6000", 96, 94.9, "Blackwell"),
    _gpu("B200", 192, 178.3, "Blackwell"),
    _gpu("MI300X", 192, 191.6, "MI300"),
    GPU("CPU", None, None, "CPU"),
)

# What drivers, shops and clouds add to a name.
_ADDED = re.compile(
    r"nvidia|geforce|tesla|rtx|amd|instinct|generation|blackwell|workstation|server|edition|sxm\d?|pcie|hbm\d?e?"
    r"|[^a-z0-9]"
)
_APPLE = re.compile(r"(apple|mac|m[1-9]\d?(pro|max|ultra)?$)")


def _key(name: str) -> str:
    return _ADDED.sub("", name.lower()).removesuffix("gb")


_BY_KEY = {
    key: gpu
    for gpu in GPUS
    # "H100 80GB" is the H100.
    for key in (_key(gpu.name), *([f"{_key(gpu.name)}{gpu.gigabytes}"] if gpu.gigabytes else []))
}


def find_gpu(name: str) -> GPU | None:
    """Find a GPU by its name.

    Args:
        name: such as "4090", "rtx-4090", "NVIDIA A100-SXM4-80GB" or "cpu". Case, spaces, dashes, makers and packages do
            not matter.

    Returns:
        The GPU; None if none has this name.
    """
    return _BY_KEY.get(_key(name)) if len(name) <= LONGEST else None


def nearest_gpus(name: str) -> tuple[str, ...]:
    """Return the names of GPUs that have a name as a part, or else are most like it; none if all are far from it.

    Args:
        name: the name of no GPU.
    """
    if len(name) > LONGEST:
        return ()
    key = _key(name)
    names = {_key(gpu.name): gpu.name for gpu in GPUS}
    keys = [known for known in names if len(key) > 2 and key in known]
    return tuple(names[known] for known in (keys or difflib.get_close_matches(key, names))[:3])


def is_apple(name: str) -> bool:
    """Whether a name is that of a chip or computer of Apple: "m3-max", "Apple M2", "macbook"."""
    return len(name) <= LONGEST and _APPLE.match(_key(name)) is not None
