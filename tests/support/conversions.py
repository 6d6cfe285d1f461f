"""Small models and what is made of them, each once for all tests that only read them."""

from __future__ import annotations

import shutil
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

from conftest import everything
from openquant import Result, compress
from openquant.formats.schemes import INTEGER_GROUPS, VARIANTS, Scheme
from openquant.models import MODELS
from openquant.patterns import compile_pattern
from support import small_checkpoints

Stamps = dict[Path, tuple[int, int, int]]


class Converted(NamedTuple):
    """A source, the directory made of it, and what `compress` said."""

    source: Path
    output: Path
    result: Result


def asking(scheme: Scheme) -> dict[str, str | None]:
    """The options that ask for a scheme."""
    return {
        "scheme": scheme.name,
        "format": scheme.method,
        "scale_format": scheme.scale_format,
        "group_size": scheme.group_size,
    }


def experts_of(architecture: str) -> list[str]:
    """Patterns of what its experts are in, one by one or in stacks, which may lie beside them."""
    model = MODELS[architecture]
    modules = [
        name.rpartition(".")[0] if name.endswith(".weight") else name for name in small_checkpoints.shapes(architecture)
    ]
    stacks = (f"{one.place}.{held.name}" for one in model.experts for held in one.stacked)
    found = [*map(model.absolute, (f"{one.path}.**" for one in model.experts)), *map(model.absolute, stacks)]
    return [pattern for pattern in dict.fromkeys(found) if any(map(compile_pattern(pattern).fullmatch, modules))]


@cache
def walks() -> dict[str, tuple[Scheme, ...]]:
    """The schemes that each architecture is converted to.

    In a usual run that is one each: of those it can be served in, the one that was taken least among dense models, or
    among mixtures of experts. At night it is also the default, two more in turn, and one of 5 or 6 bits.
    """
    taken: Counter[tuple[bool, Scheme]] = Counter()
    found: dict[str, tuple[Scheme, ...]] = {}
    for number, name in enumerate(small_checkpoints.ARCHITECTURES):
        mixture = bool(MODELS[name].experts)
        served = [scheme for scheme in VARIANTS if small_checkpoints.refused(name, scheme) is None]
        least = min(served, key=lambda scheme: taken[mixture, scheme])
        taken[mixture, least] += 1
        found[name] = (least,)
        if everything():
            turn = [*served[2 * number % len(served) :], *served][:2]
            width = INTEGER_GROUPS[5 + number % 2][0]
            found[name] = tuple(dict.fromkeys((served[0], least, *turn, *({width} & {*served}))))
    return found


class Shelf:
    """Sources and outputs below one directory, made when they are first asked for. They are read, never written to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: dict[tuple[str, int, str], Converted] = {}
        self._stamps: dict[Path, Stamps] = {}
        self._lent: set[Path] = set()

    def source(self, architecture: str, shards: int = 3) -> Path:
        """The model that small_checkpoints.write makes of this architecture."""
        path = self.root / f"{architecture}-{shards}" / "source"
        if path not in self._stamps:
            self._keep(small_checkpoints.write(path, architecture, shards=shards))
        self._lent.add(path)
        return path

    def converted(self, architecture: str, scheme: Scheme, shards: int = 3) -> Converted:
        """What a scheme makes of it; experts stay as they are where engines do not load them in that scheme."""
        source = self.source(architecture, shards)
        key = (architecture, shards, scheme.suffix)
        if key not in self._made:
            output = source.parent / f"source{scheme.suffix}"
            ignore = [] if scheme.expert_engines else experts_of(architecture)
            result = compress(source, output, **asking(scheme), ignore=ignore)
            self._keep(output)
            self._made[key] = Converted(source, output, result)
        found = self._made[key]
        self._lent.add(found.output)
        return found

    def copied(self, architecture: str, scheme: Scheme, target: Path, shards: int = 1) -> tuple[Path, Path]:
        """Copies of both for a test that changes them: `source` and `out` below `target`."""
        found = self.converted(architecture, scheme, shards)
        copies = target / "source", target / "out"
        for path, copy in zip((found.source, found.output), copies, strict=True):
            shutil.copytree(path, copy, copy_function=shutil.copyfile)
            copy.chmod(0o755)
        return copies

    def _keep(self, path: Path) -> None:
        for each in (*path.rglob("*"), path):
            each.chmod(0o555 if each.is_dir() else 0o444)
        self._stamps[path] = _stamps(path)

    def check(self) -> None:
        """What was asked for since the last check is as it was made: root may write wherever it likes."""
        lent, self._lent = self._lent, set()
        changed = [str(path) for path in sorted(lent) if _stamps(path) != self._stamps[path]]
        assert not changed, f"a test wrote to what others read too: {', '.join(changed)}"

    def clear(self) -> None:
        """Remove all."""
        for path in self._stamps:
            path.chmod(0o755)
        shutil.rmtree(self.root)


def _stamps(path: Path) -> Stamps:
    found = {each: each.stat() for each in (path, *path.rglob("*"))}
    return {each: (stat.st_mtime_ns, stat.st_size, stat.st_ino) for each, stat in found.items()}
