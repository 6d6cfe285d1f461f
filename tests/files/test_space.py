"""Room on disk, by file system."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import EXAMPLE
from openquant import Reporter, compress
from openquant.errors import OutputError
from openquant.files.space import require_space

SIZE = 8 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for SIZE bytes."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "openquant", place]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a file system")
    yield place
    subprocess.run(["umount", place], check=True)


def test_needs_on_one_file_system_add_up(disk: Path, tmp_path: Path) -> None:
    half = SIZE // 2
    require_space([(disk / "a/b", half), (disk, half), (tmp_path, half)])
    with pytest.raises(OutputError) as caught:
        require_space([(tmp_path, half), (disk / "a/b", half), (disk, half + 1)])
    assert caught.value.message == f"{disk}/a/b needs {SIZE + 1:,} bytes, its disk has {SIZE:,} free"
    assert caught.value.hint == "free some space, or choose another disk with -o"


class NoPass(Reporter):
    """Refuses that a pass over texts begins."""

    def calibrating(self, about: str) -> None:
        raise AssertionError(about)


RECIPES: list[dict[str, object]] = [
    {"scheme": "int4", "awq": True, "gptq": True},
    {"scheme": "int8", "smooth": 0.5},
    {"activation_scheme": "static"},
    {"scheme": "none", "kv_cache": "fp8", "calibrate": True},
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_small_disk_is_refused_before_texts_are_run(disk: Path, recipe: dict[str, object]) -> None:
    (disk / "filler").write_bytes(bytes(SIZE - (1 << 19)))
    with pytest.raises(OutputError, match=r"out needs [0-9,]+ bytes, its disk has [0-9,]+ free"):
        compress(EXAMPLE, disk / "out", samples=2, length=64, reporter=NoPass(), **recipe)  # type: ignore[arg-type]
    assert [path.name for path in disk.iterdir()] == ["filler"]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_another_directory_is_refused_before_texts_are_run(tmp_path: Path, recipe: dict[str, object]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(OutputError) as caught:
        compress(EXAMPLE, out, samples=2, length=64, reporter=NoPass(), **recipe)  # type: ignore[arg-type]
    assert caught.value.message == f"{out} is not empty and was not made by openquant: it holds mine.txt"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_what_cannot_be_a_directory_is_refused_before_texts_are_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="file/out cannot be written: Not a directory"):
        compress(EXAMPLE, tmp_path / "file" / "out", "int8", smooth=0.5, samples=2, length=64, reporter=NoPass())
