"""The first lines of every command: signals are heard from here on, before anything large is imported.

Until commands.py takes over nothing has been begun, so a signal simply ends the process.
"""

from .interrupts import listen


def compress_main() -> int:
    """`compress-fp8` and `python compress_fp8.py`. Returns the exit code."""
    listen()
    from .commands import compress_main as run

    return run()


def main() -> int:
    """`openquant VERB`. Returns the exit code."""
    listen()
    from .commands import main as run

    return run()
