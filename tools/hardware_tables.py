"""Print the tables of docs/engines.md, and that of README.md and docs/how-to/which-scheme.md: which scheme to take.

    python tools/hardware_tables.py

tests/formats/test_hardware.py requires that the documents have them as they are printed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from openquant.diagnosis.result import Measurement, advise
from openquant.formats.hardware import ENGINES, HARDWARE, Kernel, find_kernel
from openquant.formats.schemes import SCHEMES

# Cards that people have, by hardware.
CARDS = {
    "Turing": "T4",
    "Ampere": "RTX 30, A100",
    "Ada": "RTX 40, L4, L40S",
    "Hopper": "H100, H200",
    "Blackwell": "RTX 50, B200",
    "MI300": "MI300X",
    "RDNA 4": "RX 9000, R9700",
    "RDNA 3": "RX 7900",
    "CPU": "CPU",
}
MARKS = "¹²³⁴⁵⁶⁷⁸⁹"
# What mlx-lm does with outputs of its class of DeepSeek V3 and Kimi K2, by scheme (benchmarks/mlx_reads.py); it refuses
# the schemes that are not here, and outputs of its other classes. This one class reads packed codes, all as if they had
# four bits, and drops scales that it does not know (mlx_lm/models/deepseek_v3.py:398-412).
MLX_LM_VERSION = "mlx-lm 0.32.2"
MLX_LM = {
    "tensor": "misread",
    "block": "read",
    "int4": "read",
    **dict.fromkeys(("int6", "int5", "int3", "int2"), "misread"),
}


def main() -> None:
    """Print all tables."""
    print("\n\n".join([*(engine_table(engine) for engine in ENGINES), library_table(), advice_table()]))


def advice_table() -> str:
    """Which scheme to take in vLLM, by card: a Markdown table with a row for all hardware that has the same advice."""

    def cell(measured: Measurement | None, hardware: str) -> str:
        if measured is None:
            return "-"
        kernel = find_kernel("vLLM", measured.scheme.name, hardware)
        assert kernel is not None
        needs = f", with {kernel.needs}" if kernel.needs else ""
        return f"`{measured.options.removeprefix('--scheme ')}` ({kernel.arithmetic}, {measured.kl:.3f}{needs})"

    rows: dict[tuple[str, ...], list[str]] = {}
    for hardware in HARDWARE:
        kernels = {name: find_kernel("vLLM", name, hardware) for name in SCHEMES}
        computed = {SCHEMES[name]: {kernel.arithmetic} for name, kernel in kernels.items() if kernel}
        eight = advise({scheme.name: computed[scheme] for scheme in computed if scheme.format.number.bits == 8})
        four = advise({scheme.name: computed[scheme] for scheme in computed if scheme.format.number.bits == 4})
        cells = tuple(cell(one, hardware) for one in (*eight, four[1]))
        rows.setdefault(cells, []).append(CARDS[hardware])

    head = ("card", "8 bits, fastest", "8 bits, closest", "if 8 bits do not fit")
    lines = [(", ".join(cards), *cells) for cells, cards in rows.items()]
    return "\n".join(
        [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(line)} |" for line in lines)]
    )


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
