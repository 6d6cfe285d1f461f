"""Arguments of the commands, made from options.py."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from ..errors import UsageError
from ..options import (
    GROUPS,
    BlockSize,
    Calibrate,
    CalibrationTexts,
    Check,
    Diagnose,
    Evaluate,
    Explain,
    FitOptions,
    JsonOutput,
    ModelDirectory,
    ModelSource,
    Option,
    ProgressLines,
    Push,
    Recipe,
    RendezvousOptions,
    Repeat,
    ReportFigure,
    ReportPage,
    Run,
    Search,
    Texts,
    Verbosity,
    WithSearch,
    flags_of,
    options_of,
)
from ..version import __version__

SHELLS = ("bash", "zsh", "fish")


class _Format(argparse.RawDescriptionHelpFormatter):
    """Formats an option and its help on one line if both fit: "-o, --output DIR  directory to write"."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {action.metavar}"

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):
            # argparse would print a line with VERB above them.
            return "".join(map(super()._format_action, action._get_subactions()))
        return super()._format_action(action)


class Parser(argparse.ArgumentParser):
    """An argument parser with our errors and our help.

    Args:
        prog: the command, such as "openquant compress" or "compress_fp8.py".
        usage: usage text after the command, such as "MODEL [options]".
        examples: arguments of example commands.
        version: whether it has --version.
        settings: other arguments of argparse.ArgumentParser.
    """

    def __init__(
        self, prog: str, usage: str, examples: Sequence[str] = (), version: bool = False, **settings: Any
    ) -> None:
        self.version = version
        words = f"python {prog}" if prog.endswith(".py") else prog
        shown = "".join(f"\n  {words} {example}" for example in examples)
        super().__init__(
            prog=prog,
            usage=f"{words} {usage}".replace("%", "%%"),
            epilog=f"examples:{shown}" if shown else None,
            formatter_class=_Format,
            allow_abbrev=False,
            add_help=False,
            **settings,
        )

    def _print_message(self, message: str, file: Any = None) -> None:
        # Older releases of argparse raise. The error comes again when the stream is flushed, and is reported then.
        with suppress(OSError):
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError, where argparse would print and exit."""
        raise UsageError(message, f"see {self.prog} --help")

    def add_options(
        self, *kinds: type, positional: Sequence[str] = (), without: Collection[str] = (), **helps: str
    ) -> None:
        """Add the options of classes of options.py, grouped under its titles.

        Options that the user does not give are absent from the namespace, so that only options.py has defaults.

        Args:
            kinds: classes of options.py.
            positional: names of options that are positional arguments.
            without: names of options to leave out.
            helps: help texts that replace those of options.py, by name of an option among these.
        """
        options = {name: option for kind in kinds for name, option in options_of(kind).items() if name not in without}
        for name, text in helps.items():
            options[name] = options[name]._replace(help=text)
        # Positional arguments come first, then options with a letter.
        names = sorted(options, key=lambda name: 0 if name in positional else 3 - len(flags_of(name, options[name])))
        for title in GROUPS:
            group = self.add_argument_group(title)
            volume = group.add_mutually_exclusive_group()
            for name in names:
                if options[name].group == title:
                    _add(volume if name in ("quiet", "verbose") else group, name, options[name], name in positional)
        self.add_information(group)

    def add_information(self, group: argparse._ArgumentGroup) -> None:
        """Add `--help`, and `--version` if the parser has it, to a group of options."""
        group.add_argument("-h", "--help", action="help", help="Show this help")
        if self.version:
            group.add_argument(
                "--version", action="version", version=f"openquant {__version__}", help="Show the version"
            )


def _add(group: argparse._ActionsContainer, name: str, option: Option, positional: bool) -> None:
    settings: dict[str, Any] = {"help": option.summary}
    if option.value is not None:
        settings |= {"metavar": option.value, "choices": option.choices, "type": option.read}
    if positional:
        added = group.add_argument(name, nargs="+" if option.repeated else None, **settings)
    else:
        action = "store_true" if option.value is None else "append" if option.repeated else "store"
        settings |= {"action": action, "dest": name, "default": argparse.SUPPRESS, "required": option.required}
        added = group.add_argument(*flags_of(name, option), **settings)
    if option.completes:
        vars(added)["complete"] = option.completes  # shtab reads it


COMPRESS = "Quantize a checkpoint to FP8, INT8, INT4 or FP4 for vLLM and SGLang."
MODEL = "-m MODEL [-o DIR] [options]"
EXAMPLES = (
    "-m Qwen/Qwen3-32B",
    "-m Qwen/Qwen3-32B -w 128 --dry-run",
    "-m Qwen/Qwen3-32B --stream --push-to-hub you/Qwen3-32B-FP8 --push-only",
)
# The classes of options of compress.
CONVERSION = (
    Recipe,
    FitOptions,
    Repeat,
    BlockSize,
    Run,
    Push,
    CalibrationTexts,
    RendezvousOptions,
    Verbosity,
    JsonOutput,
    ProgressLines,
    ReportPage,
)
COMPLETION = """in ~/.bashrc, ~/.zshrc, ~/.config/fish/config.fish:
  eval "$(openquant completion bash)"
  eval "$(openquant completion zsh)"
  openquant completion fish | source"""


def compress_parser(prog: str) -> Parser:
    """Return the parser of `compress-fp8` and `python compress_fp8.py`.

    Args:
        prog: name of the command in --help.
    """
    parser = Parser(prog, MODEL, EXAMPLES, version=True, description=COMPRESS)
    parser.add_options(*CONVERSION)
    parser.set_defaults(verb="compress")
    return parser


def recipe_parser() -> Parser:
    """Return the argparse parser of the options of compress that a recipe may have."""
    parser = Parser("openquant compress", "[options]")
    parser.add_options(Recipe, CalibrationTexts)
    return parser


def verb_parser() -> Parser:
    """Return the argparse parser of `openquant`, with a subparser for each verb; the verb is stored as `verb`."""
    parser = Parser(
        "openquant",
        "VERB [options]",
        ("compress -m Qwen/Qwen3-32B", "verify Qwen3-32B-FP8", "push Qwen3-32B-FP8 you/Qwen3-32B-FP8"),
        version=True,
        description="FP8, INT8, INT4 and FP4 checkpoints for vLLM and SGLang.",
    )
    verbs = parser.add_subparsers(
        dest="verb", required=True, metavar="VERB", title="verbs", prog="openquant", parser_class=Parser
    )

    def add(name: str, about: str, usage: str, *examples: str) -> Parser:
        return verbs.add_parser(name, help=about.rstrip("."), description=about, usage=usage, examples=examples)

    add("compress", COMPRESS, MODEL, *EXAMPLES).add_options(*CONVERSION)
    add(
        "fit",
        "Show which schemes fit a GPU, and how much context they leave.",
        "MODEL [--gpu NAME] [options]",
        "Qwen/Qwen3-32B --gpu 4090 --context 32k",
        "Qwen3-32B --gpu 2xA100-80 --for vllm --json",
        "Qwen3-32B --gpu 4090 --search --report page.html",
    ).add_options(
        *(WithSearch, Search, Verbosity, JsonOutput, ProgressLines, ReportPage),
        positional=("model",),
        without=("verbose",),
    )
    add(
        "dequantize",
        "Convert a quantized checkpoint back to bfloat16 weights.",
        "MODEL [-o DIR] [options]",
        "Qwen3-32B-FP8",
        "deepseek-ai/DeepSeek-V3 --stream -o DeepSeek-V3-BF16",
    ).add_options(
        *(Run, Push, RendezvousOptions, Verbosity, JsonOutput, ProgressLines),
        positional=("model",),
        without=("device",),
        output="Output directory (default: ./NAME-BF16).",
    )
    add(
        "push",
        "Publish a directory that openquant wrote on the Hub.",
        "DIR NAME [options]",
        "Qwen3-32B-FP8 you/Qwen3-32B-FP8",
        "Qwen3-32B-FP8 you/Qwen3-32B-FP8 --private --create-pr",
    ).add_options(ModelDirectory, Push, JsonOutput, positional=("directory", "name"), without=("only",))
    add(
        "diagnose",
        "Estimate the quantization error of each layer from its weights.",
        "MODEL [options]",
        "Qwen/Qwen3-32B --stream",
        "Qwen3-32B --full --scheme block",
    ).add_options(
        *(Diagnose, Verbosity, JsonOutput, ProgressLines, ReportPage),
        positional=("model",),
        without=("quiet",),
        scratch="Scratch directory (default: the working directory).",
        verbose="List every layer.",
    )
    add(
        "explain",
        "Show how a layer is quantized, and which rule decides it.",
        "MODEL LAYER [options]",
        "Qwen/Qwen3-32B model.layers.0.self_attn.q_proj",
        "Qwen3-32B '**.down_proj' -w 128 --json",
    ).add_options(ModelSource, Explain, Recipe, Repeat, BlockSize, JsonOutput, positional=("model", "layer"))
    add(
        "calibrate",
        "Measure the activations of a model on texts.",
        "MODEL [-o FILE] [options]",
        "Qwen/Qwen3-8B --stream",
        "Qwen3-8B --text mine.jsonl --samples 64",
    ).add_options(Calibrate, CalibrationTexts, RendezvousOptions, JsonOutput, ProgressLines, positional=("model",))
    add(
        "eval",
        "Compare quantized checkpoints with their source on texts.",
        "OUTPUT [OUTPUT ...] --source MODEL [options]",
        "Qwen3-8B-FP8 --source Qwen/Qwen3-8B",
        "Qwen3-8B-FP8 Qwen3-8B-INT8 --source Qwen3-8B --text mine.txt",
        "Qwen3-8B-FP8 --source Qwen3-8B --tasks arc_easy,hellaswag --limit 200",
        "Qwen3-8B-FP8 --source Qwen3-8B --tasks gsm8k --server http://host:8000 --server http://host:8001",
        "you/Qwen3-8B-FP8 --source Qwen/Qwen3-8B --stream",
    ).add_options(
        Evaluate, Texts, RendezvousOptions, JsonOutput, ProgressLines, ReportPage, ReportFigure, positional=("outputs",)
    )
    add(
        "verify",
        "Check a quantized checkpoint from any tool.",
        "DIR [--source DIR] [options]",
        "Qwen3-32B-FP8",
        "Qwen3-32B-FP8 --source Qwen3-32B --full",
    ).add_options(Check, JsonOutput, ProgressLines, ReportPage, positional=("directory",))
    completion = add("completion", "Print a script that lets a shell complete these commands.", "SHELL")
    completion.epilog = COMPLETION
    shell = completion.add_argument_group("shell")
    shell.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")
    completion.add_options(JsonOutput)
    parser.add_information(parser.add_argument_group("options"))
    return parser
