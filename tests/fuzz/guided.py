"""The same damage, guided by what of openquant it reaches: `python tests/fuzz/guided.py`; README.md tells more.

atheris (pip install atheris) counts the lines that a case runs, and keeps those that reach new ones. For that the
command runs in this process, so only what writes nothing does: a dry run and `verify`.
"""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["openquant"]):
    import openquant.api
    import openquant.hub.publish
    import openquant.report.text
    import openquant.verification.verify  # noqa: F401  (imported by the command when it needs it)
    from cases import OPTIONS, SCHEMES, SHM, Base, Outcome, problems, unreadable
    from damage import damage
    from openquant.cli.commands import main
    from run import read_bases


class Choices(random.Random):
    """Random numbers that are the bytes of a case, then zeros."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self.data = io.BytesIO(data)

    def getrandbits(self, k: int) -> int:
        size = (k + 7) // 8
        return int.from_bytes(self.data.read(size).ljust(size, b"\0"), "little") >> (8 * size - k)

    def random(self) -> float:
        return self.getrandbits(16) / (1 << 16)


def play(data: bytes, bases: list[Base], here: Path) -> None:
    """One case; what does not hold is an exception, which atheris reports with the bytes that led to it."""
    rng = Choices(data)
    base = rng.choice(bases)
    root = here / "model"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(base.root, root)
    damage(rng, root)
    if base.source is not None and rng.random() < 0.7:
        words = ["verify", str(root), *(["--source", str(base.source)] if rng.random() < 0.5 else [])]
    else:
        words = [
            "compress",
            "-m",
            str(root),
            "-o",
            str(here / "output"),
            "--dry-run",
            *rng.choice(SCHEMES),
            *rng.choice(OPTIONS),
        ]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words)
    found = problems(Outcome(code, out.getvalue(), err.getvalue(), 0.0, 0), words)
    if words[0] == "verify" and code == 0 and (broken := unreadable(root)):
        found.append(f"verify finds no problem, safetensors does: {broken}")
    if found:
        raise AssertionError(f"openquant {' '.join(words)}: {'; '.join(found)}\n{err.getvalue()}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="openquant-fuzz-", dir=SHM) as place:
        bases = read_bases(Path(place) / "bases")
        atheris.Setup([*sys.argv, "-timeout=20", "-rss_limit_mb=2048"], lambda data: play(data, bases, Path(place)))
        atheris.Fuzz()
