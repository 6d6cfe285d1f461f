"""Results fit a terminal of 80 columns, and can be read in one of 60: `COLUMNS` says how wide it is."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from conftest import EXAMPLE
from openquant import compress
from openquant.cli.arguments import Parser, verb_parser
from openquant.cli.commands import VERBS, main
from openquant.report.cells import COMMAND, paragraphs
from support import small_checkpoints

WIDTHS = (80, 60)
# Commands to copy, which stay in one line.
COMMANDS = re.compile(r"  +(openquant|vllm|python|eval|sglang) |usage: ")


def too_long(text: str, width: int) -> list[str]:
    """Lines that are longer, but for commands to copy and lines of one word."""
    lines = [line for line in text.splitlines() if len(line) > width and not COMMANDS.match(line)]
    return [line for line in lines if " " in line.strip()]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a source and its output lie, under short names."""
    place = tmp_path_factory.mktemp("widths")
    compress(EXAMPLE, place / "FP8")
    (place / "MODEL").symlink_to(EXAMPLE)
    small_checkpoints.write(place / "moe", "Qwen3MoeForCausalLM")
    return place


COMMANDS_THAT_TELL = [
    "compress MODEL --dry-run -v",
    "compress moe --dry-run --scheme int4",
    "dequantize FP8 --dry-run",
    "diagnose MODEL",
    "fit MODEL",
    "fit MODEL --gpu 2x4090 --context 2k",
    "diagnose moe --scheme int4 -v",
    "explain MODEL **.q_proj",
    "verify FP8 --source MODEL --full",
    "env",
]


def test_no_line_is_longer_than_the_terminal(subtests, converted, monkeypatch, capsys):
    monkeypatch.chdir(converted)

    def printed(command: str, width: int) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(command.split()) == 0
        return capsys.readouterr().out

    def words(text: str) -> set[str]:
        return set(re.findall(r"[\w.{}*-]*[a-z][\w.{}*-]*", text))

    for command in COMMANDS_THAT_TELL:
        wide = printed(command, 1000)
        for width in WIDTHS:
            with subtests.test(command, width=width):
                narrow = printed(command, width)
                assert narrow and not too_long(narrow, width)
                # What is said is the same. Headings and names may stand twice, seconds and memory are of each run.
                assert words(wide) == words(narrow)


def test_help_fits(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    for verb, width in itertools.product(["", *VERBS], WIDTHS):
        with subtests.test(width=width, verb=verb), monkeypatch.context() as patch:
            patch.setenv("COLUMNS", str(width))
            parser = verb_parser()
            if verb:
                [verbs] = [action for action in parser._actions if action.dest == "verb"]
                assert verbs.choices is not None
                parser = verbs.choices[verb]  # type: ignore[call-overload]
            assert isinstance(parser, Parser)
            for shows_all in (False, True):
                parser.shows_all = shows_all
                assert not too_long(parser.format_help(), width)


COMMANDS_IN_TEXT = [
    ("make it again: openquant calibrate MODEL -o FILE; or leave it out", ["openquant calibrate MODEL -o FILE"]),
    ("none: openquant eval out --source S, then push", ["openquant eval out --source S"]),
    ("hint: openquant compress -m DIR --scheme keep -o NEW writes it", ["openquant compress -m DIR --scheme keep -o NEW"]),
    ("it is too old: pip install -U gguf", ["pip install -U gguf"]),
    ("config.json: openquant does not write such a config", []),
]  # fmt: skip


def test_a_command_stays_whole_in_a_sentence() -> None:
    for text, commands in COMMANDS_IN_TEXT:
        assert COMMAND.findall(text) == commands
        for width in range(1, 40):
            lines = paragraphs([text], width)
            assert " ".join(line.strip() for line in lines) == text
            assert all(any(command in line for line in lines) for command in commands)
