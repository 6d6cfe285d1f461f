"""What run_inputs.py plays: files that a command is given beside a model, damaged. Calibrations, kept passes, layers
that GPTQ has rounded, recipes, texts, prompts, evaluations, and paths of files to write.

Each kind is a function that damages a file, and gives what reads it, a command, and what must hold after that.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import damage
from cases import run

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "tiny-qwen3"
SHARD = "model.safetensors"
TEXTS = ("--samples", "2", "--length", "32")
# Seconds after which a command hangs, beside other work.
WAITED = 100
# The keys of safetensors metadata under which files of ours have their facts.
CALIBRATION, ROUNDED = "openquant calibration", "openquant rounded"


@dataclass(frozen=True)
class Sound:
    """What is damaged, made once.

    Attributes:
        model: a source with a tokenizer.
        output: an output of it.
        text: a text that commands read where another file is damaged.
        calibration: of the model, with that text.
        part: the passes of that calibration, kept.
        rounded: OUTPUT.rounded of a run with --gptq.
        shard: the output of that run.
        evaluation: of the output.
    """

    model: Path
    output: Path
    text: Path
    calibration: bytes
    part: bytes
    rounded: Mapping[str, bytes]
    shard: bytes
    evaluation: dict[str, Any]

    @property
    def texts(self) -> list[str]:
        """The options that say what is read."""
        return ["--text", str(self.text), *TEXTS]


@dataclass
class Case:
    """A damaged file in a directory of its own.

    Attributes:
        rng: chooses.
        sound: what is damaged.
        here: the directory, where commands run.
        runs: whether a command is run, which needs whole models.
        done: what was damaged.
    """

    rng: random.Random
    sound: Sound
    here: Path
    runs: bool
    done: list[str] = field(default_factory=list)

    def copy(self, model: Path, name: str) -> Path:
        """A copy of a model; of its files only config.json and the beginning of its weights where no command is run."""
        if self.runs:
            return Path(shutil.copytree(model, self.here / name))
        (self.here / name).mkdir()
        for each in ("config.json", "model.safetensors"):
            with (model / each).open("rb") as file:
                (self.here / name / each).write_bytes(file.read(4096))
        return self.here / name

    def write(self, name: str, data: bytes) -> Path:
        """Write a file; now and then it becomes something else than a file."""
        path = self.here / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        if self.rng.random() < 0.02:
            self.done.append(damage._become(self.rng, path))
        return path


# What is damaged.


def make(root: Path) -> Sound:
    """All of it, below a directory."""
    from openquant import calibrate, compress
    from openquant.files.checkpoint import Fingerprint, open_checkpoint
    from openquant.files.shardfile import LayerStore
    from openquant.streaming import pass_checkpoint
    from support import small_checkpoints
    from support.evaluation_files import evaluation

    model = small_checkpoints.write(root / "model", "Qwen3ForCausalLM", vocab=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(EXAMPLE / name, model / name)
    text = root / "some.txt"
    text.write_text("\n".join(f"Line {number} of a text about {number * number}." for number in range(400)))
    texts: dict[str, Any] = {"text": [text], "samples": 2, "length": 32}
    with (
        patch.object(pass_checkpoint, "EVERY", 0),
        patch.object(pass_checkpoint, "TIMES", 0),
        patch.object(pass_checkpoint.PassCheckpoint, "remove", lambda _: None),
        patch.object(LayerStore, "remove", lambda _: None),
    ):
        calibration = calibrate(model, root / "x", **texts)
        compress(model, root / "rounding", "int4", group_size=32, gptq=True, **texts)
    compress(model, root / "output", "int4", group_size=32)
    return Sound(
        model,
        root / "output",
        text,
        calibration.read_bytes(),
        (root / "x.part").read_bytes(),
        {path.name: path.read_bytes() for path in sorted((root / "rounding.rounded").iterdir())},
        (root / "rounding" / SHARD).read_bytes(),
        evaluation(Fingerprint(open_checkpoint(root / "output")).hexdigest()),
    )


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a directory, by name; of what is too large to be read its size."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        if (size := path.stat().st_size) <= damage.MOST
        else b"%d" % size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def damaged_file(case: Case, data: bytes, kind: str) -> bytes:
    """A safetensors file with its bytes, its header, its tensors or the facts in its metadata damaged."""
    way = case.rng.random()
    if way < 0.5:
        return with_facts(data, kind, lambda text: damaged_json(case.rng, text))
    with tempfile.TemporaryDirectory(dir=case.here) as name:
        path = Path(name) / "x.safetensors"
        path.write_bytes(data)
        for _ in range(case.rng.choice([1, 1, 2])):
            try:
                case.done.append(str(case.rng.choice(WAYS)(case.rng, Path(name))))
            except (ValueError, KeyError, TypeError, AttributeError):
                # An earlier damage left nothing that this one understands.
                case.done.append("nothing")
        return path.read_bytes() if path.is_file() else b""


WAYS = [damage._header, damage._metadata, damage._tensor, damage._tensor, damage._tensor, damage._bytes]


def with_facts(data: bytes, kind: str, change: Callable[[str], str | bytes]) -> bytes:
    """A safetensors file with other facts in its metadata."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = change(header["__metadata__"][kind])
    header["__metadata__"][kind] = text.decode(errors="replace") if isinstance(text, bytes) else text
    start = json.dumps(header).encode()
    return len(start).to_bytes(8, "little") + start + data[8 + length :]


