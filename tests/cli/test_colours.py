"""On a terminal what is said is coloured and wrapped; elsewhere it is neither."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from conftest import EXAMPLE, ROOT
from openquant import compress
from openquant.cli.commands import main

COLOURED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", re.DOTALL)
LONG = ["verify", str(EXAMPLE)]
ERROR = [
    f"error: {EXAMPLE} is not quantized: its config.json has no quantization_config",
    "hint: give a quantized directory, and with --source the model that it was made from; openquant diagnose MODEL checks "
    "unquantized weights, and openquant eval A --source B compares the answers of two models",
]


def on_terminal(*words: str, columns: int = 80, **environment: str) -> str:
    """What a command shows on a terminal, its last bar left out."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    settings = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    streams = {"stdin": subprocess.DEVNULL, "stdout": follower, "stderr": follower}
    command = [sys.executable, "-m", "openquant", *words]
    with subprocess.Popen(command, **streams, cwd=ROOT, env={**settings, **environment}):  # type: ignore[call-overload]
        os.close(follower)
        shown = b""
        while piece := _read(leader):
            shown += piece
    os.close(leader)
    return shown.decode().replace("\r\n", "\n").rpartition("\r")[2]


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 1 << 16)
    except OSError:
        # Nobody writes to it any more.
        return b""


def test_what_counts_is_coloured_on_a_terminal(tmp_path: Path) -> None:
    output = tmp_path / "out"
    compress(EXAMPLE, output)
    assert COLOURED.findall(on_terminal(*LONG, columns=200)) == [
        "error:", "hint:", "openquant diagnose MODEL", "openquant eval A --source B"
    ]  # fmt: skip
    assert COLOURED.findall(on_terminal("verify", str(output))) == ["no problems:", "note:"]


def test_no_colour_where_nobody_sees_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in on_terminal(*LONG, NO_COLOR="1", FORCE_COLOR="1")

    assert main(LONG) == 2
    assert capsys.readouterr().err.splitlines() == ERROR
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(LONG) == 2
    assert COLOURED.sub(r"\1", capsys.readouterr().err).splitlines() == ERROR
    # What programs read has none.
    assert main([*LONG, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["hint"] == ERROR[1].removeprefix("hint: ")
    assert main(["completion", "bash"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_what_is_said_is_wrapped_on_a_terminal() -> None:
    lines = on_terminal(*LONG, columns=60, NO_COLOR="1").splitlines()
    assert all(len(line) <= 60 or " " not in line.strip() for line in lines)
    assert " ".join(line.strip() for line in lines) == " ".join(ERROR)
    assert any("openquant eval A --source B" in line for line in lines)
