"""CPUs, memory and devices that this process may use, the memory that it has used, and what a bug report needs."""

from __future__ import annotations

import errno
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import UsageError
from .version import BUILT, __version__

# A browser's Python, which plans, has none. Imported here because an error about too many open files needs it.
with suppress(ImportError):
    import resource

# The CPU time that a container may use (Linux, Documentation/admin-guide/cgroup-v2.rst).
_QUOTA = Path("/sys/fs/cgroup/cpu.max")

# Control groups, which limit memory (admin-guide/cgroup-v2.rst): their directory, and the file that names those of this
# process.
_GROUPS = Path("/sys/fs/cgroup")
_MINE = Path("/proc/self/cgroup")

# Parameters of mallopt (glibc's malloc.h) and their values. Arrays of 4 MB or more get memory from the system, which
# clears it and takes it back; smaller ones reuse freed memory, of which up to 32 MB is kept. With the defaults, memory
# for arrays of a megabyte went back and forth: the search for INT4 scales took a fifth longer, verifying twice as long,
# a decoder layer a quarter longer. With 16 MB instead of 4, offloaded hidden states fragmented the heap, and 8B shapes
# took 0.2 GB more.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_ARENA_MAX = -8
_KEPT = ((_TRIM_THRESHOLD, 1 << 25), (_MMAP_THRESHOLD, 1 << 22))

# Bytes that numba and its compiler need.
COMPILED_MEMORY = 176 << 20


def available_cpus(quota: Path = _QUOTA) -> int:
    """Return the number of CPUs that this process may use, by its affinity and its container's quota.

    Args:
        quota: the file `cpu.max` of the process's control group.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        time, period = quota.read_text().split()
        return max(1, min(cpus, math.ceil(int(time) / int(period))))
    except (OSError, ValueError):
        return cpus  # no such file, or "max"


def available_memory(groups: Path = _GROUPS, mine: Path = _MINE) -> int:
    """Return the bytes of memory that this process could allocate without swapping, within its control groups.

    Args:
        groups: the directory of control groups, /sys/fs/cgroup.
        mine: the file that names the groups of this process, /proc/self/cgroup.
    """
    free = _bytes_in("/proc/meminfo", "MemAvailable")
    if free is None:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(0, min([free, *_left_in_groups(groups, mine)]))


def _left_in_groups(groups: Path, mine: Path) -> Iterator[int]:
    """Yield the bytes left below each group's limit. File pages count too, but the system drops them when needed."""
    try:
        lines = mine.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # "0::/user.slice"; version 1 has other controllers, "4:memory:/user.slice".
        _, controller, path = line.split(":", 2)
        for parent in [] if controller else [Path(path), *Path(path).parents]:
            group = groups / parent.relative_to("/")
            # Without a limit the file is missing or says "max"; a container does not see the groups of its host.
            with suppress(OSError, ValueError):
                size = int((group / "memory.max").read_text())
                statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                yield size - int(statistics.get("anon", 0))


