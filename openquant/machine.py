"""What this process may use of the machine, and has used."""

from __future__ import annotations

import errno
import math
import mmap
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import OpenQuantError, UsageError

# How many CPUs' worth of time a container may use (Linux, Documentation/admin-guide/cgroup-v2.rst).
_QUOTA = Path("/sys/fs/cgroup/cpu.max")

# Control groups, which limit the memory of what is in them: where they lie, and which ones this process is in.
_GROUPS, _MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Of both versions of them (admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst): a group's limit, and what counts as held.
_LIMITS = {"": ("memory.max", "anon"), "memory": ("memory.limit_in_bytes", "total_rss")}

# glibc's malloc.h: parameters of mallopt, and what they are set to. An array from 4 MB on has memory of its own, which
# the system clears before and takes back after; smaller ones share what is kept, of which 32 MB may be free. With the
# defaults numpy's and torch's pieces of a megabyte came and went: INT4's scales were searched for in a fifth more time,
# its output verified in twice the time, a layer computed in a quarter more. With 16 MB for 4, hidden states that wait
# lay scattered among what layers computed with, and 8B shapes took 0.2 GB more.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_KEPT = ((_TRIM_THRESHOLD, 1 << 25), (_MMAP_THRESHOLD, 1 << 22))

# Address space that numpy takes as it is loaded.
NUMPY_MEMORY = 96 << 20


def require_room() -> None:
    """Refuse to load numpy without the memory for it: its library would end the process in words of its own.

    Raises:
        OSError: there is none.
    """
    mmap.mmap(-1, NUMPY_MEMORY).close()


def available_cpus(quota: Path = _QUOTA) -> int:
    """CPUs this process may use."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        time, period = quota.read_text().split()
        return max(1, min(cpus, math.ceil(int(time) / int(period))))
    except (OSError, ValueError):
        return cpus  # no such file, or "max"


def available_memory(groups: Path = _GROUPS, mine: Path = _MINE) -> int:
    """Bytes of memory that this process could have without others giving theirs back to a disk."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    return max(0, min([free, *_left_in_groups(groups, mine)]))


def _left_in_groups(groups: Path, mine: Path) -> Iterator[int]:
    """What the limit of each group leaves. Pages of files count for a limit too, but make room when there is none."""
    try:
        lines = mine.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # "0::/user.slice" of the second version, "4:memory:/user.slice" of the first.
        _, controller, path = line.split(":", 2)
        if controller not in _LIMITS:
            continue
        limit, held = _LIMITS[controller]
        for parent in [Path(path), *Path(path).parents]:
            group = groups / controller / parent.relative_to("/")
            # Nothing, or "max", where there is no limit; and in a container no group of its host's.
            with suppress(OSError, ValueError):
                size = int((group / limit).read_text())
                counts = dict(each.split() for each in (group / "memory.stat").read_text().splitlines())
                yield size - int(counts.get(held, 0))


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


def resident() -> int:
    """Resident memory of this process in bytes: now, or on systems that do not report that its peak."""
    return _status("VmRSS") or peak_rss()


def peak_rss() -> int:
    """Largest resident memory of this process so far, in bytes."""
    # ru_maxrss begins at the parent's size; this does not.
    if (found := _status("VmHWM")) is not None:
        return found
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(name: str) -> int | None:
    """What Linux says of this process's memory, in bytes; None elsewhere."""
    with suppress(FileNotFoundError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


@contextmanager
def memory_used_again() -> Iterator[None]:
    """Meanwhile what is freed is used again, whichever thread frees it: the system clears memory that is new.

    With an arena for each thread, arrays of many sizes that are made on one thread and freed on another would leave
    holes that grow with every layer. How large arrays have memory of their own stays as it was set, since glibc chooses
    no more by itself once it was told. Nothing changes where the C library is not glibc.
    """
    tell = _mallopt()
    if tell is None:
        yield
        return
    for number, value in _KEPT:
        tell(number, value)
    tell(_ARENA_MAX, 1)
    try:
        yield
    finally:
        tell(_ARENA_MAX, 0)


def _mallopt() -> Callable[[int, int], int] | None:
    """glibc's function; None without glibc."""
    import ctypes

    try:
        library = ctypes.CDLL(None)
        return library.mallopt if hasattr(library, "gnu_get_libc_version") else None
    except (OSError, AttributeError):
        return None


def give_memory_back() -> None:
    """Have the C library give back what was freed and it keeps; glibc's keeps much where many threads allocate."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def reached_limit(error: BaseException) -> OpenQuantError | None:
    """An error that names the limit of this process, such as `ulimit -n`, that caused another; None if none did."""
    for cause in _causes(error):
        found = _limit_behind(cause)
        if found is not None:
            what, hint = found
            if isinstance(error, OpenQuantError):
                what = f"{error.message} ({what})"
            return OpenQuantError(what, hint)
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from, or while handling which."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _limit_behind(error: BaseException) -> tuple[str, str] | None:
    number = error.errno if isinstance(error, OSError) else None
    text = str(error).lower()
    if number in (errno.EMFILE, errno.ENFILE):
        return (
            f"no more files can be opened: {_limits(files=True)}",
            "raise that limit, then run the same command again",
        )
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        return (
            f"no thread can be started: {_limits(processes=True, memory=True)}",
            "raise that limit (in a container also its limit on processes), then run the same command again",
        )
    # What the system's loader says of a library that does not fit has no number.
    unloaded = isinstance(error, (ImportError, OSError)) and ("failed to map" in text or "cannot allocate" in text)
    if isinstance(error, MemoryError) or number == errno.ENOMEM or unloaded:
        return f"memory ran out: {_limits(memory=True)}", "raise that limit, or use fewer --workers"
    return None


def _limits(files: bool = False, processes: bool = False, memory: bool = False) -> str:
    """The limits that are set, as a shell names them: 'ulimit -v is 500000'."""
    kinds = [
        (files, "RLIMIT_NOFILE", "-n", 1),
        (processes, "RLIMIT_NPROC", "-u", 1),
        (memory, "RLIMIT_AS", "-v", 1024),
        (memory, "RLIMIT_DATA", "-d", 1024),
    ]
    found = []
    for asked, name, option, unit in kinds:
        # Not every system has all of them.
        value = resource.getrlimit(getattr(resource, name))[0] if asked and hasattr(resource, name) else -1
        if value not in (-1, resource.RLIM_INFINITY):
            found.append(f"ulimit {option} is {value // unit}")
    return ", ".join(found) or "no limit is set with ulimit, so it is the machine's or the container's"
