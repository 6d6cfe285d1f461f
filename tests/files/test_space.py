"""Room on disk, by file system."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import EXAMPLE
from openquant import Reporter, Result, compress
from openquant.errors import OutputError
from openquant.files.checkpoint import open_checkpoint
from openquant.files.destination import require_space

SIZE = 16 << 20


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

    def on_note(self, about: str) -> None:
        raise AssertionError(about)


RECIPES: list[dict[str, object]] = [{"scheme": "int4", "awq": True, "gptq": True}, {"scheme": "int8", "smooth": 0.5}]


def test_a_small_disk_is_refused_before_texts_are_run(subtests: pytest.Subtests, disk: Path) -> None:
    for recipe in ({}, {"overwrite": True}, *RECIPES):
        with subtests.test(recipe=recipe):
            texts = {"samples": 2, "length": 64} if recipe in RECIPES else {}

            def run(dry_run: bool, options: dict[str, Any] = {**texts, **recipe}) -> Result:  # noqa: B006
                reporter = Reporter() if dry_run else NoPass()
                return compress(EXAMPLE, disk / "out", dry_run=dry_run, reporter=reporter, **options)

            small = SIZE - (1 << 20)
            (disk / "filler").write_bytes(bytes(small))
            planned = run(dry_run=True)
            with pytest.raises(OutputError) as caught:
                run(dry_run=False)
            needed, free = planned.disk_bytes, SIZE - small
            assert caught.value.message == f"{disk}/out needs {needed:,} bytes, its disk has {free:,} free"
            assert planned.notes[-1] == caught.value.message
            assert [path.name for path in disk.iterdir()] == ["filler"]
            (disk / "filler").unlink()
            assert run(dry_run=True).notes == planned.notes[:-1]


def test_only_what_is_missing_is_needed(tmp_path: Path) -> None:
    whole = compress(EXAMPLE, tmp_path / "out").disk_bytes
    assert compress(EXAMPLE, tmp_path / "out", dry_run=True).disk_bytes == 0
    shard = sorted((tmp_path / "out").glob("*.safetensors"))[1]
    checkpoint = open_checkpoint(tmp_path / "out")
    tensors = sum(
        info.nbytes for name, info in checkpoint.tensors.items() if checkpoint.where[name].shard == shard.name
    )
    shard.unlink()
    assert 0 < tensors < whole
    assert compress(EXAMPLE, tmp_path / "out", dry_run=True).disk_bytes == tensors


def test_long_texts_need_more_than_the_output(disk: Path) -> None:
    """Hidden states lie on the disk while they run; the larger of both is what is said."""
    static: dict[str, Any] = {"activation_scheme": "static", "samples": 64, "length": 512}
    planned = compress(EXAMPLE, disk / "out", dry_run=True, **static)
    with pytest.raises(OutputError) as caught:
        compress(EXAMPLE, disk / "out", reporter=NoPass(), **static)
    assert caught.value.message == f"{disk} needs {planned.disk_bytes:,} bytes, its disk has {SIZE:,} free"
    # Two bytes of each of 256 channels of a token, once.
    assert planned.disk_bytes > 64 * 512 * 256 * 2
    (note,) = [note for note in planned.notes if "disk" in note]
    assert note == caught.value.message
