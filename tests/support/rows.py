"""One test of all rows of a table: as pytest.mark.parametrize has it, but a single case whose rows are its subtests."""

from __future__ import annotations

import inspect
import itertools
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

Test = Callable[..., None]


def for_each(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Call a test with every row; several of these with every combination.

    A row has a `monkeypatch` and a `tmp_path` of its own: a copy, with what fixtures made there. Other fixtures are shared.

    Args:
        names: the parameters that a row gives; of a single one, rows are its values.
        rows: the rows, in order.
    """

    def decorate(test: Test) -> Test:
        one = isinstance(names, str)
        column = [{names: row} if one else dict(zip(names, row, strict=True)) for row in rows]
        row_of, columns = getattr(test, "row_of", test), [column, *getattr(test, "columns", [])]

        @wraps(row_of)
        def run(subtests: pytest.Subtests, **fixtures: Any) -> None:
            for number, parts in enumerate(itertools.product(*columns)):
                row = {name: value for part in parts for name, value in part.items()}
                with subtests.test(**{name: _told(value) for name, value in row.items()}):
                    _run(row_of, number, {**fixtures, **row})

        given = {name for part in columns for name in part[0]}
        signature = inspect.signature(row_of)
        kept = [each for name, each in signature.parameters.items() if name not in given]
        kept.append(inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY))
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        run.row_of, run.columns = row_of, columns  # type: ignore[attr-defined]
        return run

    return decorate


def _run(row_of: Test, number: int, arguments: dict[str, Any]) -> None:
    shared: Path | None = arguments.get("tmp_path")
    if shared is None:
        _patched(row_of, arguments)
        return
    own = shared.parent / f"{shared.name}-row{number}"
    shutil.copytree(shared, own, symlinks=True)
    below = {name: value for name, value in arguments.items() if isinstance(value, Path) and shared in value.parents}
    moved = {name: own / value.relative_to(shared) for name, value in below.items()}
    try:
        _patched(row_of, {**arguments, **moved, "tmp_path": own})
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _patched(row_of: Test, arguments: dict[str, Any]) -> None:
    if "monkeypatch" not in arguments:
        row_of(**arguments)
        return
    with arguments["monkeypatch"].context() as patch:
        row_of(**{**arguments, "monkeypatch": patch})


def _told(value: Any) -> Any:
    """What names a row where it failed."""
    return getattr(value, "suffix", None) or getattr(value, "name", None) or value
