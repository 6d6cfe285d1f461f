"""Entry points of the commands. They handle signals before anything large is imported.

Until commands.py takes over nothing has begun, so a signal simply ends the process.
"""

from .interrupts import listen


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
