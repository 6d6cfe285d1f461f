"""What a bug report needs of this machine: versions, CPU, GPUs and which loops compute. It has no paths."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib import metadata
from typing import Any

from .machine import available_cpus, available_memory, first_line
from .version import BUILT, __version__

# What openquant computes, reads and writes with.
LIBRARIES = (
    *("torch", "transformers", "safetensors", "huggingface_hub", "accelerate", "numpy", "numba", "compressed-tensors"),
    *("gguf", "lm-eval", "datasets", "matplotlib"),
)
ENGINES = ("vllm", "sglang")
# Instructions that kernels ask for, as Linux names them; Arm's come last.
_INSTRUCTIONS = ("avx2", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16")
_SETTINGS = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE")


def describe_environment() -> dict[str, Any]:
    """Return what matters of this machine, as `openquant env --json` prints it (docs/json.md).

    Returns:
        Versions of openquant, Python, libraries and engines, None for those that are not installed; the CPU, its
        instructions and memory in bytes; the GPUs that torch finds; the module that compiles the loops over the weights
        of large models; and environment variables that change what runs.
    """
    return {
        "openquant": __version__,
        "commit": BUILT.partition("+g")[2].partition(".")[0] or None,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": available_cpus(),
        "cpu": _cpu("model name") or platform.processor() or None,
        "instructions": [name for name in _INSTRUCTIONS if name in (_cpu("flags") or _cpu("Features") or "").split()],
        "memory": available_memory(),
        "gpus": _gpus(),
        "loops": _loops(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "engines": {name: _version(name) for name in ENGINES},
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
    }


def _version(distribution: str) -> str | None:
    if distribution == "torch":
        # The package's own version tells the build, such as 2.13.0+cu130.
        with suppress(ImportError, OSError):
            import torch

            return str(torch.__version__)
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return None


def _cpu(key: str) -> str | None:
    """A line of /proc/cpuinfo about the first CPU that has it; None elsewhere than on Linux."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return None


def _gpus() -> list[dict[str, Any]] | str:
    """Name, memory and compute capability of each GPU that torch finds; the error if it cannot say."""
    try:
        import torch

        found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    except Exception as error:  # torch raises whatever its driver does
        return first_line(error)
    return [{"name": gpu.name, "memory": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"} for gpu in found]


def _loops() -> str:
    from .convert.conversion import loops
    from .formats import kernels

    return "numpy" if loops(True) is kernels else "numba"
