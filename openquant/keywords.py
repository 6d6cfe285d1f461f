"""Rewrite error messages for callers of Python functions: `--max-memory 2GB` becomes max_memory="2GB".

Messages name options as the command line does. Those of errors from exported functions are rewritten here.

    in_python("give --kv-cache fp8 too, or leave --gptq out")   # 'give kv_cache="fp8" too, or leave gptq out'
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import ParamSpec, TypeVar

from .errors import OpenQuantError
from .options import (
    Calibrate,
    CalibrationTexts,
    Check,
    CompareSchemes,
    Diagnose,
    Evaluate,
    FitOptions,
    Option,
    Push,
    Recipe,
    Run,
    flags_of,
    options_of,
    pattern_and_scheme,
)

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

# Verbs whose function has another name, and options that only the command line has.
_FUNCTIONS = {"eval": "evaluate", "fit": "fit_table"}
_OTHERS = {"-w 128": 'scheme="block"', "--rendezvous-timeout": "`patience` of its Ranks"}
_VERBS = "compress|dequantize|calibrate|diagnose|eval|explain|fit|push|verify"
_FLAG = r"(?<![\w-])--?[a-z][\w-]*"
_PLACEHOLDER = r"[A-Z]+(?![\w.-])"
# A command: a verb after `openquant`, or before a flag, with its words.
_COMMAND = re.compile(
    rf"\bopenquant (?P<verb>{_VERBS})\b(?P<words>(?: {_PLACEHOLDER}| {_FLAG})*)"
    rf"|(?<![\w.])(?P<bare>{_VERBS})(?P<flags>(?: {_FLAG})+)"
)
# How the command line lists all modules.
_LISTS = re.compile(r"\bcompress --dry-run(?: -v)? lists")
_VALUE = r"(?: (?P<value>'[^']*'|[^\s,;:)]*[^\s,;:).]))?"


def python_errors(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Wrap a function so that its errors name keywords instead of command-line options.

    Args:
        function: a function of the Python interface, which raises OpenQuantError.

    Returns:
        A function with the same signature and docstring.
    """
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        try:
            return function(*args, **kwargs)
        except OpenQuantError as error:
            error.message, error.hint = in_python(error.message, parameters), in_python(error.hint, parameters)
            error.args = (error.message,)
            raise

    # pickle looks the function up by this name.
    called.__module__ = __package__ or ""
    return called


def in_python(text: str, parameters: Collection[str] = ()) -> str:
    """Replace command-line options in a message or hint by keywords.

    Args:
        text: the message, which names options as the command line does.
        parameters: parameters of the called function; they decide between options that share a flag, such as -o.

    Returns:
        The message with keywords.
    """
    options = _options(parameters)
    alternatives = "|".join(re.escape(flag) for flag in sorted([*options, *_OTHERS], key=len, reverse=True))
    flags = re.compile(rf"(?<![\w-])(?P<flag>{alternatives})(?![\w-]){_VALUE}")

    def command(match: re.Match[str]) -> str:
        verb = match["verb"] or match["bare"]
        words = re.findall(rf"{_FLAG}(?: {_PLACEHOLDER})?|{_PLACEHOLDER}", match["words"] or match["flags"] or "")
        options = _options(("out",) if verb in ("calibrate", "eval") else ("output",))
        arguments = [
            flags.sub(functools.partial(keyword, options), word)
            for word in words
            if not word.startswith("-") or flags.match(word)
        ]
        return f"openquant.{_FUNCTIONS.get(verb, verb)}({', '.join(arguments)})"

    def keyword(options: Mapping[str, tuple[str, Option]], match: re.Match[str]) -> str:
        flag, value = match["flag"], match["value"]
        if flag in _OTHERS:
            return _OTHERS[flag] + (f" {value}" if value else "")
        name, option = options[flag]
        rest = "" if value is None else f" {value}"
        if option.value is None:
            left_out = match.string[match.end("flag") :].startswith(" out")
            return (name if left_out else f"{name}=True") + rest
        literal = None if value is None else _literal(option, value)
        return f"{name}{rest}" if literal is None else f"{name}={literal}"

    text = _LISTS.sub('openquant.explain(MODEL, "**").layers lists', text)
    return flags.sub(functools.partial(keyword, options), _COMMAND.sub(command, text))


def _options(parameters: Collection[str]) -> dict[str, tuple[str, Option]]:
    """Return keyword and option by flag; an option among the parameters wins over others with the same flag."""
    by_flag: dict[str, tuple[str, Option]] = {}
    for kind in (Push, Check, Diagnose, Evaluate, Calibrate, CalibrationTexts, CompareSchemes, FitOptions, Recipe, Run):
        for name, option in options_of(kind).items():
            for flag in flags_of(name, option):
                if flag.startswith("-") and (name in parameters or by_flag.get(flag, ("",))[0] not in parameters):
                    by_flag[flag] = name, option
    return by_flag


def _literal(option: Option, value: str) -> str | None:
    """Return an option's value as a Python literal; None if it is only the next word of the sentence."""
    if option.read is pattern_and_scheme:
        pattern, equals, scheme = value.rpartition("=")
        return f'{{"{pattern}": "{scheme}"}}' if equals else None
    if re.fullmatch(_PLACEHOLDER, value):
        return value
    if re.fullmatch(r"-?[\d.]+", value):
        return value
    if option.choices:
        return f'"{value}"' if value in option.choices else None
    # Names, patterns and paths have characters that no English word has.
    if value in ("auto", "generic", "cpu", "cuda") or re.search(r"[\d/*._~'=]", value):
        return '"' + value.strip("'") + '"'
    return None
