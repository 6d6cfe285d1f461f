"""The result of `openquant env`, as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .cells import gigabytes, table
from .escape import join_lines


def environment_text(found: Mapping[str, Any], width: int | None = None) -> str:
    """Format what `describe_environment()` returns: a line for each fact.

    Args:
        found: its result.
        width: the most characters of a line; None for any number.
    """
    gpus = found["gpus"]
    if not isinstance(gpus, str):
        described = (f"{gpu['name']}, {gigabytes(gpu['memory'])}, capability {gpu['capability']}" for gpu in gpus)
        gpus = "; ".join(described) or "none"
    commit = f" ({found['commit']})" if found["commit"] else ""
    rows = [
        ("openquant", f"{found['openquant']}{commit}"),
        ("Python", f"{found['python']}, {found['system']}"),
        ("CPU", f"{found['cpus']} of {found['cpu'] or 'unknown'}: {', '.join(found['instructions'])}"),
        ("memory", f"{gigabytes(found['memory'])} available"),
        ("GPUs", gpus),
        ("loops", f"{found['loops']}, for large models" if found["loops"] == "numba" else found["loops"]),
        *((name, version or "not installed") for name, version in {**found["libraries"], **found["engines"]}.items()),
        *found["settings"].items(),
    ]
    return join_lines(table(rows, left=(0, 1), width=width))
