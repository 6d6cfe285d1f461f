"""Print the tables of docs/engines.md that say on which GPUs engines compute each scheme, from openquant/formats.

    python tools/hardware_tables.py

tests/formats/test_hardware.py requires that the document has them as they are printed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from openquant.formats.hardware import ENGINES, HARDWARE, MLX_LM, MLX_LM_VERSION, Kernel, find_kernel
from openquant.formats.schemes import SCHEMES

MARKS = "¹²³⁴⁵⁶⁷⁸⁹"


def main() -> None:
    """Print all tables."""
    print("\n\n".join([*(engine_table(engine) for engine in ENGINES), library_table()]))


def engine_table(engine: str) -> str:
    """What one engine does with each scheme on each hardware; schemes that are alike have one row.

    Args:
        engine: one of ENGINES.

    Returns:
        A Markdown table, and a line on what its marks mean.
    """
    needs: list[str] = []

    def named(kernel: Kernel | None) -> str | None:
        if kernel is None:
            return None
        if kernel.needs is None:
            return kernel.arithmetic
        if kernel.needs not in needs:
            needs.append(kernel.needs)
        return f"{kernel.arithmetic} {MARKS[needs.index(kernel.needs)]}"

    def cell(scheme: str, hardware: str) -> str:
        dense, experts = (find_kernel(engine, scheme, hardware, experts) for experts in (False, True))
        of_dense, of_experts = named(dense), named(experts)
        if of_dense == of_experts:
            return of_dense or "no"
        if of_experts is None:
            return f"{of_dense}, no experts"
        return f"{of_dense or 'no'}; experts {of_experts}"

    text = table([engine, *HARDWARE], lambda scheme: [cell(scheme, hardware) for hardware in HARDWARE])
    given = "; ".join(f"{mark} with {need}" for mark, need in zip(MARKS, needs, strict=False))
    return f"{text}\n\n{given}." if needs else text


def library_table() -> str:
    """What libraries do with each scheme: a Markdown table."""

    def cells(name: str) -> list[str]:
        scheme = SCHEMES[name]
        experts = "yes, no experts" if scheme.transformers_experts else "yes"
        return ["no" if scheme.transformers else experts, MLX_LM.get(name, "refused")]

    return table(["", "transformers", f"{MLX_LM_VERSION}, DeepSeek V3's class"], cells)


def table(head: Iterable[str], cells: Callable[[str], list[str]]) -> str:
    """A Markdown table with a row for each scheme, or for several that have the same cells.

    Args:
        head: the first row.
        cells: of a scheme's name, all cells but the first.
    """
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in SCHEMES:
        rows.setdefault(tuple(cells(name)), []).append(f"`{name}`")
    head = list(head)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join([', '.join(names), *found])} |" for found, names in rows.items())])


if __name__ == "__main__":
    main()
