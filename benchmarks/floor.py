"""The least that a conversion takes: reads a source, writes as many bytes as an output has, and computes nothing.

    python benchmarks/floor.py SOURCE OUTPUT --bytes 3600000000 --workers 2

Each file is read in pieces by several threads, through the page cache as openquant reads, and after each piece its
share of the output is written, around the cache (O_DIRECT) where the file system can. All of it is on disk at the end.
"""

from __future__ import annotations

import argparse
import errno
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

# Of a piece that is read; what is written keeps to whole blocks of a disk.
PIECE, BLOCK = 8 << 20, 4096


@dataclass(frozen=True)
class Piece:
    """A range of a source file, and the range of its output that is written for it."""

    source: int
    start: int
    end: int
    output: int
    first: int
    last: int


def pieces(source: int, output: int, nbytes: int, written: int) -> list[Piece]:
    """All of a file; the end of its output is rounded up to a block."""
    cuts = [*range(0, nbytes, PIECE), nbytes]
    places = [written * cut // nbytes // BLOCK * BLOCK for cut in cuts[:-1]] + [-(-written // BLOCK) * BLOCK]
    return [
        Piece(source, start, end, output, first, last)
        for (start, end), (first, last) in zip(pairwise(cuts), pairwise(places), strict=True)
    ]


class Carrier(threading.local):
    """One thread's memory, which lies as direct writes want it."""

    def __init__(self, size: int) -> None:
        self.view = memoryview(mmap.mmap(-1, size))

    def carry(self, piece: Piece) -> None:
        """Read a piece, and write its share of the output from the same memory."""
        done = piece.start
        while done < piece.end:
            count = os.preadv(piece.source, [self.view[: piece.end - done]], done)
            if not count:
                raise EOFError("the source ends early")
            done += count
        done = piece.first
        while done < piece.last:
            done += os.pwritev(piece.output, [self.view[: piece.last - done]], done)


def open_output(path: Path) -> int:
    """A new file, written around the page cache if that can be done."""
    how = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, how | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)
        return os.open(path, how)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--bytes", type=int, required=True, help="of the output")
    parser.add_argument("--workers", type=int, required=True, help="threads")
    options = parser.parse_args()
    options.output.mkdir()
    paths = sorted(path for path in options.source.iterdir() if path.stat().st_size)
    total = sum(path.stat().st_size for path in paths)
    todo: list[Piece] = []
    sizes: dict[int, int] = {}
    sources = []
    for path in paths:
        nbytes = path.stat().st_size
        output = open_output(options.output / path.name)
        sources.append(os.open(path, os.O_RDONLY))
        sizes[output] = options.bytes * nbytes // total
        os.ftruncate(output, sizes[output])
        todo += pieces(sources[-1], output, nbytes, sizes[output])
    carrier = Carrier(max(PIECE, *(piece.last - piece.first for piece in todo)))
    with ThreadPoolExecutor(options.workers) as threads:
        for _ in threads.map(carrier.carry, todo):
            pass
        for _ in threads.map(lambda output: (os.ftruncate(output, sizes[output]), os.fsync(output)), sizes):
            pass
    for handle in (*sources, *sizes):
        os.close(handle)
    directory = os.open(options.output, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


if __name__ == "__main__":
    main()
