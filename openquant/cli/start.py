"""Entry points of the commands. They handle signals before anything large is imported.

Until commands.py takes over nothing has begun, so a signal simply ends the process.

SIGINT and SIGTERM before a command has begun: they end the process with a message.

All modules imported here but `signal` are loaded already when Python starts.
"""

import atexit
import os
import sys


def compress_main() -> int:
    """Run `compress-fp8` or `python compress_fp8.py` with the arguments of this process. Returns the exit code."""
    listen()
    from .commands import compress_main as run

    return run()


def main() -> int:
    """Run `openquant VERB` with the arguments of this process. Returns the exit code."""
    listen()
    from .commands import main as run

    return run()


INTERRUPTED = 130
MESSAGE = "interrupted"
# Verbs that keep nothing of what they have computed; but `fit --search` keeps scores.
_FROM_THE_BEGINNING = ("diagnose", "explain", "fit", "verify")


def hint(verb: str = "", searches: bool = False) -> str:
    """Return the hint for a user who interrupted a command, such as "run the same command again to continue".

    Args:
        verb: the verb of the command, such as "verify"; "" for a command without verbs.
        searches: whether it has --search.
    """
    effect = " to continue" if verb not in _FROM_THE_BEGINNING or searches else ": it starts from the beginning"
    return f"run the same command again{effect}"


def leave(*_: object) -> None:
    """Print that the user interrupted the command, and end the process at once with exit code 130. Never returns.

    Of several ranks only the first prints. With --json the message is on stdout too.

    Args:
        _: what Python gives signal handlers: the signal's number and the stack frame. Not used.
    """
    try:
        # Only the first of several ranks prints.
        if os.environ.get("RANK", "0") == "0" or not os.environ.get("WORLD_SIZE"):
            hint_text = hint("".join(sys.argv[1:2]), "--search" in sys.argv)
            if "--json" in sys.argv:
                os.write(1, f'{{"error": "{MESSAGE}", "hint": "{hint_text}"}}\n'.encode())
            os.write(2, f"error: {MESSAGE}\nhint: {hint_text}\n".encode())
    finally:
        os._exit(INTERRUPTED)


try:
    import signal
except KeyboardInterrupt:
    leave()


def listen() -> None:
    """End the process at SIGINT and SIGTERM until commands.py handles them; configure the threads of libraries."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # A shell makes its background jobs ignore SIGINT, which must stay so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)
            # At exit Python restores default handlers, and a signal would then change the exit code.
            atexit.register(signal.signal, number, signal.SIG_IGN)
    # OpenBLAS, which numpy loads and we do not use, starts a thread for each CPU, and raises SIGINT if it cannot.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # OpenMP threads spin while they wait, which beside other work takes four times the processor time; this makes them
    # sleep. torch reads it when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
