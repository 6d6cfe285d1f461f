"""Arguments of the commands, made from options.py, and the options that only the command line has."""

from __future__ import annotations

import argparse
import difflib
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from .. import options
from ..errors import UsageError
from ..fields import (
    EXECUTION,
    FILES,
    GROUPS,
    OUTPUT,
    QUANTIZATION,
    Option,
    directory_option,
    file_option,
    flags_of,
    option,
    options_of,
    quantization,
)
from ..formats.hardware import GGUF, meaning_of
from ..options import PATIENCE
from ..version import BUILT
from .console import say

SHELLS = ("bash", "zsh", "fish")


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


class _Format(argparse.RawDescriptionHelpFormatter):
    """Formats an option and its help on one line if both fit: "-o, --output DIR  directory to write"."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap lines that are not indented. Indented ones are commands to copy, and stay whole."""
        lines = (line if line.startswith(" ") else textwrap.fill(line, width) for line in text.splitlines())
        return "\n".join(indent + line for line in lines)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            also = vars(action).get("also")
            if not also:
                return super()._format_action_invocation(action)
            return f"[{also[0]}] {action.metavar}"
        names = ", ".join(name for name in action.option_strings if name not in vars(action).get("also", ()))
        if action.nargs == 0:
            return names
        return f"{names} {action.metavar}"

    def _format_action(self, action: argparse.Action) -> str:
        if vars(action).get("other_form"):
            return ""
        if isinstance(action, argparse._SubParsersAction):
            # argparse would print a line with VERB above them.
            return "".join(map(super()._format_action, action._get_subactions()))
        return super()._format_action(action)