NUMBERS = (2e41, 1e308, -1.0, 1e-46, 5e-324, 0, 1 << 31, 1 << 53, 1 << 63, 1 << 64, 10**400, float("nan"), float("inf"))


def damaged_json(rng: random.Random, text: str) -> bytes:
    """JSON text with some of its values changed, most often numbers into other numbers."""
    value = json.loads(text)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        numbers = [
            (outer, key)
            for outer, key in (damage.places(value) if isinstance(value, (dict, list)) else ())
            if isinstance(outer[key], (int, float))
        ]
        if numbers and rng.random() < 0.5:
            outer, key = rng.choice(numbers)
            outer[key] = rng.choice(NUMBERS)
        else:
            value = damage.change_tree(rng, value)
    return damage.text_of(rng, value)


# Kinds of cases: each damages a file, and gives what reads it and a command.


class Trial(NamedTuple):
    """What is done with a damaged file.

    Attributes:
        read: calls what reads it.
        words: a command that does.
        holds: what must hold besides once the command has ended with that code; nothing if all does.
        makes: files below the case's directory that the command may make or change.
    """

    read: Callable[[], object]
    words: list[str]
    holds: Callable[[int], str | None]
    makes: tuple[str, ...]


def _verifies(case: Case) -> Callable[[int], str | None]:
    def holds(code: int) -> str | None:
        if code or not (case.here / "out").exists():
            return None
        checked = run(["verify", "out"], case.here, WAITED)
        return None if checked.code == 0 else f"verify of the output: {checked.code} {checked.out[-300:]}{checked.err}"

    return holds


OUTPUT = ("out", "out.rounded", "model.calibration.safetensors", "model.calibration.safetensors.part")
ASKING = [
    {"scheme": "channel", "activation_scheme": "static"}, {"scheme": "nvfp4-w4a4"}, {"scheme": "channel", "kv_cache": "fp8"},
    {"scheme": "int4", "group_size": 32, "awq": True}, {"scheme": "int8", "smooth": 0.5}, {"scheme": "none", "kv_cache": "fp8"},
]  # fmt: skip


