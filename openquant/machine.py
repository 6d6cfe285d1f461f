"""What this process may use of the machine, and has used."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

from .errors import UsageError

# How many CPUs' worth of time a container may use (Linux, Documentation/admin-guide/cgroup-v2.rst).
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cpus(quota: Path = _QUOTA) -> int:
    """CPUs this process may use."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        time, period = quota.read_text().split()
        return max(1, min(cpus, math.ceil(int(time) / int(period))))
    except (OSError, ValueError):
        return cpus  # no such file, or "max"


def find_device(name: str, number: int) -> str:
    """The torch device that a name means, or "cpu".

    Args:
        name: "auto", "cpu", "cuda" or "cuda:N".
        number: of this process on this machine, which tells one of several GPUs.

    Raises:
        UsageError: there is no such GPU, or it cannot be used.
    """
    if name == "cpu":
        return name
    # Importing torch to learn that there is no GPU would cost more than a small conversion.
    if name == "auto" and not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))):
        return "cpu"
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = int(name[5:]) if name.startswith("cuda:") else number % max(1, count)
    if chosen < count:
        try:
            # What the driver takes of this process's memory, it takes now.
            torch.zeros(1, device=f"cuda:{chosen}")
        except RuntimeError as error:
            raise UsageError(f"cuda:{chosen} cannot be used: {first_line(error)}", "use --device cpu") from None
        return f"cuda:{chosen}"
    if name == "auto":
        return "cpu"
    raise UsageError(f"there is no {name}: torch {torch.__version__} sees {count} GPUs", "use --device cpu")


def first_line(error: Exception) -> str:
    """What a torch error says, without the advice that follows."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def peak_rss() -> int:
    """Largest resident memory of this process so far, in bytes."""
    try:
        # ru_maxrss begins at the parent's size; this does not.
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