class _HelpAction(argparse.Action):
    """Prints the help, with all options or the common ones, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, Parser)
        parser.shows_all = self.const
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argument parser with our errors and our help.

    Attributes:
        shows_all: whether the help has all options, not the common ones only.
        words: the words that are parsed, of which the last may say what a wrong verb is to do.

    Args:
        prog: the command, such as "openquant compress" or "compress_fp8.py".
        usage: usage text after the command, such as "MODEL [options]".
        examples: arguments of example commands.
        version: whether it has --version.
        by_flag: whether a positional argument that also has a flag, such as -m MODEL, is given by it.
        settings: other arguments of argparse.ArgumentParser.
    """

    def __init__(
        self,
        prog: str,
        usage: str,
        examples: Sequence[str] = (),
        version: bool = False,
        by_flag: bool = False,
        **settings: Any,
    ) -> None:
        self.version = version
        self.by_flag = by_flag
        self.shows_all = False
        self.words: Sequence[str] = ()

        words = f"python {prog}" if prog.endswith(".py") else prog
        epilog = "".join(f"\n  {words} {example}" for example in examples)
        if epilog:
            epilog = f"examples:{epilog}"

        super().__init__(
            prog=prog,
            usage=f"{words} {usage}".replace("%", "%%"),
            epilog=epilog,
            formatter_class=_Format,
            allow_abbrev=False,
            add_help=False,
            **settings,
        )

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse hides that a disk is full. From Python 3.14 on it colours the help.
        say(message, file or sys.stdout, end="", kept="\n\t\x1b")

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError, where argparse would print and exit."""
        # argparse takes a word that begins with - for an option.
        no_value = "no value follows, or one that begins with -"
        raise UsageError(message.replace("expected one argument", no_value), f"see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse words as argparse does, but refuse unknown ones here, where the options of the verb are known."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            message = f"unrecognized arguments: {' '.join(unknown)}"
            meaning = next(filter(None, map(meaning_of, unknown)), None)
            if meaning is not None:
                raise UsageError(message, meaning)
            self._refuse(message, unknown[0].partition("=")[0], self._option_string_actions)
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            meaning = meaning_of(str(value))
            # `quantize MODEL out.gguf` asks for something else than `quantize -m model.gguf`.
            if len(self.words) > 2 and self.words[-2] not in ("-m", "--model"):
                meaning = GGUF if meaning_of(self.words[-1]) == GGUF else meaning
            if meaning is not None and vars(action).get("explains", True):
                raise UsageError(str(error), meaning) from None
            self._refuse(str(error), str(value), list(map(str, action.choices or ())))

    def _refuse(self, message: str, word: str, known: Collection[str]) -> NoReturn:
        """Raise a UsageError whose hint names the word nearest to an unknown one."""
        near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
        raise UsageError(message, "".join([*(f"did you mean {name}? " for name in near), f"see {self.prog} --help"]))

    def format_help(self) -> str:
        """Return the help; that of a command with many options has the common ones only, unless `shows_all` is set."""
        hidden = [action for action in self._actions if vars(action).get("hidden")]
        if self.shows_all or not hidden:
            return super().format_help()
        shown = [action for group in self._action_groups for action in group._group_actions if action not in hidden]
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, shown, [])
        formatter.add_text(self.description)
        formatter.start_section("options")
        formatter.add_arguments(sorted(shown, key=lambda action: bool(action.option_strings)))
        formatter.end_section()
        formatter.add_text(f"{len(hidden)} more options: {self.prog} --help-all")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def add_options(
        self, *kinds: type | str, positional: Sequence[str] = (), without: Collection[str] = (), **helps: str
    ) -> None:
        """Add the options of classes of options.py, grouped under its titles.

        Options that the user does not give are absent from the namespace, so that only options.py has defaults.

        Args:
            kinds: classes of options.py, and names of options of Command.
            positional: names of options that are positional arguments; those that are not among these are ignored.
            without: names of options to leave out.
            helps: help texts that replace those of options.py, by name of an option among these.
        """
        chosen: dict[str, Option] = {}
        for kind in kinds:
            if isinstance(kind, str):
                chosen[kind] = options_of(Command)[kind]
            else:
                chosen |= options_of(kind)

        chosen = {name: option for name, option in chosen.items() if name not in without}
        for name, text in helps.items():
            chosen[name] = chosen[name]._replace(help=text)
        positional = [name for name in positional if name in chosen and not (self.by_flag and chosen[name].flags)]

        # Positional arguments come first, then options with a letter.
        names = sorted(chosen, key=lambda name: 0 if name in positional else 3 - len(flags_of(name, chosen[name])))
        hides = len(chosen) > MANY

        for title in GROUPS:
            group = self.add_argument_group(title)
            volume = group.add_mutually_exclusive_group()
            for name in names:
                option = chosen[name]
                if option.group != title:
                    continue

                place = volume if name in ("quiet", "verbose") else group
                added = _add(place, name, option, name in positional)
                vars(added)["hidden"] = hides and not option.common

                if name in positional and option.flags:
                    # For completion alone: words with this flag are parsed with `by_flag`.
                    flag = _add(group, name, option._replace(required=False), False)
                    vars(flag)["other_form"] = True
        self.add_information(group, hides)

    def add_information(self, group: argparse._ArgumentGroup, hides: bool = False) -> None:
        """Add `--help`, `--help-all`, and `--version` if the parser has it, to a group of options.

        Args:
            group: the group.
            hides: whether --help shows the common options only.
        """
        shows: dict[str, Any] = {"nargs": 0, "default": argparse.SUPPRESS, "dest": argparse.SUPPRESS}
        group.add_argument("-h", "--help", action=_HelpAction, const=not hides, help="Show this help", **shows)
        about_all = "Show all options" if hides else argparse.SUPPRESS
        group.add_argument("--help-all", action=_HelpAction, const=True, help=about_all, **shows)
        if self.version:
            group.add_argument("--version", action="version", version=f"openquant {BUILT}", help="Show the version")


def _add(group: argparse._ActionsContainer, name: str, option: Option, positional: bool) -> argparse.Action:
    """Add an option to a group of a parser."""
    settings: dict[str, Any] = {"help": option.summary}
    if option.value is not None:
        settings |= {"metavar": option.value, "choices": option.choices, "type": option.read}

    if positional:
        if option.repeated:
            settings["nargs"] = "+"
        added = group.add_argument(name, **settings)
        vars(added)["also"] = option.flags
    else:
        action = "append" if option.repeated else "store"
        if option.value is None:
            action = "store_true"
        settings |= {"action": action, "dest": name, "default": argparse.SUPPRESS, "required": option.required}
        added = group.add_argument(*flags_of(name, option), *option.also, **settings)
        vars(added)["also"] = option.also

    vars(added)["explains"] = option.explains
    if option.completes:
        # shtab reads it.
        vars(added)["complete"] = option.completes
    return added


COMPRESS = "Quantize a checkpoint to FP8, INT8, INT4 or FP4 for vLLM and SGLang."
MODEL = "[-m] MODEL [-o DIR] [options]"
EXAMPLES = (
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3-32B --scheme block --dry-run",
    "Qwen/Qwen3-32B --fit 5090 --gptq",
    "Qwen/Qwen3-32B --stream --push-to-hub you/Qwen3-32B-FP8 --push-only",
)
# A command with more options than these shows the common ones, unless it is asked for all.
MANY = 30
# The classes of options of compress.
CONVERSION = (
    options.Recipe,
    options.FitOptions,
    "recipe",
    "block_size",
    options.Run,
    options.Push,
    options.CalibrationTexts,
    "rendezvous_timeout",
    "quiet",
    "verbose",
    "json",
    "progress",
)
COMPLETION = """examples:
  eval "$(openquant completion bash)"
  openquant completion fish | source"""


class _Verb(NamedTuple):
    """A verb, and the options that it has.

    Attributes:
        name: the verb.
        about: what it does.
        usage: usage text after the verb.
        kinds: classes of its options, and names of options of Command.
        examples: arguments of example commands.
        positional, without, helps: see `Parser.add_options`.
    """

    name: str
    about: str
    usage: str
    kinds: tuple[type | str, ...]
    examples: tuple[str, ...] = ()
    positional: tuple[str, ...] = ("model",)
    without: tuple[str, ...] = ()
    helps: Mapping[str, str] = {}


_VERBS = (
    _Verb("compress", COMPRESS, MODEL, CONVERSION, EXAMPLES),
    _Verb(
        "fit",
        "Show which schemes fit a GPU, and how much context they leave.",
        "MODEL [--gpu NAME] [options]",
        ("search", options.Search, "quiet", "json", "progress", "report"),
        examples=(
            "Qwen/Qwen3-32B --gpu 4090 --context 32k",
            "Qwen3-32B --gpu 2xA100-80 --for vllm --json",
            "Qwen3-32B --gpu 4090 --search --report page.html",
        ),
    ),
    _Verb(
        "dequantize",
        "Convert a quantized checkpoint back to bfloat16 weights.",
        "MODEL [-o DIR] [options]",
        (options.Run, options.Push, "rendezvous_timeout", "quiet", "verbose", "json", "progress"),
        examples=("Qwen3-32B-FP8", "deepseek-ai/DeepSeek-V3 --stream -o DeepSeek-V3-BF16"),
        without=("device",),
        helps={"output": "Output directory (default: ./NAME-BF16)."},
    ),
    _Verb(
        "push",
        "Publish a directory that openquant wrote on the Hub.",
        "DIR NAME [options]",
        (options.ModelDirectory, options.Push, "dry_run", "json"),
        examples=(
            "Qwen3-32B-FP8 you/Qwen3-32B-FP8",
            "Qwen3-32B-FP8 you/Qwen3-32B-FP8 --private --create-pr",
            "eval.json you/Qwen3-32B-FP8",
        ),
        positional=("directory", "name"),
        without=("only",),
        helps={"directory": "Directory, or eval.json of what is published."},
    ),
    _Verb(
        "diagnose",
        "Estimate the quantization error of each layer from its weights.",
        "MODEL [options]",
        (options.Diagnose, "verbose", "json", "progress"),
        examples=("Qwen/Qwen3-32B --stream", "Qwen3-32B --scheme block"),
        helps={"scratch": "Scratch directory (default: the working directory).", "verbose": "List every layer."},
    ),
    _Verb(
        "explain",
        "Show how a layer is quantized, and which rule decides it.",
        "MODEL LAYER [options]",
        (options.ModelSource, options.Explain, options.Recipe, "recipe", "block_size", "json"),
        examples=("Qwen/Qwen3-32B model.layers.0.self_attn.q_proj", "Qwen3-32B '**.down_proj' -w 128 --json"),
        positional=("model", "layer"),
    ),
    _Verb(
        "calibrate",
        "Measure the activations of a model on texts.",
        "MODEL [-o FILE] [options]",
        (options.Calibrate, options.CalibrationTexts, "rendezvous_timeout", "json", "progress"),
        examples=("Qwen/Qwen3-8B --stream", "Qwen3-8B --text mine.jsonl --samples 64"),
    ),
    _Verb(
        "eval",
        "Compare quantized checkpoints with their source on texts.",
        "OUTPUT [OUTPUT ...] --source MODEL [options]",
        (options.Evaluate, options.Texts, "rendezvous_timeout", "json", "progress", "report", "figure"),
        examples=(
            "Qwen3-8B-FP8 --source Qwen/Qwen3-8B",
            "Qwen3-8B-FP8 Qwen3-8B-INT8 --source Qwen3-8B --text mine.txt",
            "Qwen3-8B-FP8 --source Qwen3-8B --tasks arc_easy,hellaswag --limit 200",
            "you/Qwen3-8B-FP8 --source Qwen/Qwen3-8B --stream",
        ),
        positional=("outputs",),
    ),
    _Verb(
        "verify",
        "Check a quantized checkpoint from any tool.",
        "DIR [--source MODEL] [options]",
        (options.Check, "json", "progress"),
        examples=(
            "Qwen3-32B-FP8",
            "Qwen3-32B-FP8 --source Qwen3-32B --full",
            "RedHatAI/Qwen3-32B-FP8-dynamic --source Qwen/Qwen3-32B",
        ),
        positional=("directory",),
    ),
    _Verb(
        "web",
        "Serve a page on this machine that plans, converts and publishes.",
        "[--root DIR] [--port N]",
        (WebPage, "json"),
        examples=("", "--root /data/models --port 8000"),
    ),
    _Verb("env", "Show the versions and hardware that a bug report needs.", "[--json]", ("json",)),
    _Verb("completion", "Let a shell complete these commands.", "SHELL", ("json",)),
)


def _by_flag(words: Sequence[str]) -> bool:
    """Whether the words of a command line give the model as -m MODEL. argparse takes one form only."""
    return any(word.startswith("-m") or word.partition("=")[0] == "--model" for word in words)


def compress_parser(prog: str, words: Sequence[str] = ()) -> Parser:
    """Return the parser of `compress-fp8` and `python compress_fp8.py`.

    Args:
        prog: name of the command in --help.
        words: the words that it is to parse, which say whether the model is positional.
    """
    parser = Parser(prog, MODEL, EXAMPLES, version=True, by_flag=_by_flag(words), description=COMPRESS)
    parser.add_options(*CONVERSION, positional=("model",))
    parser.set_defaults(verb="compress")
    return parser


def verb_parser(words: Sequence[str] = ()) -> Parser:
    """Return the argparse parser of `openquant`, with a subparser for each verb; the verb is stored as `verb`.

    Args:
        words: the words that it is to parse, which say whether the model is positional.
    """
    by_flag = _by_flag(words)
    parser = Parser(
        "openquant",
        "VERB [options]",
        ("compress Qwen/Qwen3-32B", "verify Qwen3-32B-FP8", "push Qwen3-32B-FP8 you/Qwen3-32B-FP8"),
        version=True,
        description="FP8, INT8, INT4 and FP4 checkpoints for vLLM and SGLang. Ollama, LM Studio and llama.cpp read "
        "GGUF, and Macs MLX, which llama.cpp and mlx-lm make.",
    )
    parser.words = words
    verbs = parser.add_subparsers(
        dest="verb", required=True, metavar="VERB", title="verbs", prog="openquant", parser_class=Parser
    )

    for verb in _VERBS:
        added = verbs.add_parser(
            verb.name,
            help=verb.about.rstrip("."),
            description=verb.about,
            usage=verb.usage,
            examples=verb.examples,
            by_flag=by_flag,
        )
        if verb.name == "completion":
            _add_shell(added)
        added.add_options(*verb.kinds, positional=verb.positional, without=verb.without, **verb.helps)
    parser.add_information(parser.add_argument_group("options"))
    return parser


def _add_shell(parser: Parser) -> None:
    """Add the argument of `completion`, which no class of options has."""
    parser.epilog = COMPLETION
    shell = parser.add_argument_group("shell")
    shell.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish, whose script is printed")
