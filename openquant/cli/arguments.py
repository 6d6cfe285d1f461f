"""Arguments of the commands, made from options.py."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from ..errors import UsageError
from ..options import (  # fmt: skip
    GROUPS,
    PLACES,
    Calibrate,
    CalibrationTexts,
    Check,
    Command,
    Diagnose,
    Evaluate,
    Explain,
    Option,
    Push,
    Recipe,
    Repeat,
    Run,
    Texts,
    flags_of,
    options_of,
)
from ..version import __version__

SHELLS = ("bash", "zsh", "fish")


class _Format(argparse.RawDescriptionHelpFormatter):
    """Help with an option and what it does on one line, "-o, --output DIR  directory to write", where both fit."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {action.metavar}"

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):
            # Not under a line of their own that says VERB.
            return "".join(map(super()._format_action, action._get_subactions()))
        return super()._format_action(action)


class Parser(argparse.ArgumentParser):
    """argparse with our errors and our help.

    Args:
        prog: the command, such as "openquant compress" or "compress_fp8.py".
        usage: what comes after it.
        examples: what may come after it.
        version: whether it has --version.
        settings: for argparse.
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
        # Older releases of argparse let it out; who flushes the stream is told of it again, and says so.
        with suppress(OSError):
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        """Raise as a UsageError what argparse would print."""
        raise UsageError(message, f"see {self.prog} --help")

    def add_options(self, *kinds: type, without: Collection[str] = (), **changed: Mapping[str, Any]) -> None:
        """Arguments for the fields of classes of options.py, under its titles.

        What is not given is not in the namespace either, so that defaults stand in options.py alone.

        Args:
            kinds: the classes.
            without: fields that are no arguments here.
            changed: what is otherwise here, such as model={"flags": ("model",)} where that has no flag.
        """
        options = {name: option for kind in kinds for name, option in options_of(kind).items() if name not in without}
        options = {name: option._replace(**changed.get(name, {})) for name, option in options.items()}
        for title in GROUPS:
            group = self.add_argument_group(title)
            volume = group.add_mutually_exclusive_group()
            # Those without a flag come first, then those that have a letter.
            for name, option in sorted(options.items(), key=lambda each: _rank(flags_of(*each))):
                if option.group == title:
                    _add(volume if name in ("quiet", "verbose") else group, name, option)
        self.add_information(group)

    def add_information(self, group: argparse._ArgumentGroup) -> None:
        """Add `--help`, and `--version` where there is one, to a group of options."""
        group.add_argument("-h", "--help", action="help", help="show this help")
        if self.version:
            group.add_argument(
                "--version", action="version", version=f"openquant {__version__}", help="show the version"
            )


def _rank(flags: Sequence[str]) -> int:
    return 2 if len(flags) == 1 and flags[0].startswith("-") else len(flags) - 1


def _add(group: argparse._ActionsContainer, name: str, option: Option) -> None:
    flags = flags_of(name, option)
    settings: dict[str, Any] = {"help": option.help, "action": "append" if option.repeated else "store"}
    if option.value is None:
        settings["action"] = "store_true"
    else:
        settings |= {"metavar": option.value, "choices": option.choices, "type": option.read}
    if option.repeated and not flags[0].startswith("-"):
        settings |= {"action": "store", "nargs": "+"}
    if flags[0].startswith("-"):
        settings |= {"dest": name, "default": argparse.SUPPRESS, "required": option.required}
    added = group.add_argument(*flags, **settings)
    if option.completes:
        vars(added)["complete"] = option.completes  # where shtab looks for it


COMPRESS = "Turn a checkpoint into an FP8, INT8, INT4 or FP4 directory for vLLM and SGLang."
MODEL = "-m MODEL [-o DIR] [options]"
EXAMPLES = (
    "-m Qwen/Qwen3-32B",
    "-m Qwen/Qwen3-32B -w 128 --dry-run",
    "-m Qwen/Qwen3-32B --stream --push-to-hub you/Qwen3-32B-FP8 --push-only",
)
# Fields of Command that verbs without a plan do not take.
ALONE = ("block_size", "rendezvous_timeout", "quiet", "verbose")
# And those for people to look at.
PAGES = ("report", "figure")
# What of Run a plan does not ask for.
_ONLY_WRITING = ("output", "dry_run", "device", "workers", "max_memory", "overwrite", "stream", "push")
COMPLETION = """in ~/.bashrc, ~/.zshrc, ~/.config/fish/config.fish:
  eval "$(openquant completion bash)"
  eval "$(openquant completion zsh)"
  openquant completion fish | source"""


def compress_parser(prog: str) -> Parser:
    """The arguments of `compress-fp8` and `python compress_fp8.py`."""
    parser = Parser(prog, MODEL, EXAMPLES, version=True, description=COMPRESS)
    parser.add_options(Recipe, Repeat, Run, Push, CalibrationTexts, Command, without=("figure",))
    parser.set_defaults(verb="compress")
    return parser


def recipe_parser() -> Parser:
    """The arguments that a recipe may have."""
    parser = Parser("openquant compress", "[options]")
    parser.add_options(Recipe, CalibrationTexts)
    return parser


def verb_parser() -> Parser:
    """The arguments of `openquant`."""
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

    compress = add("compress", COMPRESS, MODEL, *EXAMPLES)
    compress.add_options(Recipe, Repeat, Run, Push, CalibrationTexts, Command, without=("figure",))
    dequantize = add(
        "dequantize",
        "Turn a quantized checkpoint back into bfloat16 weights.",
        "MODEL [-o DIR] [options]",
        "Qwen3-32B-FP8",
        "deepseek-ai/DeepSeek-V3 --stream -o DeepSeek-V3-BF16",
    )
    dequantize.add_options(
        Run,
        Push,
        Command,
        without=("device", "block_size", *PAGES),
        model={"flags": ("model",)},
        output={"help": "where to write (default: ./NAME-BF16)"},
    )
    push = add(
        "push",
        "Publish a directory that openquant made on the Hub.",
        "DIR NAME [options]",
        "Qwen3-32B-FP8 you/Qwen3-32B-FP8",
        "Qwen3-32B-FP8 you/Qwen3-32B-FP8 --private --create-pr",
    )
    push.add_options(
        Check,
        Push,
        Command,
        without=("source", "full", "workers", "only", "progress", *ALONE, *PAGES),
        directory={"help": "what compress wrote", "group": PLACES},
        name={"flags": ("name",)},
    )
    diagnose = add(
        "diagnose",
        "Say of each layer what quantizing will do to it.",
        "MODEL [options]",
        "Qwen/Qwen3-32B --stream",
        "Qwen3-32B --full --scheme block",
    )
    diagnose.add_options(
        Diagnose,
        Command,
        without=("block_size", "rendezvous_timeout", "quiet", "figure"),
        verbose={"help": "list every layer"},
    )
    explain = add(
        "explain",
        "Say what becomes of a layer, and which rule says so.",
        "MODEL LAYER [options]",
        "Qwen/Qwen3-32B model.layers.0.self_attn.q_proj",
        "Qwen3-32B '**.down_proj' -w 128 --json",
    )
    explain.add_options(
        Recipe,
        Repeat,
        Run,
        Explain,
        Command,
        without=(*_ONLY_WRITING, "rendezvous_timeout", "quiet", "verbose", "progress", *PAGES),
        model={"flags": ("model",)},
    )
    calibrate = add(
        "calibrate",
        "Find how large activations are, for what needs to know it.",
        "MODEL [-o FILE] [options]",
        "Qwen/Qwen3-8B --stream",
        "Qwen3-8B --text mine.jsonl --samples 64",
    )
    calibrate.add_options(Calibrate, CalibrationTexts, Command, without=("block_size", "quiet", "verbose", *PAGES))
    evaluate = add(
        "eval",
        "Hold outputs against their source: what they answer, and why.",
        "OUTPUT [OUTPUT ...] --source MODEL [options]",
        "Qwen3-8B-FP8 --source Qwen/Qwen3-8B",
        "Qwen3-8B-FP8 Qwen3-8B-INT8 --source Qwen3-8B --text mine.txt",
        "you/Qwen3-8B-FP8 --source Qwen/Qwen3-8B --stream",
    )
    evaluate.add_options(Evaluate, Texts, Command, without=("block_size", "quiet", "verbose"))
    verify = add(
        "verify",
        "Check an FP8, INT8, INT4 or FP4 directory, whichever tool made it.",
        "DIR [--source DIR] [options]",
        "Qwen3-32B-FP8",
        "Qwen3-32B-FP8 --source Qwen3-32B --full",
    )
    verify.add_options(Check, Command, without=(*ALONE, "figure"))
    completion = add("completion", "Print a script by which a shell completes these commands.", "SHELL")
    completion.epilog = COMPLETION
    shell = completion.add_argument_group("shell")
    shell.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")
    completion.add_options(Command, without=("progress", *ALONE, *PAGES))
    parser.add_information(parser.add_argument_group("options"))
    return parser
