"""Every option, once: its name, its type, its default and its text.

An option is a field. `--help`, shell completion and the docstrings of `compress()` and the other functions show the
text of that field: `--help` its first sentence, docstrings all of it. Options that several commands share are mixins.

    Recipe(scheme="block", ignore=["lm_head"])
    Run("Qwen/Qwen3-8B", dry_run=True, max_memory="2GB")

A new option is a field here: `verb` makes parameters of fields, and `tools/stub.py` writes them for editors.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .errors import UsageError
from .formats.hardware import (
    GGUF,
    KEPT,
    SCHEME_NAMES,
    UNCHANGED,
    ActivationScheme,
    CacheScheme,
    FormatName,
    ScaleFormat,
    SchemeName,
    meaning_of,
)
from .version import CITED

# The titles of --help, in this order.
QUANTIZATION = "quantization"
FILES = "model and files"
TEXTS = "texts"
HUB = "publishing on the hub"
EXECUTION = "execution"
OUTPUT = "output"
GROUPS = (QUANTIZATION, FILES, TEXTS, HUB, EXECUTION, OUTPUT)

# Seconds that ranks wait for each other, as long as torchrun waits for its nodes.
PATIENCE: float = 600

# More texts than these are a mistake, and would fill the memory before anything is computed.
MAX_SAMPLES = 100_000
MAX_LENGTH = 1 << 20

DEVICES = r"auto|cpu|cuda(:\d+)?"

Output = TypeVar("Output")


class Option(NamedTuple):
    """What a field says of its option.

    Attributes:
        help: the text; its first sentence is the line in --help.
        group: the title above that line; an option without one is for Python only.
        value: what stands for the value in --help, such as "DIR"; an option without one is a switch.
        default: the value if it is not given; MISSING if it must be given.
        flags: the names on the command line, such as ("-o", "--output"); if empty, the name of the field.
        also: further names on the command line, which --help does not show.
        common: whether the short --help of a command with many options shows it.
        choices: all values that are allowed.
        read: makes the value of a word of the command line.
        required: whether the command line must have it.
        repeated: whether it may be given several times.
        completes: what a shell completes the value with: "directory", "file" or nothing.
        explains: whether a refused word of another tool is explained. Of schemes it is, "fp4"; of a cache it would be
            about something else.
    """

    help: str
    group: str = ""
    value: str | None = None
    default: object = None
    flags: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    common: bool = False
    choices: tuple[str, ...] | None = None
    read: Callable[[str], object] | None = None
    required: bool = False
    repeated: bool = False
    completes: str = ""
    explains: bool = True

    @property
    def summary(self) -> str:
        """The first sentence and the default, as --help shows them: "Tokens per sample (default: 512)"."""
        sentence = self.help.partition(". ")[0].rstrip(".")
        shown = isinstance(self.default, (int, float, str)) and not isinstance(self.default, bool)
        return f"{sentence} (default: {self.default})" if shown and "default" not in sentence else sentence


def option(default: Any, help: str, group: str = "", value: str | None = None, **more: Any) -> Any:
    """Return a dataclass field that is an option of the command line and of the Python functions.

    Args:
        default: the value if it is not given; MISSING if it must be given.
        help: the text; its first sentence is the line in --help.
        group: the title above that line; "" for an option of Python only.
        value: what stands for the value in --help, such as "DIR"; None for a switch, and for NAME beside choices.
        more: the other attributes of Option, by name. Without `read`, a value may be any text but the empty one.

    Returns:
        A `dataclasses.Field`, with the Option as `metadata["option"]`.
    """
    if "choices" in more:
        value = value or "NAME"
    elif value is not None:
        more.setdefault("read", read_text)
    return field(default=default, metadata={"option": Option(help, group, value, default, **more)})


def quantization(default: Any, help: str, value: str | None = None, **more: Any) -> Any:
    """Return a field that is an option under the title "quantization". The arguments are those of `option`."""
    return option(default, help, QUANTIZATION, value, **more)


def file_option(default: Any, help: str, group: str, value: str, **more: Any) -> Any:
    """Return a field that is an option whose value names a file. The arguments are those of `option`."""
    return option(default, help, group, value, completes="file", **more)


def directory_option(default: Any, help: str, group: str, value: str, **more: Any) -> Any:
    """Return a field that is an option whose value names a directory. The arguments are those of `option`."""
    return option(default, help, group, value, completes="directory", **more)


def options_of(kind: type) -> dict[str, Option]:
    """Return the options of a class, by the names of its fields.

    Args:
        kind: a dataclass whose fields are options, such as Run or Recipe.
    """
    return {entry.name: entry.metadata["option"] for entry in fields(kind)}


def flags_of(name: str, option: Option) -> tuple[str, ...]:
    """Return the names of an option on the command line, such as ("-o", "--output").

    Args:
        name: name of its field, which gives the flag if the option has none: "dry_run" gives "--dry-run".
        option: the option.
    """
    return option.flags or (f"--{name.replace('_', '-')}",)


def same_as(kind: type, name: str, **changed: Any) -> Any:
    """Return a dataclass field that is the option of another class, but for what is changed.

    Args:
        kind: the other class, a dataclass whose fields are options.
        name: name of its field.
        changed: new values of attributes of Option, by name, such as `help` or `default`.

    Returns:
        A `dataclasses.Field`, with the Option as `metadata["option"]`.
    """
    shared = options_of(kind)[name]._replace(**changed)
    return field(default=shared.default, metadata={"option": shared})


def size(text: str) -> int:
    """Read a number of bytes from the command line.

    Args:
        text: such as "1500000000", "500MB", "1.5GB" (powers of 1000) or "2GiB" (powers of 1024).

    Returns:
        The number of bytes, rounded down.

    Raises:
        ArgumentTypeError: it is no size.
    """
    found = re.fullmatch(r"(\d{1,30}(?:\.\d{1,30})?) *(?:([KMGT])(i?)B?|B)?", text, re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 500MB or 2GB")
    unit = 1024 if found[3] else 1000
    return int(float(found[1]) * unit ** (" KMGT".index(found[2].upper()) if found[2] else 0))


def tokens(text: str) -> int:
    """Read a number of tokens from the command line.

    Args:
        text: such as "8192", "8k" or "32k", where k is 1024.

    Raises:
        ArgumentTypeError: it is no such number.
    """
    found = re.fullmatch(r"(\d{1,9})(k?)", text, re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is no number of tokens such as 8192 or 32k")
    return int(found[1]) * (1024 if found[2] else 1)


def read_text(text: str) -> str:
    """Read any text but the empty one, which an unset variable of a script leaves behind.

    Args:
        text: a word of the command line.

    Returns:
        The same text.

    Raises:
        ArgumentTypeError: it is empty.
    """
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def pattern_and_scheme(text: str) -> tuple[str, str]:
    """Read a pattern of module names and the scheme of these modules from the command line.

    Args:
        text: PATTERN=SCHEME, such as "**.self_attn.*=channel".

    Returns:
        The pattern and the name of the scheme, which need not exist: ("**.self_attn.*", "channel").

    Raises:
        ArgumentTypeError: it has no "=".
    """
    pattern, equals, scheme = text.rpartition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text} is not PATTERN=SCHEME, such as **.self_attn.*=channel")
    return pattern, scheme


class OptionGroup:
    """Base of all groups of options. Values may be given as texts: max_memory="2GB", ignore="lm_head".

    Raises:
        UsageError: a value cannot be read, or is out of range.
    """

    def __post_init__(self) -> None:
        annotations = _annotations(type(self))
        for name, option in options_of(type(self)).items():
            given = getattr(self, name)
            reads = _read_all if option.repeated else _read
            read = reads(name, option, given)

            if not (option.repeated and isinstance(given, Mapping)):
                _check_type(name, option, annotations[name], read)
            if option.choices and read is not None and read not in option.choices:
                flag = flags_of(name, option)[-1]
                hint = f"choose one, or leave {flag} out"
                if option.explains:
                    hint = meaning_of(str(read)) or hint
                raise UsageError(f"{flag}: {read} is none of {', '.join(option.choices)}", hint)
            object.__setattr__(self, name, read)


def _read_all(name: str, option: Option, given: Any) -> Any:
    """Read the values of a repeatable option, of which a caller may give one alone."""
    if isinstance(given, (str, os.PathLike)):
        return (_read(name, option, given),)
    if isinstance(given, Sequence):
        return tuple(_read(name, option, item) for item in given)
    if given is None or (isinstance(given, Mapping) and option.read is pattern_and_scheme):
        return _read(name, option, given)

    raise UsageError(f"{name} is of type {type(given).__name__}, not a text or a list of texts", "give texts")


# What a caller may give for the types of fields. Other names are those of texts, such as SchemeName.
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "str": ("a text", (str,)),
    "os.PathLike[str]": ("a path", (os.PathLike,)),
    "int": ("a whole number", (Integral,)),
    "float": ("a number", (Real,)),
    "bool": ("True or False", (bool,)),
    "None": ("None", (type(None),)),
}


def _annotations(kind: type) -> dict[str, str]:
    return {entry.name: str(entry.type) for entry in fields(kind)}


def _check_type(name: str, option: Option, annotation: str, value: object) -> None:
    """Refuse a value whose type no field of this annotation, such as "int | None", takes.

    Raises:
        UsageError: it names the option.
    """
    if option.repeated:
        names = ["str", "os.PathLike[str]"]
        values = [item for item in value if not isinstance(item, tuple)] if isinstance(value, tuple) else []
    else:
        names, values = annotation.split(" | "), [value]

    if option.group == "" or any("[" in kind and kind not in _TYPES for kind in names):
        return

    kinds = [_TYPES.get(kind, _TYPES["str"]) for kind in names]
    for one in values:
        # True is a number for Python.
        is_wrong_bool = isinstance(one, bool) and "bool" not in names
        if is_wrong_bool or not any(isinstance(one, types) for _, types in kinds):
            wanted = " or ".join(dict.fromkeys(said for said, _ in kinds if said != "None"))
            # Only a caller in Python can give a wrong type.
            raise UsageError(f"{name} is of type {type(one).__name__}, not {wanted}", f"give {wanted}")


def _read(name: str, option: Option, value: object) -> object:
    """The value of an option; a text is read as the command line reads it."""
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


# Mixins: options that several commands share.


@dataclass(frozen=True)
class ModelSource(OptionGroup):
    """Where the model comes from."""

    model: str | os.PathLike[str] = option(
        MISSING,
        "Model directory, GGUF file, or Hub org/name[@rev].",
        FILES,
        "MODEL",
        flags=("-m", "--model"),
        common=True,
        required=True,
        completes="directory",
    )
    _: KW_ONLY
    revision: str | None = option(None, "Branch, tag or commit of the Hub repository.", FILES, "REV")


@dataclass(frozen=True)
class ModelDirectory(OptionGroup):
    """A quantized checkpoint on disk."""

    directory: str | os.PathLike[str] = option(
        MISSING, "Directory of a quantized checkpoint.", FILES, "DIR", completes="directory"
    )


@dataclass(frozen=True, kw_only=True)
class Streaming(OptionGroup):
    """How much of a Hub repository lies on disk."""

    stream: bool = option(
        False,
        "Keep only a few shards of a Hub repo on disk. None of them stays in the Hub's cache.",
        FILES,
        common=True,
    )


@dataclass(frozen=True, kw_only=True)
class ScratchDirectory(OptionGroup):
    """Where temporary files lie."""

    scratch: str | os.PathLike[str] | None = directory_option(
        None,
        "Scratch directory (default: beside the output). It holds temporary files and streamed shards. The default is "
        "the working directory for diagnose, and if no output is a directory.",
        EXECUTION,
        "DIR",
    )


@dataclass(frozen=True, kw_only=True)
class Device(OptionGroup):
    """On which device it is computed."""

    device: str = option(
        "cpu",
        'Where to compute: cpu (default), cuda, cuda:N, auto. "auto" uses a GPU if there is one.',
        EXECUTION,
        "NAME",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(DEVICES, self.device):
            raise UsageError(f"{self.device} is not a device", "choose auto, cpu, cuda or cuda:N")


@dataclass(frozen=True, kw_only=True)
class Memory(OptionGroup):
    """How much memory it may use."""

    max_memory: int | None = option(
        None,
        "Memory limit of this process, such as 2GB. A number is in bytes. If the limit is too low for one step, the "
        "run stops with an error before it starts. A conversion uses fewer threads to stay below the limit. A forward "
        "pass writes hidden states that do not fit to a temporary file.",
        EXECUTION,
        "SIZE",
        read=size,
        common=True,
    )


@dataclass(frozen=True, kw_only=True)
class Workers(OptionGroup):
    """How many threads work."""

    workers: int | None = option(
        None,
        "Number of threads (default: available CPUs). compress and dequantize divide the CPUs by the number of ranks "
        "on this machine. All but verify use at most 16 by default, and compress 4 with a GPU.",
        EXECUTION,
        "N",
        read=int,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"{self.workers} workers cannot work", "give --workers 1 or more")


@dataclass(frozen=True)
class Texts(OptionGroup):
    """The texts that run through a model."""

    text: Sequence[str | os.PathLike[str]] = file_option(
        (),
        "Text file or JSON Lines file (repeatable). Each file is one domain. Each line of a .jsonl file has `text` or "
        "`messages`; every other file is text in UTF-8. Default: openquant's own prose, code, chats and ten languages. "
        "A calibration and an evaluation never read the same parts of a text.",
        TEXTS,
        "FILE",
        repeated=True,
        common=True,
    )
    dataset: str | None = option(
        None,
        "Dataset: NAME[:SUBSET[:SPLIT]] or a directory. The name is that of a Hub dataset. It must have a column "
        "`text` or `messages`, and only as much of it as is needed is read.",
        TEXTS,
        "NAME",
    )
    samples: int = option(16, "Number of text samples.", TEXTS, "N", read=int)
    length: int = option(512, "Tokens per sample.", TEXTS, "N", read=int)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text and self.dataset:
            raise UsageError("--text and --dataset are both given", "give one of them")
        if not 1 <= self.samples <= MAX_SAMPLES:
            raise UsageError(f"{self.samples} samples", f"give --samples from 1 to {MAX_SAMPLES:,}")
        if not 2 <= self.length <= MAX_LENGTH:
            raise UsageError(f"samples of {self.length} tokens", f"give --length from 2 to {MAX_LENGTH:,}")
        if self.samples < len(self.names):
            raise UsageError(
                f"--samples {self.samples} is fewer than the {len(self.names)} texts: {', '.join(self.names)}",
                f"give --samples {len(self.names)} or more",
            )

    @property
    def names(self) -> list[str]:
        """Names of the texts that are given: of files their paths if several have the same name."""
        if self.dataset:
            return [self.dataset]
        paths = list(map(Path, self.text))
        names = [path.name for path in paths]
        if len(set(names)) < len(names):
            return list(map(str, paths))
        return names


@dataclass(frozen=True)
class CalibrationTexts(Texts):
    """The texts of a calibration, which are more."""

    samples: int = same_as(Texts, "samples", default=128)

    @property
    def described(self) -> str:
        """Such as "128 x 512 tokens"."""
        return f"{self.samples} x {self.length} tokens"


# What each command takes.


@dataclass(frozen=True)
class Recipe(OptionGroup):
    """How a checkpoint is quantized."""

    scheme: SchemeName = quantization(
        "tensor",
        f"Numeric format and scales: {', '.join(SCHEME_NAMES)}, {UNCHANGED} or {KEPT}. "
        + "".join(f'"{name}": {named.stored}. ' for name, named in SCHEME_NAMES.items())
        + f'"{UNCHANGED}": the weights stay as they are, and only KV-cache scales are added. '
        f'"{KEPT}": codes and scales of a quantized source stay as they are, and are written as compressed-tensors.',
        choices=(*SCHEME_NAMES, UNCHANGED, KEPT),
        common=True,
    )
    format: FormatName | None = quantization(
        None,
        "Checkpoint format: fp8 or compressed-tensors. Default: fp8 for the schemes that have it, tensor and block, "
        "and compressed-tensors for all others.",
        choices=("fp8", "compressed-tensors"),
    )
    scale_format: ScaleFormat | None = quantization(
        None,
        "Scale format: float, or ue8m0 (powers of two). ue8m0 rounds scales up. The scheme block in the fp8 format "
        "has both, and float by default; mxfp8 and mxfp4 have only ue8m0, all other schemes only float.",
        choices=("float", "ue8m0"),
    )
    activation_scheme: ActivationScheme = quantization(
        "dynamic",
        "Activation scales: dynamic (default) or static. Only the scheme tensor has static activation scales. They "
        "come from a calibration file, or from the input_scale tensors of a quantized source; if there are neither, "
        "a calibration runs first.",
        choices=("dynamic", "static"),
    )
    calibration: str | os.PathLike[str] | None = file_option(
        None,
        "Calibration file that calibrate wrote. It must be of this model. It is used for static activation scales, "
        "the activation scales of nvfp4-w4a4, the scales of an FP8 KV cache, `smooth` and `awq`.",
        QUANTIZATION,
        "FILE",
    )
    calibrate: bool = quantization(
        False,
        "Run a calibration before the model is quantized. Static activation scales, `smooth` and `awq` imply it if "
        "there is no calibration file; static activation scales do not if the source has them.",
    )
    smooth: float | None = quantization(
        None,
        "SmoothQuant exponent for int8, such as 0.5. The inputs of layers are divided by factors, and the columns of "
        "their weights are multiplied by the same factors. The factors are powers of two that come from a calibration. "
        "The division is part of the norms and projections before these layers.",
        "ALPHA",
        read=float,
    )
    awq: bool = quantization(
        False,
        "Use AWQ for int2 to int7. The inputs of layers are divided as with `smooth`, by AWQ's factors, where this "
        "lowers the error of the layers' outputs. The search for scales weighs the error of each column by its "
        "activations, which come from a calibration.",
        common=True,
    )
    gptq: bool = quantization(
        False,
        "Use GPTQ, which runs texts through the model. GPTQ rounds a weight column by column with the layer's "
        "Hessian: each column compensates for the rounding errors of the columns before it. An expert uses the tokens "
        "that are routed to it.",
        common=True,
    )
    tune: bool = quantization(
        False,
        "Weigh tokens and outputs by gradients in `gptq`. What the model's answers depend on counts more, which loses "
        "less. Gradients run back through the model first, which takes longer than GPTQ itself. Experts count all "
        "tokens alike. It needs numba.",
        common=True,
    )
    kv_cache: CacheScheme = quantization(
        "auto",
        'KV cache: fp8 adds its scales, auto (default) none. With "fp8", engines store the KV cache in FP8. Its scales '
        "come from a calibration or a quantized source; if there are neither, they are 1. They are for fp8_e4m3: vLLM "
        "refuses --kv-cache-dtype fp8_e5m2 for an output that has them, and for any in the fp8 format.",
        choices=("fp8", "auto"),
        explains=False,
    )
    group_size: str | None = quantization(
        None,
        "int2-int7 group: 32, 64, 128 (default), channel. Each group of inputs shares a scale; a group of "
        '"channel" is a whole row.',
        "N",
        choices=("32", "64", "128", "channel"),
    )
    asymmetric: bool = quantization(
        False,
        "Store a zero point with each int2 to int7 scale. This lowers the rounding error. transformers "
        f"{CITED['transformers']} cannot load such a checkpoint.",
    )
    no_search: bool = quantization(
        False,
        "Do not search for scales (int2-int7, nvfp4). Each scale then comes from the largest weight of its group, not "
        "from a search for the least squared error.",
    )
    ignore: Sequence[str] = quantization(
        (),
        "Modules that stay unquantized (repeatable). These are patterns over module names: * matches one part of a "
        "name, ** any number of parts, {a,b} a or b.",
        "PATTERN",
        repeated=True,
        common=True,
    )
    scheme_for: Mapping[str, SchemeName] | None = quantization(
        None,
        "Another scheme for matching modules (repeatable). It maps patterns over module names to schemes; the first "
        "pattern that matches counts. It needs the compressed-tensors format. Schemes: "
        f"{', '.join(name for name, named in SCHEME_NAMES.items() if named.mixes)}.",
        "PATTERN=SCHEME",
        read=pattern_and_scheme,
        repeated=True,
    )
    tp: int | None = quantization(
        None,
        "Tensor-parallel size that the output must allow. Layers that 128x128 blocks do not divide at this size get "
        "one scale per output row instead; in the fp8 format they stay unquantized.",
        "N",
        read=int,
    )
    quantize_lm_head: bool = quantization(
        False,
        "Quantize the output head (compressed-tensors). Engines load none in the fp8 format, and vLLM serves a model "
        "that has one neither as an embedding model nor as a reranker.",
    )
    quantize_embeddings: bool = quantization(
        False,
        "Quantize the input embedding, for vLLM. It loads int8-weights, int4 and int2; beside another scheme the "
        "embedding gets int8-weights. No engine loads one that is the output head too.",
    )
    architecture: str | None = quantization(
        None,
        "Registry entry to use instead of config.json's. "
        '"generic" decides by names and shapes, and so does "auto" for a class without an entry.',
        "NAME",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scheme_for is not None and not isinstance(self.scheme_for, Mapping):
            # Of equal patterns the first counts, as of any that match.
            schemes: dict[str, SchemeName] = {}
            for pattern, scheme in self.scheme_for:
                schemes.setdefault(pattern, scheme)
            object.__setattr__(self, "scheme_for", schemes)
        if not all(isinstance(text, str) for pair in (self.scheme_for or {}).items() for text in pair):
            raise UsageError("scheme_for has what is no text", "give names of schemes by patterns")
        if self.calibrate and self.calibration is not None:
            raise UsageError("--calibrate and --calibration are both given", "give one of them")
        if self.scheme in _OF_UNCHANGED:
            self._require_unchanged()

    def _require_unchanged(self) -> None:
        """Refuse options that say how weights are stored: with this scheme they stay as they are."""
        for option_field in fields(self):
            given = getattr(self, option_field.name) or option_field.default
            if option_field.name not in _OF_UNCHANGED[self.scheme] and given != option_field.default:
                flag = flags_of(option_field.name, option_field.metadata["option"])[0]
                raise UsageError(
                    f"--scheme {self.scheme} leaves weights as they are, and {flag} is given", "leave one of them out"
                )
        if self.scheme == UNCHANGED and self.kv_cache == "auto":
            raise UsageError(
                f"--scheme {UNCHANGED} leaves weights as they are, and nothing else is asked for",
                "give --kv-cache fp8 too, for KV-cache scales, or choose another scheme",
            )


# Options that go with what leaves weights as they are.
_OF_UNCHANGED = {
    UNCHANGED: ("scheme", "kv_cache", "calibration", "calibrate", "tp", "architecture"),
    KEPT: ("scheme", "kv_cache", "tp", "architecture"),
}


@dataclass(frozen=True)
class Push:
    """Where and how a model is published on the Hub."""

    name: str = option(
        MISSING,
        "Hub repository to push to, created if missing. It is `org/name`, or `name` in your own namespace.",
        HUB,
        "NAME",
        flags=("--push-to-hub",),
        common=True,
    )
    private: bool = option(False, "If the repository is created, make it private, as a private source does.", HUB)
    create_pr: bool = option(False, "Open a pull request instead of committing to main.", HUB)
    message: str | None = option(
        None,
        "Message of the commit, or the pull request's title. Default: the model's.",
        HUB,
        "TEXT",
        flags=("--commit-message",),
    )
    only: bool = option(False, "Delete each shard of the output once it is pushed.", HUB, flags=("--push-only",))
    replace_weights: bool = option(
        False,
        "Replace source or unquantized weights on main. Without it, a commit to a main branch that has the "
        "source's weights, or unquantized ones, is refused.",
        HUB,
    )


def push_target(given: object) -> Push:
    """Return where to push to.

    Args:
        given: a Push, or the name of a repository.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(given, str):
        return Push(given)
    if not isinstance(given, Push):
        raise UsageError(f"push is of type {type(given).__name__}, not a name or a Push", 'give "org/name"')
    return given