def calibration(case: Case) -> Trial:
    from openquant import OpenQuantError, compress
    from openquant.recipes import option_words
    from openquant.weights.statistics import calibrations, read_calibration

    path = case.write("x", damaged_file(case, case.sound.calibration, CALIBRATION))
    asked = dict(case.rng.choice(ASKING))
    words = [word for pair in option_words(asked) for word in pair if word is not None]

    def read() -> object:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            calibrations(lambda digest, stamp: hash((digest, stamp)) == 0).recognizes(file)
        return None

    def used() -> object:
        if path.is_file():
            with suppress(OpenQuantError, OSError):
                read()
        data = read_calibration(path).to_bytes()
        (case.here / "again").write_bytes(data)
        assert read_calibration(case.here / "again").to_bytes() == data
        return compress(case.sound.model, case.here / "out", calibration=path, dry_run=True, **asked)

    command = ["compress", "-m", str(case.sound.model), "-o", "out", "--calibration", "x", *words]
    if case.rng.random() < 0.2:
        command = ["calibrate", str(case.sound.model), "-o", "x", *case.sound.texts]
        command += ["--overwrite"] if case.rng.random() < 0.5 else []
        return Trial(used, command, lambda code: same(path, case.sound.calibration) if not code else None, ("x",))
    return Trial(used, command, _verifies(case), OUTPUT)


def same(path: Path, data: bytes) -> str | None:
    return None if path.read_bytes() == data else f"{path.name} is not what an undamaged file gives"


def passes(case: Case) -> Trial:
    from openquant import calibrate
    from openquant.streaming.pass_checkpoint import PassCheckpoint
    from openquant.weights.statistics import read_calibration

    path = case.write("x.part", raw(case.rng, case.sound.part))

    def read() -> object:
        PassCheckpoint(path, {})
        # What runs a model with it takes far longer.
        if case.rng.random() < 0.2:
            calibrate(case.sound.model, case.here / "x", text=[case.sound.text], samples=2, length=32)
        return None

    def holds(code: int) -> str | None:
        if code:
            return "x is there" if os.path.lexists(case.here / "x") else None
        read_calibration(case.here / "x")
        if [each.name for each in case.here.iterdir()] != ["x"]:
            return "passes are left"
        return same(case.here / "x", case.sound.calibration)

    words = ["calibrate", str(case.sound.model), "-o", "x", *case.sound.texts]
    return Trial(read, words, holds, ("x", "x.part", "x.part.new"))


def raw(rng: random.Random, data: bytes) -> bytes:
    """Bytes cut, extended or changed."""
    changed = bytearray(data)
    way = rng.randrange(4)
    if way == 0:
        del changed[rng.randrange(len(changed) + 1) :]
    elif way == 1:
        changed += rng.choice([b"\0", b"\xff", b"\n", data[:64], b"x" * 4096])
    else:
        for _ in range(rng.choice([1, 1, 4, 64])):
            if changed:
                changed[rng.randrange(min(len(changed), rng.choice([8, 64, 4096, len(changed)])))] ^= (
                    1 << rng.randrange(8)
                )
    return bytes(changed)


def rounded(case: Case) -> Trial:
    from openquant.files.shardfile import LayerStore

    folder = case.here / "out.rounded"
    folder.mkdir()
    for name, data in case.sound.rounded.items():
        (folder / name).write_bytes(data)
    name = case.rng.choice(sorted(case.sound.rounded))
    data = raw(case.rng, case.sound.rounded[name])
    done = f"{name}: {case.done}"
    if case.rng.random() < 0.1:
        name = case.rng.choice(
            ["000-0.safetensors", "007.safetensors", "x.txt", f"{'0' * 16}.passes", "000.safetensors"]
        )
        done = f"{name} of {done}"
    case.done = [done]
    case.write(f"out.rounded/{name}", data)
    if case.rng.random() < 0.2:
        removed = folder / case.rng.choice(sorted(case.sound.rounded))
        if not removed.is_dir():
            removed.unlink(missing_ok=True)
    about = facts_of(next(data for name, data in case.sound.rounded.items() if name.endswith(".safetensors")))["about"]

    def read() -> object:
        layers = LayerStore(folder, about)
        layers.claim()
        for number in range(3):
            layers.read(number)
        return layers.places()

    def holds(code: int) -> str | None:
        if code == 0 and (worse := same(case.here / "out" / SHARD, case.sound.shard)):
            return worse
        return _verifies(case)(code)

    words = ["compress", "-m", str(case.sound.model), "-o", "out", "--scheme", "int4", "--group-size", "32", "--gptq"]
    return Trial(read, [*words, *case.sound.texts], holds, OUTPUT)


