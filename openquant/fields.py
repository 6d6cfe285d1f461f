"""What an option is: a field of a dataclass, with the text, the group and the flags that it has everywhere.

    scheme: SchemeName = quantization("block", "How weights are stored.", choices=SCHEME_NAMES)

`OptionGroup` reads and checks the values of such a class, `verb` makes them the parameters of a public function, and
`cli/arguments.py` makes flags of them. options.py has the classes.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, field, fields
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar

from .errors import UsageError
from .formats.hardware import meaning_of

# The titles of --help, in this order.
QUANTIZATION = "quantization"
FILES = "model and files"
TEXTS = "texts"
HUB = "publishing on the hub"
EXECUTION = "execution"
OUTPUT = "output"
GROUPS = (QUANTIZATION, FILES, TEXTS, HUB, EXECUTION, OUTPUT)

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
    # None is what wrappers pass for a list that they do not have.
    if given is None:
        return option.default
    if isinstance(given, Mapping) and option.read is pattern_and_scheme:
        return given

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
            groups = [kind(**values_for(kind, given)) for kind in kinds]
            return function(*groups, **{name: given[name] for name in given if name not in names})

        # Python 3.13 removes the indentation of docstrings; cleandoc does it in all versions.
        text = inspect.cleandoc(function.__doc__ or "")
        described = {name: options[name][1] for name in names if f"\n    {name}: " not in text}
        call.__doc__ = text.replace("Args:\n", "Args:\n" + docstring_lines(described), 1)
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


def docstring_lines(options: Mapping[str, Option]) -> str:
    """Return lines of a docstring, such as "    dry_run: Print the plan and write nothing."."""
    wrap = textwrap.TextWrapper(116, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)
    return "".join(wrap.fill(f"{name}: {option.help}") + "\n" for name, option in options.items())