def find_device(name: str, number: int) -> str:
    """Return the device for the value of --device.

    Args:
        name: "cpu", "cuda", "cuda:N", or "auto" for a GPU if there is one, else the CPU.
        number: number of this process on this machine (local rank), which selects a GPU for "auto" and "cuda".

    Returns:
        "cpu", or a torch device such as "cuda:1".

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
            # Makes the driver allocate its host memory now, before memory is measured.
            torch.zeros(1, device=f"cuda:{chosen}")
        except RuntimeError as error:
            raise UsageError(f"cuda:{chosen} cannot be used: {first_line(error)}", "use --device cpu") from None
        return f"cuda:{chosen}"
    if name == "auto":
        return "cpu"
    raise UsageError(f"there is no {name}: torch {torch.__version__} sees {count} GPUs", "use --device cpu")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, and the second if the first ends in a colon; the rest is advice.

    Args:
        error: the error; if it has no message, the name of its class is returned.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def resident() -> int:
    """Return the resident memory of this process in bytes; its peak on systems that do not report the current one."""
    return _bytes_in("/proc/self/status", "VmRSS") or peak_rss()


def peak_rss() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    # Unlike VmHWM, ru_maxrss starts at the parent's size.
    if (peak := _bytes_in("/proc/self/status", "VmHWM")) is not None:
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _bytes_in(file: str, key: str) -> int | None:
    """A size in a file of Linux such as "VmRSS: 12 kB", in bytes; None elsewhere."""
    value = _value_in(file, key)
    return None if value is None else 1024 * int(value.split()[0])


def _value_in(file: str, key: str) -> str | None:
    """The first value of a key in a file of Linux with a key in each line; None elsewhere."""
    with suppress(OSError), open(file, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return None


@contextmanager
def memory_used_again() -> Iterator[None]:
    """Make glibc reuse freed memory across threads inside the context; new memory costs time, as the system clears it.

    With an arena for each thread, arrays that one thread allocates and another frees would leave holes that grow with
    every layer. The thresholds stay set afterwards, since glibc does not adapt them once they were set. Other C
    libraries are not changed.
    """
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    for parameter, value in _KEPT:
        mallopt(parameter, value)
    mallopt(_ARENA_MAX, 1)
    try:
        yield
    finally:
        mallopt(_ARENA_MAX, 0)


def _mallopt() -> Callable[[int, int], int] | None:
    """Return glibc's mallopt; None with another C library."""
    import ctypes

    try:
        library = ctypes.CDLL(None)
        return library.mallopt if hasattr(library, "gnu_get_libc_version") else None
    except (OSError, AttributeError):
        return None


def give_memory_back() -> None:
    """Make glibc return freed memory to the system; it keeps much of it if many threads allocate."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def without_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from or while handling, is that memory ran out."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # The system's loader gives no error number for a library that does not fit into memory.
        text = str(error).lower()
        unloaded = isinstance(error, ImportError) and ("failed to map" in text or "cannot allocate" in text)
        if isinstance(error, MemoryError) or unloaded or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        error = error.__cause__ or error.__context__
    return False


# What openquant computes, reads and writes with.
LIBRARIES = (
    *("torch", "transformers", "safetensors", "huggingface_hub", "accelerate", "numpy", "numba", "compressed-tensors"),
    *("gguf", "lm-eval", "datasets", "matplotlib"),
)
ENGINES = ("vllm", "sglang")
# Instructions that kernels ask for, as Linux names them; Arm's come last.
_INSTRUCTIONS = ("avx2", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16")
_CPUS = "/proc/cpuinfo"
_SETTINGS = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE")


def describe_environment(loops: str) -> dict[str, Any]:
    """Return what a bug report needs of this machine, as `openquant env --json` prints it (docs/json.md). No paths.

    Args:
        loops: what runs the loops over the weights of large models, "numba" or "numpy".

    Returns:
        Versions of openquant, Python, libraries and engines, None for those that are not installed; the CPU, its
        instructions and memory in bytes; the GPUs that torch finds; the loops; and environment variables that change
        what runs.
    """
    # Late, as in `_version`: `--help`, which has no use for it, would take a fifth longer.
    import platform

    flags = _value_in(_CPUS, "flags") or _value_in(_CPUS, "Features") or ""
    return {
        "openquant": __version__,
        "commit": BUILT.partition("+g")[2].partition(".")[0] or None,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": available_cpus(),
        "cpu": _value_in(_CPUS, "model name") or platform.processor() or None,
        "instructions": [name for name in _INSTRUCTIONS if name in flags.split()],
        "memory": available_memory(),
        "gpus": _gpus(),
        "loops": loops,
        "libraries": {name: _version(name) for name in LIBRARIES},
        "engines": {name: _version(name) for name in ENGINES},
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
    }


def _version(distribution: str) -> str | None:
    from importlib import metadata

    if distribution == "torch":
        # The package's own version tells the build, such as 2.13.0+cu130.
        with suppress(ImportError, OSError):
            import torch

            return str(torch.__version__)
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return None


def _gpus() -> list[dict[str, Any]] | str:
    """Name, memory and compute capability of each GPU that torch finds; the error if it cannot say."""
    try:
        import torch

        found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    except Exception as error:  # torch raises whatever its driver does
        return first_line(error)
    return [{"name": gpu.name, "memory": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"} for gpu in found]
