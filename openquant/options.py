"""Options, each said once: what is made (`Recipe`), how (`Run`), where it is published (`Push`), and so on.

They are plain values. The command line makes its arguments from their fields (cli/arguments.py), and compress() the
account of its own: a new option is a field here and a parameter of the function that takes it.

    Recipe(scheme="block", ignore=["lm_head"])
    Run("Qwen/Qwen3-8B", dry_run=True, max_memory=2_000_000_000)
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .errors import UsageError
from .formats.names import SCHEME_NAMES, UNCHANGED, ActivationScheme, CacheScheme, FormatName, ScaleFormat, SchemeName
from .version import CITED

# Titles in --help.
WEIGHTS = "what the weights become"
PLACES = "where they come from and go"
CHECKED = "what is checked"
TEXTS = "the texts it reads"
RUNNING = "how it runs"
OUTPUT = "output"
GROUPS = (WEIGHTS, PLACES, CHECKED, TEXTS, RUNNING, OUTPUT)

# Seconds until all ranks must have come, as torchrun waits for its nodes.
PATIENCE = 600.0

# Of texts: more is a mistake, and would fill the memory before anything is computed.
MAX_SAMPLES = 100_000
MAX_LENGTH = 1 << 20

DEVICES = r"auto|cpu|cuda(:\d+)?"

Target = TypeVar("Target")


class Option(NamedTuple):
    """What is said of an option.

    Attributes:
        help: its line in --help, such as "print the plan and write nothing".
        group: the title above that line; without one it is for Python only.
        about: what a docstring says, if that is more.
        flags: its names, such as ("-o", "--output"); if there are none, its field's.
        value: what stands for its value there, such as "DIR"; one without is a switch.
        choices: all values it may have.
        read: makes its value of a word.
        required: whether it must be given.
        repeated: whether it may be given several times.
        completes: what a shell completes it with: "directory", "file" or nothing.
    """

    help: str = ""
    group: str = ""
    about: str = ""
    flags: tuple[str, ...] = ()
    value: str | None = None
    choices: tuple[str, ...] | None = None
    read: Callable[[str], object] | None = None
    required: bool = False
    repeated: bool = False
    completes: str = ""


def size(text: str) -> int:
    """Bytes: 1500000000, 500MB, 1.5GB, 2GiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT])(i?)B?|B)?", text, re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 500MB or 2GB")
    unit = 1024 if found[3] else 1000
    return int(float(found[1]) * unit ** (" KMGT".index(found[2].upper()) if found[2] else 0))


def seconds(text: str) -> float:
    """A time above zero."""
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return float(text)


def nats(text: str) -> float:
    """A KL divergence, zero or more."""
    if not re.fullmatch(r"\d{1,9}(\.\d{1,15})?(e-\d{1,2})?", text):
        raise argparse.ArgumentTypeError(f"{text} is no number of nats such as 0.01")
    return float(text)