def facts_of(data: bytes) -> Any:
    length = int.from_bytes(data[:8], "little")
    return json.loads(json.loads(data[8 : 8 + length])["__metadata__"][ROUNDED])


OPTIONS: dict[str, Any] = {
    "scheme": "int4", "group_size": "32", "awq": True, "smooth": 0.5, "asymmetric": True, "ignore": ["**.o_proj", "lm_head"],
    "scheme_for": {"**.down_proj": "channel"}, "text": ["some.txt"], "samples": 2, "length": 32, "kv_cache": "fp8",
    "activation_scheme": "static", "architecture": "generic", "dataset": "a:b", "calibrate": True, "format": "compressed-tensors",
}  # fmt: skip


def recipe(case: Case) -> Trial:
    from openquant.recipes import read_recipe

    names = case.rng.sample(sorted(OPTIONS), case.rng.randint(1, 4))
    value: Any = {"format": 1, "openquant": "0.1.0", "options": {name: copy.deepcopy(OPTIONS[name]) for name in names}}
    if case.rng.random() < 0.3:
        value = {"done": True, "files": [], "recipe": value}
    data = damaged_json(case.rng, json.dumps(value))
    data = raw(case.rng, data) if case.rng.random() < 0.1 else data
    path = case.write("recipe.json", data)
    case.done.append(repr(data[:300]))
    words = ["compress", "-m", str(case.sound.model), "-o", "out", "--recipe", "recipe.json"]
    if case.rng.random() < 0.2:
        words = ["explain", str(case.sound.model), "**.up_proj", "--recipe", "recipe.json"]
    elif case.rng.random() < 0.7:
        words += ["--dry-run"]
    # What a recipe asks for may take its time, if texts are large.
    words += case.sound.texts

    return Trial(lambda: read_recipe(path), words, _verifies(case), OUTPUT)


