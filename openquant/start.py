"""The first lines of every command: signals are heard from here on, before anything large is imported.

Until cli.py takes over nothing has been begun, so a signal simply ends the process. What is imported here is loaded
already when Python starts, but for `signal`.
"""

import os
import sys

INTERRUPTED = 130
MESSAGE, HINT = "interrupted", "run the same command again to continue"


def leave(*_: object) -> None:
    """Say that the user interrupted us, and end at once."""
    try:
        # Of several ranks the first speaks.
        if os.environ.get("RANK", "0") == "0" or not os.environ.get("WORLD_SIZE"):
            if "--json" in sys.argv:
                os.write(1, f'{{"error": "{MESSAGE}", "hint": "{HINT}"}}\n'.encode())
            os.write(2, f"error: {MESSAGE}\nhint: {HINT}\n".encode())
    finally:
        os._exit(INTERRUPTED)


try:
    import signal
except KeyboardInterrupt:
    leave()


def listen() -> None:
    """End at SIGINT and SIGTERM until something else hears them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # A shell has its background jobs ignore SIGINT, and so it stays.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)
    # Nothing here multiplies matrices, and numpy's library for that starts a thread for each CPU as it is loaded; where
    # none can be started it raises SIGINT.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def compress_main() -> int:
    """`compress-fp8` and `python compress_fp8.py`. Returns the exit code."""
    listen()
    from .cli import compress_main as run

    return run()


def main() -> int:
    """`openquant VERB`. Returns the exit code."""
    listen()
    from .cli import main as run

    return run()
