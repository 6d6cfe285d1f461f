"""Figures and tables as text: what cells of reports say. It imports nothing of other rooms."""

from __future__ import annotations

from collections.abc import Container, Sequence


def gigabytes(nbytes: int) -> str:
    """Format a number of bytes with three digits: "1.24 GB", "8.4 MB".

    Args:
        nbytes: the number of bytes; units are powers of 1000.
    """
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 1000 * size else f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes} B"


def per_cent(part: int, whole: int) -> str:
    """Format a part of a whole: "62.5 %"; "-" if the whole is 0.

    Args:
        part: number of bytes, or of other things.
        whole: number of all of them.
    """
    return f"{100 * part / whole:.3g} %" if whole else "-"


def shortened(text: str, most: int) -> str:
    """Return the first characters of a text, with three dots if there are more.

    Args:
        text: any text.
        most: number of characters to keep, without the dots.
    """
    return text if len(text) <= most else f"{text[:most]}..."


def short(count: int) -> str:
    """Format a count, rounded down: "831", "16k", "1.2M".

    Args:
        count: a number of things, 0 or more; k is 1000.
    """
    for unit, size in (("M", 10**6), ("k", 1000)):
        if count >= size:
            return f"{count // size}{unit}" if count >= 10 * size else f"{count * 10 // size / 10:g}{unit}"
    return str(count)


def table(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """Align the columns of a table.

    Args:
        rows: the cells of each row, all rows of equally many.
        left: indices of the columns that are aligned to the left; the others are to the right.

    Returns:
        A line for each row, without spaces at its end.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