@dataclass(frozen=True)
class Run(Memory, Workers, Device, Streaming, ModelSource):
    """What compress() and dequantize() read and write, and how they run."""

    output: str | os.PathLike[str] | None = option(
        None,
        "Output directory (default: ./NAME-FP8 or similar). By default it is in the working directory, or beside the "
        "model if that is the model's own. Its name is that of the model with the suffix of the scheme: "
        f"{', '.join(f'`{named.suffix}` for {name}' for name, named in SCHEME_NAMES.items())}. tensor and block add "
        "`-CT` in the compressed-tensors format, block adds `-UE8M0` with ue8m0 scales, static activation scales add "
        "`-static`, and the scales of an FP8 KV cache `-KV8`.",
        FILES,
        "DIR",
        flags=("-o", "--output"),
        also=("--out",),
        common=True,
        completes="directory",
    )
    dry_run: bool = option(False, "Print the plan and write nothing.", EXECUTION, common=True)
    overwrite: bool = option(False, "Replace what an earlier run wrote to the output.", FILES)
    copy: Sequence[str] = option(
        (),
        "More files to copy, such as 'prompts/*'. Copied anyway is what engines, transformers and readers of the card "
        "look for; hidden files never are.",
        FILES,
        "PATTERN",
        repeated=True,
    )
    push: Push | None = option(None, "Publish the output on the Hub. A text is the name of the repository.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if str(self.output).endswith(".gguf"):
            raise UsageError(f"{self.output} would be a directory, and no GGUF file", GGUF)
        if self.push is not None:
            object.__setattr__(self, "push", push_target(self.push))


def _require_context(context: int) -> None:
    if context < 1:
        raise UsageError(f"a context of {context} tokens holds nothing", "give --context 8k or more")


def _scheme_names(given: Sequence[str]) -> tuple[str, ...]:
    names = tuple(name.strip() for text in given for name in text.split(","))
    if len(set(names)) < len(names):
        raise UsageError("--candidates names a scheme twice", "name each once")
    return names


@dataclass(frozen=True, kw_only=True)
class FitOptions(OptionGroup):
    """The size that compress() chooses schemes for."""

    fit: str | None = quantization(
        None,
        "Mix schemes to fit a size: 4090, 5.0bits, kl=0.02. 24GB, 2x24GB, 4090 or 2x4090 are GPUs, with room for a KV "
        "cache of `context` tokens; size=12.5GB is the size of all weights, 5.0bits the bits of a weight, and kl=0.02 "
        "the largest KL divergence. docs/fit.md says how the mixture is chosen.",
        "SIZE",
        common=True,
    )
    context: int = option(8192, "Tokens of KV cache, for --fit", QUANTIZATION, "N", read=tokens)
    engines: str = quantization(
        "both",
        "Engine for --fit: vllm, sglang, or both (default). SGLang loads fewer schemes than vLLM.",
        flags=("--for",),
        choices=("vllm", "sglang", "both"),
    )
    candidates: Sequence[str] = quantization(
        (),
        "Schemes that --fit may choose, separated by commas. Without it: int4, nvfp4, int5, int6 and int8-weights, as "
        "far as engines load them.",
        "SCHEMES",
        repeated=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_context(self.context)
        object.__setattr__(self, "candidates", _scheme_names(self.candidates))
        if self.fit is None and (self.context, self.engines, self.candidates) != (8192, "both", ()):
            raise UsageError("--context, --for and --candidates are for --fit", "give --fit too, or leave them out")


@dataclass(frozen=True)
class CompareSchemes(ModelSource):
    """What fit_table() compares."""

    gpu: str | None = quantization(
        None,
        "GPU: 4090, 2xA100-80, 24GB, or cpu. Without one, the table is for GPUs of 24, 48 and 80 GB. docs/fit.md lists "
        "the names.",
        "NAME",
    )
    context: int = same_as(FitOptions, "context", help="Tokens of a sequence.")
    engines: str | None = same_as(
        FitOptions, "engines", default=None, help="Engines that must load it: vllm, sglang, both. Default: any."
    )
    kv_cache: CacheScheme = same_as(
        Recipe, "kv_cache", help="KV cache of the output: fp8, auto (default). An FP8 one holds twice as many tokens."
    )
    ignore: Sequence[str] = same_as(Recipe, "ignore")
    quantize_lm_head: bool = same_as(Recipe, "quantize_lm_head")
    quantize_embeddings: bool = same_as(Recipe, "quantize_embeddings")
    architecture: str | None = same_as(Recipe, "architecture")

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_context(self.context)


@dataclass(frozen=True)
class Search(Memory, Device, Streaming, CompareSchemes):
    """What search_mixtures() measures."""

    candidates: Sequence[str] = same_as(FitOptions, "candidates", help="Schemes to mix, separated by commas.")
    text: Sequence[str | os.PathLike[str]] = same_as(Texts, "text")
    dataset: str | None = same_as(Texts, "dataset")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "candidates", _scheme_names(self.candidates))


@dataclass(frozen=True)
class Calibrate(ScratchDirectory, Memory, Device, Streaming, ModelSource):
    """What calibrate() reads and writes, and how it runs."""

    out: str | os.PathLike[str] | None = file_option(
        None,
        "File to write (default: ./NAME.calibration.safetensors). If the working directory is the model's own, the "
        "default is beside it. An earlier calibration of the same model is replaced.",
        FILES,
        "FILE",
        flags=("-o", "--out"),
        also=("--output",),
    )
    overwrite: bool = option(False, "Also replace a calibration of another model.", FILES)


@dataclass(frozen=True)
class Diagnose(ScratchDirectory, Workers, Streaming, ModelSource):
    """What diagnose() measures."""

    scheme: SchemeName = option(
        "tensor", "Scheme to compare the others with.", QUANTIZATION, "NAME", choices=tuple(SCHEME_NAMES)
    )
    ignore: Sequence[str] = same_as(Recipe, "ignore")
    architecture: str | None = same_as(Recipe, "architecture")


def _task_names(task: str | os.PathLike[str]) -> list[str | os.PathLike[str]]:
    """Return the tasks of a value of --tasks: a file, which may have a comma in its name, or names."""
    # Path.exists() raises if all names together are longer than the name of a file may be.
    if not isinstance(task, str) or os.path.exists(task):  # noqa: PTH110
        return [task]
    return [*task.split(",")]


@dataclass(frozen=True)
class Evaluate(ScratchDirectory, Memory, Device, Streaming):
    """What evaluate() compares, and how."""

    outputs: Sequence[str | os.PathLike[str]] = directory_option(
        MISSING, "Directories or Hub repositories made from the source.", FILES, "OUTPUT", repeated=True
    )
    source: str | os.PathLike[str] = directory_option(
        MISSING, "Source checkpoint: directory or Hub repository.", FILES, "MODEL", required=True
    )
    out: str | os.PathLike[str] | None = file_option(
        None,
        "File for the results of all outputs. By default those of an output are in its eval.json, if it is a directory "
        "that openquant wrote; others are not stored.",
        FILES,
        "FILE",
    )
    prompts: str | os.PathLike[str] | None = file_option(
        None,
        "File of prompts: one per line, or JSON Lines. The source and the outputs answer them side by side. Default: "
        "built-in prompts. With `stream` there are no prompts: the models are compared along a text.",
        TEXTS,
        "FILE",
    )
    no_prompts: bool = option(
        False,
        "Answer no prompts, not even the built-in ones. JSON and page then show predictions along a text, as with "
        "`stream`.",
        TEXTS,
    )
    kv_cache: CacheScheme = same_as(
        Recipe,
        "kv_cache",
        help='KV cache: fp8, or auto (default), as the config says. "fp8" rounds keys and values to FP8; "auto" does '
        "so for an output whose config says it.",
        group=EXECUTION,
    )
    tasks: Sequence[str | os.PathLike[str]] = file_option(
        (),
        "Tasks, separated by commas: files, or names of lm-eval. A file is JSON Lines with `question`, `choices` and "
        "`answer`, the JSON of a BIG-bench task, or the YAML of an lm-eval task. Names and YAML need lm-eval, the "
        "extra `tasks`. Tasks that generate texts are for lm-eval itself (docs/tasks.md).",
        TEXTS,
        "TASK",
        repeated=True,
    )
    limit: int | None = option(
        None, "Questions of each task that are asked (default: all). They are the first ones.", TEXTS, "N", read=int
    )
    seed: int = option(0, "Seed of the noise floor and the intervals.", EXECUTION, "N", read=int)
    fail_above: float | None = option(
        None, "Exit with 1 if a mean KL divergence is larger. From Python this does nothing.", OUTPUT, "KL", read=float
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.outputs:
            raise UsageError("no output is named", "give a directory that was made from the source")

        object.__setattr__(self, "tasks", tuple(name for task in self.tasks for name in _task_names(task)))
        if self.limit is not None and not self.tasks:
            raise UsageError("--limit is for --tasks", "give --tasks too, or leave --limit out")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"{self.limit} questions", "give --limit 1 or more")

        if self.no_prompts and self.prompts is not None:
            raise UsageError("--prompts gives prompts to answer, --no-prompts answers none", "give one of them")
        if self.stream and self.prompts is not None:
            raise UsageError(
                "--prompts takes all weights once more, which --stream has let go of by then", "give one of them"
            )

        if not 0 <= self.seed < 1 << 32:
            raise UsageError(f"{self.seed} is no seed", f"give --seed from 0 to {(1 << 32) - 1:,}")


@dataclass(frozen=True)
class Check(Workers, ModelDirectory):
    """What verify() checks."""

    directory: str | os.PathLike[str] = same_as(
        ModelDirectory, "directory", help="Directory of a quantized checkpoint, or Hub org/name[@rev]."
    )
    source: str | os.PathLike[str] | None = directory_option(
        None, "Source to compare with: a directory, GGUF file, or Hub org/name[@rev].", FILES, "MODEL"
    )
    full: bool = option(
        False,
        "Also decode every layer (needs --source). Each layer's error is measured against the source, and the source "
        "is quantized again.",
        EXECUTION,
    )
    architecture: str | None = same_as(Recipe, "architecture")


# For the command line only.


@dataclass(frozen=True)
class Explain(OptionGroup):
    """The layer to explain."""

    layer: str = option(
        MISSING, "Module name, or a pattern as in --ignore. A name may end in `.weight`.", FILES, "LAYER"
    )


@dataclass(frozen=True)
class WebPage:
    """Where `openquant web` serves its page, and what that may read and write."""

    port: int = option(7860, "Port on 127.0.0.1; 0 for a free one", EXECUTION, "N", read=int)
    root: Sequence[str] = directory_option(
        (),
        "Directory it may read and write (repeatable). Runs and outputs go into the first. Default: the working "
        "directory.",
        FILES,
        "DIR",
        repeated=True,
    )


@dataclass(frozen=True)
class Command:
    """Options that the command line handles itself, not the functions of api.py. Verbs take them one by one."""

    recipe: str | None = file_option(
        None,
        "Use the options of this .openquant.json. Options on the command line override them.",
        QUANTIZATION,
        "FILE",
    )
    block_size: int | None = option(
        None, "Short for --scheme block.", QUANTIZATION, "128", flags=("-w", "--block-size"), read=int
    )
    rendezvous_timeout: float = option(PATIENCE, "Time for torchrun's ranks to meet.", EXECUTION, "SECONDS", read=float)
    dry_run: bool = option(False, "Say what would be done and write nothing.", EXECUTION)
    quiet: bool = option(
        False, "Print errors only, and what is wrong with the source.", OUTPUT, flags=("-q", "--quiet")
    )
    verbose: bool = option(False, "Also list unquantized layers and copied files.", OUTPUT, flags=("-v", "--verbose"))
    json: bool = option(False, "Print one JSON object on stdout and nothing else.", OUTPUT)
    progress: str = option(
        "auto", "Progress: auto (default), or JSON lines on stderr.", OUTPUT, "KIND", choices=("auto", "json")
    )
    report: str | None = file_option(None, "Also write an HTML page (needs matplotlib).", OUTPUT, "FILE.html")
    figure: str | None = file_option(
        None, "Also write a picture for a model card. It shows all outputs, and needs matplotlib.", OUTPUT, "FILE.png"
    )
    search: bool = quantization(
        False,
        "Measure mixtures of all sizes on this model. It runs texts through it, writes no checkpoint, and keeps the "
        "scores for --fit.",
    )


# How options are read and shown.


def values_for(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some values that are options of a class, as keyword arguments for it.

    Args:
        kind: a dataclass whose fields are options, such as Run or Recipe.
        values: values of options, by the names of their fields, such as `dry_run`.

    Returns:
        The values whose names are fields of the class, by the same names.
    """
    return {name: values[name] for name in options_of(kind) if name in values}


def words_of(options: Mapping[str, Option], values: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line for values of options.

    Args:
        options: the options, by the names of their fields.
        values: values other than the defaults, by the same names: True for a switch, several for an option that may be
            repeated, schemes by pattern for --scheme-for.

    Returns:
        Words such as ["--scheme", "int4", "--gptq", "--ignore=-x"]: a value may begin with a dash.
    """
    words: list[str] = []
    for name, value in values.items():
        flag = flags_of(name, options[name])[0]
        if isinstance(value, Mapping):
            value = [f"{pattern}={scheme}" for pattern, scheme in value.items()]

        for one in value if isinstance(value, (list, tuple)) else [value]:
            if one is True:
                words.append(flag)
            elif str(one).startswith("-"):
                words.append(f"{flag}={one}")
            else:
                words += [flag, str(one)]
    return words


# What a caller may give for an option that is kept in another form.
_TAKEN = {
    "group_size": "GroupSize | None",
    "push": "Push | str | None",
    "scheme_for": "Mapping[str, SchemeName] | Sequence[tuple[str, SchemeName]] | None",
}


def verb(
    *kinds: type, positional: Sequence[str], without: Collection[str] = ()
) -> Callable[[Callable[..., Output]], Callable[..., Output]]:
    """Return a decorator that makes a public function of one that takes an object of each class of options.

    The public function takes all options by name, and the other parameters of the function. Its signature and its
    docstring, which must have `Args:`, have them all.

    Args:
        kinds: the classes, in the order of the function's first parameters.
        positional: names of the options that may be given by position.
        without: names of options to leave out.
    """
    options = {name: (kind, option) for kind in kinds for name, option in options_of(kind).items()}
    names = [*positional, *(name for name in options if name not in (*positional, *without))]
    lists = {name for name, (_, option) in options.items() if option.default == ()}

    def complete(function: Callable[..., Output]) -> Callable[..., Output]:
        own = list(inspect.signature(function).parameters.values())[len(kinds) :]
        parameters = [_parameter(name, *options[name], name in positional) for name in names]
        parameters += [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        signature = inspect.signature(function).replace(parameters=parameters)

        @functools.wraps(function)
        def call(*arguments: Any, **values: Any) -> Output:
            try:
                given = signature.bind(*arguments, **values).arguments
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            # None is what wrappers pass for a list that they do not have.
            given = {name: () if value is None and name in lists else value for name, value in given.items()}
            groups = [kind(**values_for(kind, given)) for kind in kinds]
            return function(*groups, **{name: given[name] for name in given if name not in names})

        # Python 3.13 removes the indentation of docstrings; cleandoc does it in all versions.
        text = inspect.cleandoc(function.__doc__ or "")
        described = {name: options[name][1] for name in names if f"\n    {name}: " not in text}
        call.__doc__ = text.replace("Args:\n", "Args:\n" + _describe(described), 1)
        vars(call)["__signature__"] = signature
        return call

    return complete


def _parameter(name: str, kind: type, option: Option, is_positional: bool) -> inspect.Parameter:
    """Return an option as a parameter, whose annotation has all types that a caller may give."""
    annotation = _TAKEN.get(name, _annotations(kind)[name])
    if annotation.startswith("Sequence["):
        annotation = f"{annotation[len('Sequence[') : -1]} | {annotation}"
    if option.read in (size, tokens):
        annotation = annotation.replace("int", "int | str")
    return inspect.Parameter(
        name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD if is_positional else inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if option.default is MISSING else option.default,
        annotation=annotation,
    )


def _describe(options: Mapping[str, Option]) -> str:
    """Return lines of a docstring, such as "    dry_run: Print the plan and write nothing."."""
    wrap = textwrap.TextWrapper(116, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)
    return "".join(wrap.fill(f"{name}: {option.help}") + "\n" for name, option in options.items())


# The only of these classes that `openquant` exports.
Push.__doc__ = f"{Push.__doc__}\n\nAttributes:\n{_describe(options_of(Push))}"
