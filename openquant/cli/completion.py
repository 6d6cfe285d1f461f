"""Scripts that let a shell complete the commands, and their installation for one user."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

import shtab

from ..errors import UsageError
from ..files.destination import output_errors, write_atomic
from ..files.model_files import read_small
from .arguments import SHELLS, compress_parser, verb_parser


def completion_script(shell: str) -> str:
    """Return the script that makes a shell complete `openquant` and `compress-fp8`.

    Args:
        shell: "bash", "zsh" or "fish".
    """
    return "\n".join(shtab.complete(parser, shell) for parser in (verb_parser(), compress_parser("compress-fp8")))


def install_completion(environment: Mapping[str, str], dry_run: bool = False) -> tuple[str, list[Path]]:
    """Write the script where the user's shell reads it; bash and zsh get a line in their start file.

    A second call writes the script again and leaves the start file as it is.

    Args:
        environment: SHELL, HOME, and XDG_DATA_HOME, XDG_CONFIG_HOME and ZDOTDIR where they are set.
        dry_run: write nothing.

    Returns:
        The shell, and the files that are written, the script first. A start file that has the line is not among them.

    Raises:
        UsageError: the shell is none of these, or there is no home directory.
        OutputError: a file cannot be written.
        SourceError: the start file is not a regular file.
    """
    shell = Path(environment.get("SHELL", "")).name
    if shell not in SHELLS:
        raise UsageError(
            f"$SHELL is {shell or 'not set'}, and scripts are for {', '.join(SHELLS)}",
            "type one of their names: openquant completion bash",
        )
    if not environment.get("HOME"):
        raise UsageError("$HOME is not set", f"openquant completion {shell} prints the script")

    home = Path(environment["HOME"])
    if shell == "fish":
        # fish reads only the file of the command that is completed, so both have one.
        folder = Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "fish" / "completions"
        scripts = [folder / f"{name}.fish" for name in ("openquant", "compress-fp8")]
        for script in () if dry_run else scripts:
            write_atomic(script, completion_script(shell).encode())
        return shell, scripts

    script = Path(environment.get("XDG_DATA_HOME") or home / ".local" / "share") / "openquant" / f"completion.{shell}"
    if not dry_run:
        write_atomic(script, completion_script(shell).encode())

    start = home / ".bashrc" if shell == "bash" else Path(environment.get("ZDOTDIR") or home) / ".zshrc"
    quoted = shlex.quote(str(script))
    line = f"[ -r {quoted} ] && . {quoted}"
    if shell == "zsh":
        # shtab's script registers itself only if it is evaluated, and needs compinit, which not every start file calls.
        compinit = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }"
        line = f'{compinit}; [ -r {quoted} ] && eval "$(<{quoted})"'

    with output_errors(start):
        text = read_small(start, str(start)) if start.exists() else b""
        # The line is several if the name of a directory has line breaks.
        if os.fsencode(f"\n{line}\n") in b"\n" + text + b"\n":
            return shell, [script]
        if not dry_run:
            with open(start, "ab") as file:
                file.write(os.fsencode(f"{line}\n" if not text or text.endswith(b"\n") else f"\n{line}\n"))
    return shell, [script, start]