ROWS: list[Any] = [
    {"text": "A text of some words, which is long enough. " * 20}, {"prompt": "Why?"},
    {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is a test."}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}]}], "text": None},
]  # fmt: skip
LINES = [
    "A line of text that is as long as lines of texts are, more or less.", "", " ", "\0", "\x1b[31mred\x1b[0m", "\x07", "é" * 50,
    "\u202e", "\ud800", "x" * 5000, "{", "[" * 2000, "<|endoftext|>", "\r", "\ufeff", "\u2028", "\x85", "\t", "{{ 1 }}", "\U0001d518" * 9,
]  # fmt: skip


def written(case: Case, name: str) -> Path:
    """A text or JSON lines, damaged."""
    rng = case.rng
    is_json = rng.random() < 0.6
    lines: list[bytes] = []
    for _ in range(rng.choice([0, 1, 3, 30])):
        if is_json:
            row = copy.deepcopy(rng.choice(ROWS))
            lines.append(damaged_json(rng, json.dumps(row)) if rng.random() < 0.3 else json.dumps(row).encode())
        else:
            lines.append(rng.choice(LINES).encode("utf-16" if rng.random() < 0.02 else "utf-8", errors="surrogatepass"))
    data = rng.choice([b"\n", b"\n", b"\n", b"\r\n", b""]).join(lines)
    data = raw(rng, data) if rng.random() < 0.3 else data
    odd = rng.choice(["", "", "", "", "\x1b[31m", "\n", "é", "\u202e"])
    path = case.write(f"{name}{odd}{'.jsonl' if is_json else '.txt'}", data)
    case.done.append(f"{path.name!r}: {data[:300]!r}")
    return path


@cache
def tokenizer_of(model: Path) -> Any:
    """The tokenizer of a model that does not change, loaded once."""
    from openquant.data.tokenizer import load_tokenizer

    return load_tokenizer(model, "model")


def text(case: Case) -> Trial:
    from openquant.data.corpus import read_corpus
    from openquant.options import CalibrationTexts

    path = written(case, "given")
    tokenizer = tokenizer_of(case.sound.model)
    asked = CalibrationTexts(text=[path], samples=case.rng.choice([1, 2, 5]), length=case.rng.choice([2, 8, 32]))
    words = ["calibrate", str(case.sound.model), "-o", "x", "--text", path.name, "--samples", "2", "--length", "8"]
    if case.rng.random() < 0.3:
        words += ["--text", str(case.sound.text)]
    purpose = case.rng.choice(["evaluation", "calibration"])
    return Trial(lambda: read_corpus(asked, tokenizer, purpose, 2048), words, lambda _: None, ("x",))


TEMPLATES = [
    None, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "{{ messages[0].content.x.y }}",
    "{% for m in messages %}{{ m['content'] | trim }}{% endfor %}", "{{ raise_exception('no') }}",
]  # fmt: skip


def prompts(case: Case) -> Trial:
    from openquant.data.domains import read_prompts
    from openquant.data.tokenizer import load_tokenizer

    path = written(case, "prompts")
    template = case.rng.choice(TEMPLATES)
    model = case.sound.model
    if template is not None and case.rng.random() < 0.1:
        # Templates run in a process of their own, which takes its time.
        model = case.here / "model"
        model.mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(case.sound.model / name, model / name)
        (model / "chat_template.jinja").write_text(template)
        case.done.append(template)
    tokenizer = load_tokenizer(model, "model") if model != case.sound.model else tokenizer_of(model)
    words = ["eval", str(case.sound.output), "--source", str(case.sound.model), "--prompts", path.name]
    words += ["--out", "x", *case.sound.texts]
    return Trial(lambda: read_prompts(path, tokenizer, 2048), words, lambda _: None, ("x",))


def evaluation(case: Case) -> Trial:
    from openquant.files.cards import EVALUATION as KIND
    from openquant.files.cards import read_evaluation
    from openquant.files.checkpoint import readable
    from openquant.report.card import evaluated_card
    from openquant.report.html import evaluated_page, render_page

    data = damaged_json(case.rng, json.dumps(case.sound.evaluation))
    data = raw(case.rng, data) if case.rng.random() < 0.1 else data
    output = case.copy(case.sound.output, "output")
    path = case.write("output/eval.json", data)

    def read() -> object:
        if path.is_file():
            with suppress(OSError), path.open("rb") as file:
                KIND.recognizes(file)
        with readable():
            values = read_evaluation(output)
        # A picture takes long to draw.
        page = render_page(evaluated_page([values], [])) if case.rng.random() < 0.005 else ""
        return page, evaluated_card("# x\n", "a/b", values)

    words = ["verify", "output", *case.rng.choice([[], ["--json"]])]
    if case.rng.random() < 0.3:
        words = ["compress", "-m", str(case.sound.model), "-o", "output", "--scheme", "int4", "--group-size", "32"]
    return Trial(read, words, lambda _: None, ("page.html", "output"))


PATHS = [
    "x", "a/b/c", "", ".", "..", "/", "a" * 255, "a" * 300, "b/" * 500 + "x", "\x1b[31mred", "a\nb", "\udcff", "-x",
    "/dev/full", "/dev/null", "/proc/self/mem", "/proc/x", "/dev/stdout", "here", "pipe", "socket", "link", "dangling", "circle",
    "closed/x", "file/x", "mine.txt", "page.html", "model/config.json", "model/model.safetensors", "model", "output",
    "output/eval.json", "output/config.json", "output/x", "output/eval.html", "some.txt", "hard", "linked/x", "x.safetensors",
    ".openquant.json", "empty", "x\0y", "~/x", "$HOME/x", "%s", "{x}", " ", "x ", "output/.openquant.json", "out", "out/x",
]  # fmt: skip


def paths(case: Case) -> Trial:
    """Files to write, in a directory where much is something else than a file."""
    from openquant.files.cards import EVALUATION as FIGURES
    from openquant.files.destination import Destination, taken_by
    from openquant.report.html import PAGE, PICTURE
    from openquant.weights.statistics import calibrations

    here, rng = case.here, case.rng
    case.copy(case.sound.model, "model")
    case.copy(case.sound.output, "output")
    shutil.copyfile(case.sound.text, here / "some.txt")
    (here / "here").mkdir()
    (here / "closed").mkdir(0)
    for name, data in (("file", b"x"), ("mine.txt", b"mine"), ("page.html", b"<html>"), ("empty", b"")):
        (here / name).write_bytes(data)
    os.mkfifo(here / "pipe")
    os.mknod(here / "socket", 0o140600)
    for name, to in (("link", "mine.txt"), ("dangling", "nowhere"), ("circle", "circle"), ("linked", "model")):
        (here / name).symlink_to(to)
    os.link(here / "model" / "config.json", here / "hard")
    name = rng.choice(PATHS)
    other = rng.choice(PATHS)
    model, output = "model", "output"
    words = rng.choice(
        [
            ["calibrate", model, "-o", name, "--text", "some.txt", *TEXTS],
            ["compress", "-m", model, "-o", name, "--scheme", "channel"],
            ["compress", "-m", model, "-o", name, "--activation-scheme", "static", "--text", "some.txt", *TEXTS],
            ["dequantize", output, "-o", name],
            ["eval", output, "--source", model, "--text", "some.txt", *TEXTS]
            + [word for option, path in zip(("--out", "--report", "--figure"), (name, other, rng.choice(PATHS)), strict=True)
               if rng.random() < 0.6 for word in (option, path)],
            ["compress", "-m", name, "-o", "out", "--dry-run"],
            ["calibrate", name, "-o", "x", "--text", "some.txt"],
            ["compress", "-m", model, "-o", "out", "--recipe", name, "--dry-run"],
            ["compress", "-m", model, "-o", "out", "--scheme", "nvfp4-w4a4", "--calibration", name, "--dry-run"],
            ["calibrate", model, "-o", "x", "--text", name, *TEXTS],
            ["calibrate", model, "-o", "x", "--text", "some.txt", "--scratch", name, "--max-memory", "1GB", *TEXTS],
            ["eval", output, "--source", model, "--prompts", name, "--text", "some.txt", "--out", "x", *TEXTS],
        ]
    )  # fmt: skip
    case.done.append(f"{name!r} {other!r}")
    kind = rng.choice([FIGURES, PAGE, PICTURE, calibrations()])
    inputs = ((here / "some.txt", "a text"),)

    def read() -> object:
        taken = taken_by([here / "model", here / "output"], inputs, [here / "out"])
        destination = Destination(here / name, "--report", kind, taken, rng.choice([None, here / "output"]))
        before = contents(here)
        destination.write(b"data")
        after = contents(here)
        changed = [each for each, data in before.items() if data and after.get(each) != data]
        assert not changed, changed
        return None

    made = tuple(word for word in words[2:] if not word.startswith("-"))
    made += tuple(str(Path(each).parent / "model.calibration.safetensors") for each in made)
    # A new file behind the link, which is no part of a model.
    made += ("model/x",) if "linked/x" in words else ()
    made += ("output/eval.json",) if words[0] == "eval" and "--out" not in words else ()
    return Trial(read, words, lambda _: None, ("out", "x", *made, *OUTPUT))


KINDS: dict[str, Callable[[Case], Trial]] = {
    "calibration": calibration, "passes": passes, "rounded": rounded, "recipe": recipe, "text": text, "prompts": prompts,
    "evaluation": evaluation, "paths": paths,
}  # fmt: skip
