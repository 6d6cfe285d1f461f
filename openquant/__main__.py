"""Entry points of the commands, and `python -m openquant`, which is the same as `openquant`.

They handle signals before anything large is imported, and configure libraries.
"""

import os
import signal
import sys


def compress_main() -> int:
    """Run `compress-fp8` or `python compress_fp8.py` with the arguments of this process. Returns the exit code."""
    _prepare()
    from .cli.commands import compress_main as run

    return run()


def main() -> int:
    """Run `openquant VERB` with the arguments of this process. Returns the exit code."""
    _prepare()
    from .cli.commands import main as run

    return run()


def _prepare() -> None:
    """Until commands.py takes over nothing has begun, so a signal ends the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # A shell makes its background jobs ignore SIGINT, which must stay so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)

    # OpenBLAS, which numpy loads and we do not use, starts a thread for each CPU, and raises SIGINT if it cannot.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # OpenMP threads spin while they wait, which beside other work takes four times the processor time; this makes them
    # sleep. torch reads it when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _leave(*_: object) -> None:
    """Say that the user interrupted the command, and end the process."""
    try:
        # Of several ranks only the first prints.
        if os.environ.get("RANK", "0") == "0":
            if "--json" in sys.argv:
                os.write(1, b'{"error": "interrupted", "hint": "run the same command again"}\n')
            os.write(2, b"error: interrupted\nhint: run the same command again\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
