"""Files of ours that a command is given beside a model, damaged: calibrations, kept passes, and layers that GPTQ has rounded.
Each kind is a function that damages a file, and gives what reads it.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import damage
from conftest import EXAMPLE
from openquant import OpenQuantError, calibrate, compress
from openquant.files.shardfile import LayerStore
from openquant.streaming import pass_checkpoint
from openquant.streaming.pass_checkpoint import PassCheckpoint
from openquant.weights.statistics import calibrations, read_calibration
from support import small_checkpoints

# Seconds that reading a file may take, beside other work.
SECONDS = 60
# The keys of safetensors metadata under which files of ours have their facts.
CALIBRATION, ROUNDED = "openquant calibration", "openquant rounded"
TEXTS: dict[str, Any] = {"samples": 2, "length": 32}


@dataclass(frozen=True)
class Sound:
    """What is damaged, made once.

    Attributes:
        model: a source with a tokenizer.
        text: what was read for the calibration.
        calibration: of the model.
        part: the passes of that calibration, kept.
        rounded: the layers that a run with --gptq has kept, by name.
    """

    model: Path
    text: Path
    calibration: bytes
    part: bytes
    rounded: Mapping[str, bytes]


@dataclass
class Case:
    """A damaged file in a directory of its own; `done` says what was damaged."""

    rng: random.Random
    sound: Sound
    here: Path
    done: str = ""

    def write(self, name: str, data: bytes) -> Path:
        """Write a file; now and then it becomes something else than a file."""
        path = self.here / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        if self.rng.random() < 0.02:
            self.done += damage._become(self.rng, path)
        return path


def make(root: Path) -> Sound:
    """All that is damaged, below a directory."""
    model = small_checkpoints.write(root / "model", "Qwen3ForCausalLM", vocab=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(EXAMPLE / name, model / name)
    text = root / "some.txt"
    text.write_text("\n".join(f"Line {number} of a text about {number * number}." for number in range(400)))

    with (
        patch.object(pass_checkpoint, "EVERY", 0),
        patch.object(pass_checkpoint, "TIMES", 0),
        patch.object(PassCheckpoint, "remove", lambda _: None),
        patch.object(LayerStore, "remove", lambda _: None),
    ):
        calibration = calibrate(model, root / "x", text=[text], **TEXTS)
        compress(model, root / "rounding", "int4", group_size=32, gptq=True, text=[text], **TEXTS)

    return Sound(
        model,
        text,
        calibration.read_bytes(),
        (root / "x.part").read_bytes(),
        {path.name: path.read_bytes() for path in sorted((root / "rounding.rounded").iterdir())},
    )


class Hung(BaseException):
    """Something took too long."""


def play(rng: random.Random, sound: Sound, here: Path) -> list[str]:
    """One case from beginning to end: something is read, or an OpenQuantError says why not. Returns what did not hold."""
    case = Case(rng, sound, here)
    kind = rng.choice(KINDS)
    read = kind(case)

    def stop(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read()
    except OpenQuantError as error:
        said = error.message.strip() and error.hint.strip()
        return [] if said else [f"{kind.__name__}: an error without words, {case.done}"]
    except (Hung, Exception):
        return [f"{kind.__name__}: {case.done}\n{traceback.format_exc()[-2500:]}"]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return []


# Damage.


def with_facts(data: bytes, kind: str, change: Callable[[str], bytes]) -> bytes:
    """A safetensors file with other facts in its metadata."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"][kind] = change(header["__metadata__"][kind]).decode(errors="replace")
    start = json.dumps(header).encode()
    return len(start).to_bytes(8, "little") + start + data[8 + length :]


NUMBERS = (2e41, 1e308, -1.0, 1e-46, 5e-324, 0, 1 << 31, 1 << 53, 1 << 63, 1 << 64, 10**400, float("nan"), float("inf"))


def damaged_json(rng: random.Random, text: str) -> bytes:
    """JSON text with some of its values changed, most often numbers into other numbers."""
    value = json.loads(text)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        held = damage.places(value) if isinstance(value, (dict, list)) else ()
        numbers = [(outer, key) for outer, key in held if isinstance(outer[key], (int, float))]
        if numbers and rng.random() < 0.5:
            outer, key = rng.choice(numbers)
            outer[key] = rng.choice(NUMBERS)
        else:
            value = damage.change_tree(rng, value)
    return damage.text_of(rng, value)


def raw(rng: random.Random, data: bytes) -> bytes:
    """Bytes cut, extended or changed."""
    changed = bytearray(data)
    way = rng.randrange(4)
    if way == 0:
        del changed[rng.randrange(len(changed) + 1) :]
    elif way == 1:
        changed += rng.choice([b"\0", b"\xff", b"\n", data[:64], b"x" * 4096])
    elif changed:
        for _ in range(rng.choice([1, 4, 64])):
            changed[rng.randrange(min(len(changed), 4096))] ^= 1 << rng.randrange(8)
    return bytes(changed)


# Kinds of files.

Read = Callable[[], object]
ASKING: list[dict[str, Any]] = [
    {"scheme": "channel", "activation_scheme": "static"}, {"scheme": "nvfp4-w4a4"}, {"scheme": "channel", "kv_cache": "fp8"},
    {"scheme": "int4", "group_size": 32, "awq": True}, {"scheme": "int8", "smooth": 0.5},
]  # fmt: skip


def calibration(case: Case) -> Read:
    rng, data = case.rng, case.sound.calibration
    if rng.random() < 0.5:
        path = case.write("x.safetensors", with_facts(data, CALIBRATION, lambda text: damaged_json(rng, text)))
    else:
        path = case.write("x.safetensors", data)
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            case.done += str(rng.choice([damage._header, damage._tensor, damage._bytes])(rng, case.here))

    def read() -> object:
        if path.is_file():
            with suppress(OpenQuantError, OSError), path.open("rb") as file:
                calibrations(lambda digest, stamp: hash((digest, stamp)) == 0).recognizes(file)
        again = read_calibration(path).to_bytes()
        (case.here / "again").write_bytes(again)
        assert read_calibration(case.here / "again").to_bytes() == again
        return compress(case.sound.model, case.here / "out", calibration=path, dry_run=True, **rng.choice(ASKING))

    return read


def passes(case: Case) -> Read:
    sound = case.sound
    path = case.write("x.part", raw(case.rng, sound.part))

    def read() -> None:
        PassCheckpoint(path, {})
        # What runs a model with it takes far longer.
        if case.rng.random() < 0.2:
            calibrate(sound.model, case.here / "x", text=[sound.text], **TEXTS)
            # Nothing is taken from a file whose digest is wrong.
            assert (case.here / "x").read_bytes() == sound.calibration

    return read


def rounded(case: Case) -> Read:
    sound = case.sound.rounded
    folder = case.here / "out.rounded"
    folder.mkdir()
    for name, data in sound.items():
        (folder / name).write_bytes(data)
    damaged = case.rng.choice(sorted(sound))
    case.write(f"out.rounded/{damaged}", raw(case.rng, sound[damaged]))
    case.done += damaged

    layer = next(data for name, data in sound.items() if name.endswith(".safetensors"))
    header = json.loads(layer[8 : 8 + int.from_bytes(layer[:8], "little")])
    about = json.loads(header["__metadata__"][ROUNDED])["about"]

    def read() -> None:
        layers = LayerStore(folder, about)
        layers.claim()
        for number in range(3):
            layers.read(number)

    return read


KINDS: tuple[Callable[[Case], Read], ...] = (calibration, passes, rounded)
