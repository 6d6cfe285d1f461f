"""About how long a conversion will take, from what was measured (benchmarks/README.md)."""

from __future__ import annotations

from ..report.cells import gigabytes
from ..streaming.forecast import spoken

# Processor seconds for a gigabyte of the source: --scheme tensor or block; nvfp4 and mxfp4; int2 to int7.
_FLOATS, _FP4, _INTEGERS = 0.8, 6.2, 10.0
# With --gptq 1.2 GB took 429 processor seconds; AWQ takes as long. An evaluation has fewer texts.
_CALIBRATED, _EVALUATED = 360.0, 90.0


def processor_seconds(source_bytes: int, scheme: str, calibrated: bool, evaluated: bool = False) -> float:
    """Say about how much processor time a conversion takes, in seconds.

    Args:
        source_bytes: size of the source's tensors.
        scheme: the scheme of most layers; "" for a mixture, which is measured first.
        calibrated: whether texts run through the model.
        evaluated: whether the output is evaluated.
    """
    cost = _FP4 if "fp4" in scheme else _INTEGERS if scheme.startswith("int") and scheme[3:4] != "8" else _FLOATS
    cost = _INTEGERS if not scheme else cost
    cost += _CALIBRATED * (calibrated or not scheme) + _EVALUATED * evaluated
    return cost * source_bytes / 1e9


def forecast(source_bytes: int, scheme: str, calibrated: bool, evaluated: bool, cpus: int, download: bool) -> str:
    """Say about how long a conversion takes.

    Args:
        source_bytes: size of the source's tensors.
        scheme: the scheme of most layers; "" for a mixture, which is measured first.
        calibrated: whether texts run through the model.
        evaluated: whether the output is evaluated.
        cpus: CPUs that work.
        download: whether the source is on the Hub.
    """
    seconds = processor_seconds(source_bytes, scheme, calibrated, evaluated) / max(1, cpus)
    network = f", and the time to download {gigabytes(source_bytes)}" if download else ""
    return f"About {spoken(seconds)} on the {cpus} CPUs of this machine{network}. This is a rough forecast."
