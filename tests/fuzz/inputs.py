"""Files that a command is given beside a model, damaged: calibrations, kept passes, layers that GPTQ has rounded, recipes,
texts, prompts and evaluations. Each kind is a function that damages a file, and gives what reads it.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import damage
from conftest import EXAMPLE
from openquant import OpenQuantError, calibrate, compress
from openquant.data.corpus import read_corpus
from openquant.data.domains import read_prompts
from openquant.data.tokenizer import load_tokenizer
from openquant.files.cards import read_evaluation
from openquant.files.checkpoint import Fingerprint, open_checkpoint, readable
from openquant.files.shardfile import LayerStore
from openquant.options import CalibrationTexts
from openquant.recipes import read_recipe
from openquant.report.card import evaluated_card
from openquant.streaming import pass_checkpoint
from openquant.streaming.pass_checkpoint import PassCheckpoint
from openquant.weights.statistics import calibrations, read_calibration
from support import small_checkpoints
from support.evaluation_files import evaluation as sound_evaluation

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
        evaluation: of an output.
    """

    model: Path
    text: Path
    calibration: bytes
    part: bytes
    rounded: Mapping[str, bytes]
    evaluation: dict[str, Any]


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
        sound_evaluation(Fingerprint(open_checkpoint(root / "rounding")).hexdigest()),
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


OPTIONS: dict[str, Any] = {
    "scheme": "int4", "group_size": "32", "awq": True, "smooth": 0.5, "ignore": ["**.o_proj", "lm_head"], "samples": 2,
    "scheme_for": {"**.down_proj": "channel"}, "text": ["some.txt"], "architecture": "generic", "format": "compressed-tensors",
}  # fmt: skip


def recipe(case: Case) -> Read:
    names = case.rng.sample(sorted(OPTIONS), case.rng.randint(1, 4))
    value: Any = {"format": 1, "openquant": "0.1.0", "options": {name: OPTIONS[name] for name in names}}
    if case.rng.random() < 0.3:
        value = {"done": True, "files": [], "recipe": value}
    data = damaged_json(case.rng, json.dumps(value))
    path = case.write("recipe.json", data)
    case.done += repr(data[:300])
    return lambda: read_recipe(path)


ROWS: list[Any] = [
    {"text": "A text of some words, which is long enough. " * 20}, {"prompt": "Why?"},
    {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is a test."}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}]}], "text": None},
]  # fmt: skip
LINES = [
    "A line of text that is as long as lines of texts are, more or less.", "", " ", "\0", "\x1b[31mred\x1b[0m", "é" * 50,
    "\u202e", "\ud800", "x" * 5000, "{", "[" * 2000, "<|endoftext|>", "\r", "\ufeff", "\u2028", "\x85", "\t", "{{ 1 }}",
]  # fmt: skip


def written(case: Case) -> Path:
    """A text or JSON lines, damaged."""
    rng = case.rng
    is_json = rng.random() < 0.6
    lines: list[bytes] = []
    for _ in range(rng.choice([0, 1, 3, 30])):
        if is_json:
            row = copy.deepcopy(rng.choice(ROWS))
            lines.append(damaged_json(rng, json.dumps(row)) if rng.random() < 0.3 else json.dumps(row).encode())
        else:
            lines.append(rng.choice(LINES).encode(errors="surrogatepass"))
    data = rng.choice([b"\n", b"\n", b"\r\n", b""]).join(lines)
    data = raw(rng, data) if rng.random() < 0.3 else data
    case.done += repr(data[:300])
    return case.write("given.jsonl" if is_json else "given.txt", data)


@cache
def tokenizer_of(model: Path) -> Any:
    """The tokenizer of a model that does not change, loaded once."""
    return load_tokenizer(model, "model")


def text(case: Case) -> Read:
    path, tokenizer = written(case), tokenizer_of(case.sound.model)
    asked = CalibrationTexts(text=[path], samples=case.rng.choice([1, 2, 5]), length=case.rng.choice([2, 8, 32]))
    purpose = case.rng.choice(["evaluation", "calibration"])
    return lambda: read_corpus(asked, tokenizer, purpose, 2048)


def prompts(case: Case) -> Read:
    path, tokenizer = written(case), tokenizer_of(case.sound.model)
    return lambda: read_prompts(path, tokenizer, 2048)


def evaluation(case: Case) -> Read:
    case.write("output/eval.json", damaged_json(case.rng, json.dumps(case.sound.evaluation)))

    def read() -> object:
        with readable():
            values = read_evaluation(case.here / "output")
        return evaluated_card("# x\n", "a/b", values)

    return read


KINDS: tuple[Callable[[Case], Read], ...] = (calibration, passes, rounded, recipe, text, prompts, evaluation)
