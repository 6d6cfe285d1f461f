"""SIGINT and SIGTERM before anything has begun: the process ends, and says so.

What is imported here is loaded already when Python starts, but for `signal`.
"""

import atexit
import os
import sys

INTERRUPTED = 130
MESSAGE = "interrupted"
# Verbs that only read, and keep nothing of what they have computed.
_FROM_THE_BEGINNING = ("diagnose", "explain", "eval", "verify")


def hint(verb: str = "") -> str:
    """What to do after an interrupt of a verb, or of a command that has none."""
    kept = " to continue" if verb not in _FROM_THE_BEGINNING else ": it starts from the beginning"
    return f"run the same command again{kept}"


def leave(*_: object) -> None:
    """Say that the user interrupted us, and end at once."""
    try:
        # Of several ranks the first speaks.
        if os.environ.get("RANK", "0") == "0" or not os.environ.get("WORLD_SIZE"):
            told = hint(*sys.argv[1:2])
            if "--json" in sys.argv:
                os.write(1, f'{{"error": "{MESSAGE}", "hint": "{told}"}}\n'.encode())
            os.write(2, f"error: {MESSAGE}\nhint: {told}\n".encode())
    finally:
        os._exit(INTERRUPTED)


try:
    import signal
except KeyboardInterrupt:
    leave()


def listen() -> None:
    """End at SIGINT and SIGTERM until something else hears them; set how threads of libraries behave."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # A shell has its background jobs ignore SIGINT, and so it stays.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)
            # Python gives signals back to the system as it ends, which would change a settled exit code.
            atexit.register(signal.signal, number, signal.SIG_IGN)
    # Nothing here multiplies matrices, and numpy's library for that starts a thread for each CPU as it is loaded; where
    # none can be started it raises SIGINT.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Threads of OpenMP spin while they wait, and beside other work that takes four times the processor time. So they
    # sleep. torch reads this as it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