def share(text: str) -> float:
    """A number above 0, at most 1."""
    if not re.fullmatch(r"0?\.\d{1,9}|1(\.0{1,9})?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"{text} is no number above 0 and at most 1, such as 0.5")
    return float(text)


def filled(text: str) -> str:
    """Any text but the empty one, which a script's unset variable leaves behind."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def pattern_and_scheme(text: str) -> tuple[str, str]:
    """A pattern and a scheme: ("**.self_attn.*", "channel")."""
    pattern, equals, scheme = text.rpartition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text} is not PATTERN=SCHEME, such as **.self_attn.*=channel")
    return pattern, scheme


def said(help: str = "", group: str = "", about: str = "", **more: Any) -> dict[str, Option]:
    """The metadata of a field that is an option."""
    return {"option": Option(help, group, about, **more)}


def options_of(kind: type) -> dict[str, Option]:
    """The options that a class holds, by the names of its fields."""
    return {each.name: each.metadata["option"] for each in fields(kind)}


def flags_of(name: str, option: Option) -> tuple[str, ...]:
    """How a command calls the option of a field, such as ("-o", "--output")."""
    return option.flags or (f"--{name.replace('_', '-')}",)


def values_for(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Of these values those that a class has options for, as arguments for it or for a function that takes them."""
    return {name: values[name] for name in options_of(kind) if name in values}


# Options that name files which a run reads, and what messages call these.
_READ = {
    "text": "a text",
    "prompts": "the prompts",
    "dataset": "the dataset",
    "calibration": "the calibration",
    "recipe": "the recipe",
}


def files_read(values: Mapping[str, Any]) -> list[tuple[Path, str]]:
    """The files that options name as something to read, each with what it is: [(Path("wiki.txt"), "a text")]."""
    found = []
    for name, what in _READ.items():
        value = values.get(name)
        paths = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        # Of a dataset, its subset and split come behind.
        found += [(Path(str(path).partition(":")[0] if name == "dataset" else path), what) for path in paths]
    return found


def documented(target: Target) -> Target:
    """Complete a docstring: of a class with all its options, of a function with arguments that it does not name."""
    if target.__doc__:
        # Python 3.13 takes its indentation away, so here that is always gone.
        text = inspect.cleandoc(target.__doc__)
        if isinstance(target, type):
            text += f"\n\nAttributes:\n{_account(options_of(target))}"
        else:
            kinds = Run, Recipe, CalibrationTexts
            known = {name: option for kind in kinds for name, option in options_of(kind).items()}
            names = inspect.signature(target).parameters if callable(target) else ()
            told = set(re.findall(r"^    (\w+): ", text, re.MULTILINE))
            account = _account({name: known[name] for name in names if name in known and name not in told})
            text = text.replace("Args:\n", f"Args:\n{account}", 1)
        target.__doc__ = text
    return target


def _account(options: Mapping[str, Option]) -> str:
    """Lines of a docstring, such as '    dry_run: print the plan and write nothing.'"""
    paragraphs = [f"{name}: {(option.about or option.help).rstrip('.')}." for name, option in options.items()]
    wrap = textwrap.TextWrapper(116, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)
    return "".join(wrap.fill(each) + "\n" for each in paragraphs)


class OptionGroup:
    """Options that are read where they are given in another form, such as max_memory="2GB" or ignore="lm_head".

    Raises:
        UsageError: a text cannot be read.
    """

    def __post_init__(self) -> None:
        for name, option in options_of(type(self)).items():
            given = getattr(self, name)
            if option.repeated and isinstance(given, (str, os.PathLike)):
                read: Any = (_read(name, option, given),)
            elif option.repeated and isinstance(given, Sequence):
                read = tuple(_read(name, option, each) for each in given)
            else:
                read = _read(name, option, given)
            object.__setattr__(self, name, read)


def _read(name: str, option: Option, value: object) -> object:
    """The value of an option, made of a text as the command line makes it."""
    if option.choices and isinstance(value, int):
        return str(value)
    if option.read is None or not isinstance(value, str):
        return value
    flag = flags_of(name, option)[-1]
    try:
        return option.read(value)
    except argparse.ArgumentTypeError as problem:
        raise UsageError(f"{flag}: {problem}", f"change {flag}, or leave it out") from None
    except ValueError:
        raise UsageError(f"{flag}: {value!r} is not a number", f"change {flag}, or leave it out") from None


@documented
@dataclass(frozen=True)
class Push:
    """Where a model is to be published."""

    name: str = field(
        metadata=said(
            "publish it on the Hub as org/name, made if need be",
            PLACES,
            "the repository, `org/name`, or `name` in the user's own namespace",
            flags=("--push-to-hub",),
            value="NAME",
            read=filled,
        )
    )
    private: bool = field(default=False, metadata=said("make that repository private if it is made now", PLACES))
    create_pr: bool = field(default=False, metadata=said("open a pull request instead of committing to main", PLACES))
    message: str | None = field(
        default=None,
        metadata=said(
            "message of the commit or pull request",
            PLACES,
            "of the commit or pull request; one that names the model if None",
            flags=("--commit-message",),
            value="TEXT",
            read=filled,
        ),
    )
    only: bool = field(
        default=False,
        metadata=said(
            "delete each shard once it is uploaded",
            PLACES,
            "delete each shard of the output once it is uploaded",
            flags=("--push-only",),
        ),
    )
    replace_weights: bool = field(
        default=False,
        metadata=said(
            "replace the source or unquantized weights on main",
            PLACES,
            "commit to main although it holds what the model is made from, or unquantized weights",
        ),
    )


@dataclass(frozen=True)
class Recipe(OptionGroup):
    """What is made of a checkpoint."""

    scheme: SchemeName = field(
        default="tensor",
        metadata=said(
            ", ".join((*SCHEME_NAMES, UNCHANGED)).replace("tensor", "tensor (default)", 1),
            WEIGHTS,
            ", ".join(f'"{name}" ({named.stored})' for name, named in SCHEME_NAMES.items())
            + f'; "{UNCHANGED}" (weights as they are, where scales of keys and values are all that is asked for)',
            value="NAME",
            choices=(*SCHEME_NAMES, UNCHANGED),
        ),
    )
    format: FormatName | None = field(
        default=None,
        metadata=said(
            "fp8 (default where it can) or compressed-tensors",
            WEIGHTS,
            '"fp8" or "compressed-tensors", how that is serialized; "fp8" if None, where a scheme has that: tensor and '
            "block",
            value="NAME",
            choices=("fp8", "compressed-tensors"),
        ),
    )
    scale_format: ScaleFormat | None = field(
        default=None,
        metadata=said(
            "float (default), or for block ue8m0: powers of two",
            WEIGHTS,
            '"float", or "ue8m0" (scales rounded up to powers of two): for block in the fp8 format either, "float" if '
            "None; mxfp8 and mxfp4 have only the latter, all else only the former",
            value="NAME",
            choices=("float", "ue8m0"),
        ),
    )
    activation_scheme: ActivationScheme = field(
        default="dynamic",
        metadata=said(
            "dynamic (default), or static, which calibrates",
            WEIGHTS,
            '"dynamic", or for tensor "static": with scales of a calibration, which is made where no file of one is '
            "given and no quantized source has input_scale tensors",
            value="NAME",
            choices=("dynamic", "static"),
        ),
    )
    calibration: str | os.PathLike[str] | None = field(
        default=None,
        metadata=said(
            "for scales of activations and KV: from calibrate",
            WEIGHTS,
            "a file that calibrate() wrote of this model, for the stored scales of activations: static ones, and those "
            "of nvfp4-w4a4; for those of keys and values in FP8; and for `smooth`",
            value="FILE",
            read=filled,
            completes="file",
        ),
    )
    calibrate: bool = field(
        default=False,
        metadata=said(
            "calibrate first; static and --smooth imply it",
            WEIGHTS,
            "run texts through the model first, as calibrate() does, for such scales; implied by static activations "
            "that neither a file nor the source has scales for, and by `smooth` without a file",
        ),
    )
    smooth: float | None = field(
        default=None,
        metadata=said(
            "int8: fold outliers into weights, such as 0.5",
            WEIGHTS,
            "for int8 the exponent of SmoothQuant, such as 0.5: inputs of layers are divided in the norms and "
            "projections before them, and columns of weights multiplied by as much, by powers of two that a "
            "calibration says. Implies one, as static activations do",
            value="ALPHA",
            read=share,
        ),
    )
    awq: bool = field(
        default=False,
        metadata=said(
            "int4: the same by AWQ, and scales by activations",
            WEIGHTS,
            "for int4: inputs of layers are divided as `smooth` does it, by AWQ's factors, where less is lost of what "
            "comes out of layers, and the search for scales weighs errors by what goes into each column. Implies a "
            "calibration, as static activations do",
        ),
    )
    gptq: bool = field(
        default=False,
        metadata=said(
            "round by GPTQ with what texts show, less is lost",
            WEIGHTS,
            "round each column of a weight so that it makes up for what rounding those before it did to the layer's "
            "outputs on the texts (GPTQ), which run through the model; of each expert on the tokens that come to it",
        ),
    )
    kv_cache: CacheScheme = field(
        default="auto",
        metadata=said(
            "fp8: with scales of keys and values; auto: without",
            WEIGHTS,
            '"fp8" for scales of keys and values, which engines then cache in FP8: those of a calibration, or of a '
            'quantized source, or 1; "auto" to leave the cache as it is',
            value="NAME",
            choices=("fp8", "auto"),
        ),
    )
    group_size: str | None = field(
        default=None,
        metadata=said(
            "inputs that share a scale in int4: 128 (default), 64, 32 or channel",
            WEIGHTS,
            '"128", "64", "32" or "channel" (all of a row): how many inputs share a scale in int4; "128" if None',
            value="N",
            choices=("32", "64", "128", "channel"),
        ),
    )
    asymmetric: bool = field(
        default=False,
        metadata=said(
            "int4 with a zero point beside each scale",
            WEIGHTS,
            "whether groups of int4 have a zero point beside their scale, which brings weights nearer and which "
            f"transformers {CITED['transformers']} cannot load",
        ),
    )
    no_search: bool = field(
        default=False,
        metadata=said(
            "scales from the largest weights: int4, nvfp4",
            WEIGHTS,
            "whether the scales of int4 and nvfp4 are made from the largest weights alone, instead of those that have "
            "the least squared error being searched for",
        ),
    )
    ignore: Sequence[str] = field(
        default=(),
        metadata=said(
            "leave modules that match as they are; repeatable",
            WEIGHTS,
            "patterns over module names that stay unquantized: * is one part of a name, ** a subtree, {a,b} either",
            value="PATTERN",
            repeated=True,
        ),
    )
    scheme_for: Mapping[str, SchemeName] | None = field(
        default=None,
        metadata=said(
            "another scheme for modules that match; repeatable",
            WEIGHTS,
            "patterns over module names, each with the scheme of what matches "
            f"({', '.join(name for name, named in SCHEME_NAMES.items() if named.mixes)}, in the compressed-tensors "
            "format); the first that matches counts",
            value="PATTERN=SCHEME",
            read=pattern_and_scheme,
            repeated=True,
        ),
    )
    tp: int | None = field(
        default=None,
        metadata=said(
            "tensor-parallel size that must be able to serve it",
            WEIGHTS,
            "a tensor-parallel size that must be able to serve the result. Layers that 128x128 blocks do not divide "
            "for it fall back to one scale per output row, in the fp8 format they stay unquantized",
            value="N",
            read=int,
        ),
    )
    quantize_lm_head: bool = field(
        default=False,
        metadata=said(
            "quantize the output head too (compressed-tensors)",
            WEIGHTS,
            "also quantize the output head, in the compressed-tensors format",
        ),
    )
    architecture: str | None = field(
        default=None,
        metadata=said(
            "plan as for this class; auto: as vLLM builds it",
            WEIGHTS,
            'plan by this entry of the registry although config.json names another class; "auto" asks vLLM what it '
            "builds of a class without an entry (OPENQUANT_VLLM names a Python that has it, or it is installed here), "
            'and goes by names and shapes where there is none; "generic" goes by these in any case',
            value="NAME",
            read=filled,
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scheme_for is not None and not isinstance(self.scheme_for, Mapping):
            # Of equal patterns the first counts, as of any that match.
            schemes: dict[str, SchemeName] = {}
            for pattern, scheme in self.scheme_for:
                schemes.setdefault(pattern, scheme)
            object.__setattr__(self, "scheme_for", schemes)
        if self.calibrate and self.calibration is not None:
            raise UsageError("--calibrate and --calibration are both given", "give one of them")
        if self.scheme == UNCHANGED:
            self._refuse_others()

    def _refuse_others(self) -> None:
        """Where weights stay as they are, what says how they would be stored."""
        for each in fields(self):
            given = getattr(self, each.name) or each.default
            if each.name not in _OF_UNCHANGED and given != each.default:
                flag = flags_of(each.name, each.metadata["option"])[0]
                raise UsageError(
                    f"--scheme {UNCHANGED} leaves weights as they are, and {flag} is given", "leave one of them out"
                )
        if self.kv_cache == "auto":
            raise UsageError(
                f"--scheme {UNCHANGED} leaves weights as they are, and nothing else is asked for",
                "give --kv-cache fp8 too, for scales of keys and values, or choose another scheme",
            )


# What can be asked for of a recipe that leaves weights as they are.
_OF_UNCHANGED = ("scheme", "kv_cache", "calibration", "calibrate", "tp", "architecture")


@dataclass(frozen=True)
class Run(OptionGroup):
    """From where to where, and how."""

    model: str | os.PathLike[str] = field(
        metadata=said(
            "directory, or Hub repository: org/name[@revision]",
            PLACES,
            "a local directory, or a Hub repository `org/name` or `org/name@revision`",
            flags=("-m", "--model"),
            required=True,
            value="MODEL",
            completes="directory",
        )
    )
    output: str | os.PathLike[str] | None = field(
        default=None,
        metadata=said(
            "where to write (default: ./NAME-FP8 or the like)",
            PLACES,
            "directory to write; if None, in the working directory, named "
            f"{', '.join(f'`<name>{named.suffix}` for {name}' for name, named in SCHEME_NAMES.items())}; tensor and "
            "block in the compressed-tensors format have `-CT` added, block with ue8m0 scales `-UE8M0`, static "
            "activations `-static`",
            flags=("-o", "--output"),
            value="DIR",
            completes="directory",
        ),
    )
    dry_run: bool = field(default=False, metadata=said("print the plan and write nothing", RUNNING, "plan only"))
    device: str = field(
        default="cpu",
        metadata=said(
            "cpu (default), cuda, cuda:N; auto: a GPU if any",
            RUNNING,
            'where codes are computed: "cpu", "cuda", "cuda:N" or "auto" (a GPU if there is one)',
            value="NAME",
        ),
    )
    workers: int | None = field(
        default=None,
        metadata=said(
            "threads (default: the CPUs it may use, at most 16)",
            RUNNING,
            "number of threads; if None the CPUs this process may use, divided by the ranks on this machine, and at "
            "most 16, with a GPU 4",
            value="N",
            read=int,
        ),
    )
    max_memory: int | None = field(
        default=None,
        metadata=said(
            "fewer threads; too little is refused: 500MB, 2GB",
            RUNNING,
            "bytes that this process may hold in memory; fewer workers are used if need be, and less than a step takes "
            "is refused before anything is run",
            value="SIZE",
            read=size,
        ),
    )
    revision: str | None = field(
        default=None,
        metadata=said("branch, tag or commit of a Hub repository", PLACES, value="REV", read=filled),
    )
    overwrite: bool = field(
        default=False,
        metadata=said("replace what an earlier run left in the output", PLACES),
    )
    stream: bool = field(
        default=False,
        metadata=said(
            "keep few of a repository's shards on disk",
            PLACES,
            "keep only a few shards of a Hub repository on disk, and none in the Hub's cache",
        ),
    )
    push: Push | None = field(default=None, metadata=said(about="publish the output on the Hub"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(DEVICES, self.device):
            raise UsageError(f"{self.device} is not a device", "choose auto, cpu, cuda or cuda:N")
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"{self.workers} workers cannot work", "give --workers 1 or more")


@dataclass(frozen=True)
class Check(OptionGroup):
    """What verify() looks at."""

    directory: str | os.PathLike[str] = field(
        metadata=said(
            "the directory to check",
            CHECKED,
            flags=("directory",),
            value="DIR",
            read=filled,
            completes="directory",
        )
    )
    source: str | os.PathLike[str] | None = field(
        default=None,
        metadata=said(
            "the checkpoint it was made from, to compare with", CHECKED, value="DIR", read=filled, completes="directory"
        ),
    )
    full: bool = field(default=False, metadata=said("also decode every quantized layer, measure its error", CHECKED))
    workers: int | None = field(
        default=None, metadata=said("threads (default: the CPUs it may use)", RUNNING, value="N", read=int)
    )


@dataclass(frozen=True)
class Texts(OptionGroup):
    """What a model is run on."""

    text: Sequence[str | os.PathLike[str]] = field(
        default=(),
        metadata=said(
            "a text (.txt) or JSON lines; repeatable",
            TEXTS,
            "files, each a domain: .jsonl with `text` or `messages` in each line, all others text in UTF-8. Without "
            "any and without a dataset, the source and documentation of Python's own standard library",
            value="FILE",
            read=filled,
            repeated=True,
            completes="file",
        ),
    )
    dataset: str | None = field(
        default=None,
        metadata=said(
            "NAME[:SUBSET[:SPLIT]] of the Hub, or a directory",
            TEXTS,
            "a dataset with a column `text` or `messages`, `NAME[:SUBSET[:SPLIT]]`, from the Hub or in a directory, "
            "read as far as needed",
            value="NAME",
            read=filled,
        ),
    )
    samples: int = field(default=16, metadata=said("pieces of text in all (default: 16)", TEXTS, value="N", read=int))
    length: int = field(default=512, metadata=said("tokens of each (default: 512)", TEXTS, value="N", read=int))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text and self.dataset:
            raise UsageError("--text and --dataset are both given", "give one of them")
        if not 1 <= self.samples <= MAX_SAMPLES:
            raise UsageError(f"{self.samples} samples", f"give --samples from 1 to {MAX_SAMPLES:,}")
        if not 2 <= self.length <= MAX_LENGTH:
            raise UsageError(f"samples of {self.length} tokens", f"give --length from 2 to {MAX_LENGTH:,}")


@dataclass(frozen=True)
class CalibrationTexts(Texts):
    """What a model is calibrated on."""

    samples: int = field(default=128, metadata=said("pieces of text in all (default: 128)", TEXTS, value="N", read=int))

    @property
    def described(self) -> str:
        """Such as "128 x 512 tokens"."""
        return f"{self.samples} x {self.length} tokens"


@dataclass(frozen=True)
class Calibrate(OptionGroup):
    """What is calibrated, and how."""

    model: str | os.PathLike[str] = field(
        metadata=said(
            "directory, or Hub repository: org/name[@revision]",
            PLACES,
            "a local directory, or a Hub repository `org/name` or `org/name@revision`",
            flags=("model",),
            value="MODEL",
            read=filled,
            completes="directory",
        )
    )
    out: str | os.PathLike[str] | None = field(
        default=None,
        metadata=said(
            "file to write (default: ./NAME.calibration.safetensors)",
            PLACES,
            "the file to write; if None `NAME.calibration.safetensors` in the working directory",
            flags=("-o", "--out"),
            value="FILE",
            read=filled,
            completes="file",
        ),
    )
    revision: str | None = field(
        default=None, metadata=said("branch, tag or commit of a Hub repository", PLACES, value="REV", read=filled)
    )
    stream: bool = field(
        default=False,
        metadata=said(
            "keep few of a repository's shards on disk",
            PLACES,
            "keep only a few shards of a Hub repository on disk, and none in the Hub's cache",
        ),
    )
    overwrite: bool = field(
        default=False,
        metadata=said("replace a calibration of another model", PLACES),
    )
    device: str = field(
        default="cpu",
        metadata=said(
            "cpu (default), cuda, cuda:N; auto: a GPU if any",
            RUNNING,
            'where it is computed: "cpu", "cuda", "cuda:N" or "auto" (a GPU if there is one)',
            value="NAME",
        ),
    )
    max_memory: int | None = field(
        default=None,
        metadata=said(
            "to hold at most; too little is refused: 500MB, 2GB",
            RUNNING,
            "bytes that this process may hold in memory: less than a layer or the output head takes is refused, and "
            "hidden states that have no room wait in a scratch file",
            value="SIZE",
            read=size,
        ),
    )
    scratch: str | os.PathLike[str] | None = field(
        default=None,
        metadata=said(
            "for these and --stream (default: beside the file)",
            RUNNING,
            "the directory for that file and for streamed shards; that of `out` if None",
            value="DIR",
            read=filled,
            completes="directory",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(DEVICES, self.device):
            raise UsageError(f"{self.device} is not a device", "choose auto, cpu, cuda or cuda:N")


@dataclass(frozen=True)
class Diagnose(OptionGroup):
    """What diagnose() looks at."""

    model: str | os.PathLike[str] = field(
        metadata=said(
            "directory, or Hub repository: org/name[@revision]",
            PLACES,
            flags=("model",),
            value="MODEL",
            read=filled,
            completes="directory",
        )
    )
    scheme: SchemeName = field(
        default="tensor",
        metadata=said(
            "what to hold others against (default: tensor)", CHECKED, value="NAME", choices=tuple(SCHEME_NAMES)
        ),
    )
    ignore: Sequence[str] = field(
        default=(),
        metadata=said("modules that will not be quantized; repeatable", CHECKED, value="PATTERN", repeated=True),
    )
    full: bool = field(default=False, metadata=said("measure all rows of each layer", CHECKED))
    architecture: str | None = field(
        default=None,
        metadata=said("plan as for this class; auto: as vLLM builds it", CHECKED, value="NAME", read=filled),
    )
    revision: str | None = field(
        default=None, metadata=said("branch, tag or commit of a Hub repository", PLACES, value="REV", read=filled)
    )
    stream: bool = field(default=False, metadata=said("keep few of a repository's shards on disk", PLACES))
    scratch: str | os.PathLike[str] | None = field(
        default=None,
        metadata=said(
            "where these lie meanwhile (default: here)", PLACES, value="DIR", read=filled, completes="directory"
        ),
    )
    workers: int | None = field(
        default=None, metadata=said("threads (default: the CPUs it may use)", RUNNING, value="N", read=int)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"{self.workers} workers cannot work", "give --workers 1 or more")
        if self.scratch is not None and not self.stream:
            raise UsageError("--scratch is where --stream keeps shards", "give --stream too, or leave --scratch out")


@dataclass(frozen=True)
class Repeat:
    """A recipe whose options hold where no others are given."""

    recipe: str | None = field(
        default=None,
        metadata=said(
            "made as an output was: its .openquant.json",
            WEIGHTS,
            value="FILE",
            read=filled,
            completes="file",
        ),
    )


@dataclass(frozen=True)
class Explain:
    """Which layer is asked about."""

    layer: str = field(
        metadata=said(
            "a module's name, or a pattern as for --ignore",
            PLACES,
            flags=("layer",),
            value="LAYER",
            read=filled,
        )
    )


@dataclass(frozen=True)
class Evaluate(OptionGroup):
    """What is held against what, and how."""

    outputs: Sequence[str | os.PathLike[str]] = field(
        metadata=said(
            "what was made of it: directories, or Hub repositories",
            PLACES,
            "directories or Hub repositories, made from one source",
            flags=("outputs",),
            value="OUTPUT",
            read=filled,
            repeated=True,
            completes="directory",
        )
    )
    source: str | os.PathLike[str] = field(
        metadata=said(
            "what they were made from: directory, or org/name",
            PLACES,
            "the checkpoint they were made from, a directory or a Hub repository",
            value="MODEL",
            read=filled,
            required=True,
            completes="directory",
        )
    )
    out: str | os.PathLike[str] | None = field(
        default=None,
        metadata=said(
            "where the figures go (default: OUTPUT/eval.json)",
            PLACES,
            "a file for the figures, of several outputs for those of all; if None they go to eval.json of each output "
            "that openquant made",
            value="FILE",
            read=filled,
            completes="file",
        ),
    )
    stream: bool = field(
        default=False,
        metadata=said(
            "keep few of a repository's shards on disk",
            PLACES,
            "keep only a few shards of Hub repositories on disk, and none in the Hub's cache; models then answer along "
            "a text instead of prompts",
        ),
    )
    prompts: str | os.PathLike[str] | None = field(
        default=None,
        metadata=said(
            "prompts to answer, a line each or JSON lines",
            TEXTS,
            "a file of prompts that source and outputs answer side by side; built-in ones if None",
            value="FILE",
            read=filled,
            completes="file",
        ),
    )
    kv_cache: CacheScheme = field(
        default="auto",
        metadata=said(
            "fp8: keys and values in FP8; auto: as the config says",
            RUNNING,
            '"fp8" to round keys and values to FP8, or "auto" to do so where an output\'s config says it',
            value="NAME",
            choices=("fp8", "auto"),
        ),
    )
    device: str = field(
        default="cpu",
        metadata=said(
            "cpu (default), cuda, cuda:N; auto: a GPU if any",
            RUNNING,
            'where it is computed: "cpu", "cuda", "cuda:N" or "auto" (a GPU if there is one)',
            value="NAME",
        ),
    )
    max_memory: int | None = field(
        default=None,
        metadata=said(
            "to hold at most; too little is refused: 500MB, 2GB",
            RUNNING,
            "bytes that this process may hold in memory: less than a layer or the output head takes is refused, and "
            "hidden states that have no room wait in a scratch file",
            value="SIZE",
            read=size,
        ),
    )
    scratch: str | os.PathLike[str] | None = field(
        default=None,
        metadata=said(
            "for these and --stream (default: beside the output)",
            RUNNING,
            "the directory for that file and for streamed shards; if None the parent of the first output that is a "
            "directory, or else the working directory",
            value="DIR",
            read=filled,
            completes="directory",
        ),
    )
    seed: int = field(
        default=0, metadata=said("of the floor's noise and of intervals (default: 0)", RUNNING, value="N", read=int)
    )
    fail_above: float | None = field(
        default=None,
        metadata=said(
            "exit with 1 if a mean KL is larger",
            OUTPUT,
            "the largest mean KL of an output that is no failure, for the command's exit code",
            value="KL",
            read=nats,
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.outputs:
            raise UsageError("no output is named", "give a directory that was made from the source")
        if len({os.fspath(output) for output in self.outputs}) < len(self.outputs):
            raise UsageError("an output is given twice", "give each once")
        if self.stream and self.prompts is not None:
            raise UsageError(
                "--prompts takes all weights once more, which --stream has let go of by then", "give one of them"
            )
        if self.kv_cache not in ("fp8", "auto"):
            raise UsageError(f"{self.kv_cache} is not a cache", "choose fp8 or auto")
        if not re.fullmatch(DEVICES, self.device):
            raise UsageError(f"{self.device} is not a device", "choose auto, cpu, cuda or cuda:N")
        if not 0 <= self.seed < 1 << 32:
            raise UsageError(f"{self.seed} is no seed", f"give --seed from 0 to {(1 << 32) - 1:,}")


@dataclass(frozen=True)
class Command:
    """What a command takes beside: other words for the same, and how it talks."""

    block_size: int | None = field(
        default=None,
        metadata=said("short for --scheme block", WEIGHTS, flags=("-w", "--block-size"), value="128", read=int),
    )
    rendezvous_timeout: float = field(
        default=PATIENCE,
        metadata=said(
            f"time for torchrun's ranks to meet (default: {PATIENCE:g})", RUNNING, value="SECONDS", read=seconds
        ),
    )
    json: bool = field(default=False, metadata=said("print one JSON object on stdout and nothing else", OUTPUT))
    progress: str = field(
        default="auto",
        metadata=said("json: progress as lines of JSON on stderr", OUTPUT, value="KIND", choices=("auto", "json")),
    )
    report: str | None = field(
        default=None,
        metadata=said(
            "also write a page to look at (pip install -e '.[report]')",
            OUTPUT,
            value="FILE.html",
            read=filled,
            completes="file",
        ),
    )
    figure: str | None = field(
        default=None,
        metadata=said(
            "also write a picture for a card, likewise", OUTPUT, value="FILE.png", read=filled, completes="file"
        ),
    )
    quiet: bool = field(default=False, metadata=said("print errors only", OUTPUT, flags=("-q", "--quiet")))
    verbose: bool = field(
        default=False,
        metadata=said("also list unquantized layers and copied files", OUTPUT, flags=("-v", "--verbose")),
    )
