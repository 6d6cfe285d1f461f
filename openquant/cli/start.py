"""Entry points of the commands. They configure libraries, and end in two lines if interrupted while they import."""

import os
import signal


def compress_main() -> int:
    """Run `compress-fp8` or `python compress_fp8.py` with the arguments of this process. Returns the exit code."""
    return _run("compress_main")


def main() -> int:
    """Run `openquant VERB` with the arguments of this process. Returns the exit code."""
    return _run("main")


def _run(name: str) -> int:
    """Run a function of commands.py."""
    # OpenBLAS, which numpy loads and we do not use, starts a thread for each CPU, and raises SIGINT if it cannot.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # OpenMP threads spin while they wait, which beside other work takes four times the processor time; this makes them
    # sleep. torch reads it when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # A shell makes its background jobs ignore SIGINT, so only SIGTERM is made like it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from . import commands

        code: int = getattr(commands, name)()
    except KeyboardInterrupt:
        # Of several ranks only the first prints.
        if os.environ.get("RANK", "0") == "0":
            os.write(2, b"error: interrupted\nhint: run the same command again\n")
        os._exit(130)
    return code
