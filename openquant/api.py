"""compress() and dequantize(): the whole job, open -> plan -> convert -> finish, without printing anything."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from .convert.conversion import worker_memory
from .convert.ranks import Ranks
from .errors import SourceError, UsageError
from .files.checkpoint import Checkpoint, open_checkpoint, readable
from .files.inputs import read_small
from .files.journal import explained, finished_files
from .files.output import refuse_overlap, refuse_root
from .formats.schemes import Scheme, find_others, find_scheme
from .hub.fetch import memory_needed
from .hub.publish import Published, Publisher, Push
from .hub.source import Source, find_source, silent
from .machine import available_cpus, find_device, peak_rss
from .plan.fates import Options
from .plan.plan import Plan, make_plain_plan, make_plan
from .report.result import Result
from .run import Listener, Prepared, attempt, carry_out
from .verification.finished import require_sound

# More do not make a disk faster, and each takes memory.
MOST_WORKERS, MOST_GPU_WORKERS = 16, 4


class Reporter(Listener, Protocol):
    """What compress() tells while it works. Calls may come from any thread, never from two at once."""

    def planned(self, plan: Plan, source: Source, output: Path) -> None:
        """The plan is made; nothing is written yet."""

    def finished(self, result: Result, already_complete: bool) -> None:
        """All is written."""


class _Silent:
    def planned(self, plan: Plan, source: Source, output: Path) -> None: ...

    def started(self, total: int, done: int) -> None: ...

    def advanced(self, nbytes: int) -> None: ...

    def publishing(self, repo: str) -> None: ...

    def finished(self, result: Result, already_complete: bool) -> None: ...


def compress(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    scheme: str = "tensor",
    *,
    format: str | None = None,
    scale_format: str | None = None,
    activation_scheme: str = "dynamic",
    ignore: Sequence[str] = (),
    scheme_for: Mapping[str, str] | None = None,
    tp: int | None = None,
    quantize_lm_head: bool = False,
    architecture: str | None = None,
    dry_run: bool = False,
    device: str = "cpu",
    workers: int | None = None,
    max_memory: int | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    stream: bool = False,
    push: Push | None = None,
    ranks: Ranks | None = None,
    reporter: Reporter | None = None,
) -> Result:
    """Turn a checkpoint into an FP8 directory.

    Args:
        model: a local directory, or a Hub repository `org/name` or `org/name@revision`.
        output: directory to write; if None, in the working directory, named `<name>-FP8`, for channel
            `<name>-FP8-dynamic`, for block `<name>-FP8-W128`, for mxfp8 `<name>-MXFP8`; tensor and block in the
            compressed-tensors format have `-CT` added, block with ue8m0 scales `-UE8M0`, static activations `-static`.
        scheme: "tensor" (one scale per joined set), "channel" (one per output row), "block" (one per 128x128 block)
            or "mxfp8" (one per 32 inputs of a row).
        format: "fp8" or "compressed-tensors", how that is serialized; "fp8" if None, but for channel and mxfp8, which
            have only the other.
        scale_format: "float", or "ue8m0" (scales rounded up to powers of two): for block in the fp8 format either,
            "float" if None; mxfp8 has only the latter, all else only the former.
        activation_scheme: "dynamic", or for tensor "static": with the input_scale tensors of a quantized source.
        ignore: patterns over module names that stay unquantized.
        scheme_for: patterns over module names, each with the scheme of what matches ("tensor", "channel" or "block",
            in the compressed-tensors format); the first that matches counts.
        tp: a tensor-parallel size that must be able to serve the result. Layers that 128x128 blocks do not divide
            for it fall back to one scale per output row, in the fp8 format they stay unquantized.
        quantize_lm_head: also quantize the output head, in the compressed-tensors format.
        architecture: plan by this entry of the registry although config.json names another class; "generic" goes by
            names and shapes alone.
        dry_run: plan only.
        device: where codes are computed: "cpu", "cuda", "cuda:N" or "auto" (a GPU if there is one).
        workers: number of threads; if None the CPUs this process may use, divided by the ranks on this machine, and
            at most 16, with a GPU 4.
        max_memory: bytes that this process may hold in memory; fewer workers are used if need be.
        revision: branch, tag or commit on the Hub.
        overwrite: replace what an earlier run left in `output`.
        stream: keep only a few shards of a Hub repository on disk, and none in the Hub's cache.
        push: publish the output on the Hub.
        ranks: this process among several that do the job together; on its own if None.
        reporter: is told the plan and the progress.

    Returns:
        What was done, or with `dry_run` would be.

    Raises:
        OpenQuantError: something the caller can fix; see errors.py for the kinds.
    """
    if isinstance(ignore, str):
        raise UsageError(f"ignore is {ignore!r}, not a list of patterns", f"give [{ignore!r}]")
    if architecture == "":
        raise UsageError("--architecture is empty", "name an architecture, or leave --architecture out")
    chosen = find_scheme(scheme, format, scale_format, activation_scheme)
    options = Options(tuple(ignore), find_others(chosen, scheme_for or {}), tp, quantize_lm_head)
    return _work(
        model,
        output,
        lambda checkpoint, identity: make_plan(checkpoint, chosen, options, identity, architecture),
        dry_run=dry_run,
        device=device,
        workers=workers,
        max_memory=max_memory,
        revision=revision,
        overwrite=overwrite,
        stream=stream,
        push=push,
        ranks=ranks,
        reporter=reporter,
    )


def dequantize(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    dry_run: bool = False,
    workers: int | None = None,
    max_memory: int | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    stream: bool = False,
    push: Push | None = None,
    ranks: Ranks | None = None,
    reporter: Reporter | None = None,
) -> Result:
    """Turn a quantized checkpoint back into one of bfloat16 weights, whatever its architecture.

    Args:
        model: as for compress(); encoded.py says which formats are read.
        output: directory to write; if None, in the working directory, named `<name>-BF16`.
        dry_run, workers, max_memory, revision, overwrite, stream, push, ranks, reporter: as for compress().

    Returns:
        What was done, or with `dry_run` would be.

    Raises:
        OpenQuantError: nothing in it is quantized, or something else the caller can fix.
    """
    return _work(
        model,
        output,
        make_plain_plan,
        dry_run=dry_run,
        device="cpu",
        workers=workers,
        max_memory=max_memory,
        revision=revision,
        overwrite=overwrite,
        stream=stream,
        push=push,
        ranks=ranks,
        reporter=reporter,
    )


def _work(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    make: Callable[[Checkpoint, str], Plan],
    *,
    dry_run: bool,
    device: str,
    workers: int | None,
    max_memory: int | None,
    revision: str | None,
    overwrite: bool,
    stream: bool,
    push: Push | None,
    ranks: Ranks | None,
    reporter: Reporter | None,
) -> Result:
    """The path that all plans take; `make` makes one of a checkpoint and what identifies it."""
    begin = time.monotonic()
    reporter = reporter or _Silent()
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UsageError(f"{device} is not a device", "choose auto, cpu, cuda or cuda:N")
    if workers is not None and workers < 1:
        raise UsageError(f"{workers} workers cannot work", "give --workers 1 or more")
    ranks = ranks or Ranks()
    with ranks:
        # Connects them, which takes memory that must not come on top of what workers may use.
        ranks.agree(None)

        def prepare() -> Prepared:
            where = "cpu" if dry_run else find_device(device, ranks.local_rank)
            most = MOST_WORKERS if where == "cpu" else MOST_GPU_WORKERS
            count = workers or min(most, max(1, available_cpus() // ranks.local_size))
            return _prepare(os.fspath(model), output, make, revision, stream, count, max_memory, where)

        prepared, error = attempt(prepare)
        seen = ranks.agree(error, prepared and prepared.seen)
        if any(other != seen[0] for other in seen):
            raise SourceError("ranks see different sources", "let all of them read the same files")
        assert prepared is not None
        plan = prepared.plan

        def result(resumed: bool, published: Published | None) -> Result:
            return Result(
                model=os.fspath(model),
                revision=prepared.source.revision,
                output=str(prepared.target),
                scheme=plan.scheme.name,
                schemes={scheme.name: count for scheme, count in plan.schemes.items() if plan.quantization_config},
                architecture=plan.architecture,
                dry_run=dry_run,
                source_bytes=plan.source_bytes,
                output_bytes=plan.output_bytes,
                download_bytes=prepared.source.remote_bytes([*plan.source_shards, *plan.files]),
                repository=published.repository if published else None,
                pushed_to=published.address if published else None,
                pushed_revision=published.revision if published else None,
                quantized_tensors=plan.quantized_tensors,
                decoded_tensors=plan.decoded_tensors,
                ignored_layers=plan.ignored_layers,
                shards=len(plan.shards),
                tensor_parallel=plan.parallel_sizes,
                seconds=round(time.monotonic() - begin, 3),
                peak_rss_bytes=peak_rss(),
                resumed=resumed,
            )

        reporter.planned(plan, prepared.source, prepared.target)
        if dry_run:
            return result(resumed=False, published=None)
        _, error = attempt(lambda: prepared.source.fetch_files(plan.files))
        ranks.agree(error)
        resumed, already_complete, published = carry_out(prepared, ranks, overwrite, push, reporter)
        done = result(resumed, published)
        reporter.finished(done, already_complete)
        return done


def _prepare(
    model: str,
    output: str | os.PathLike[str] | None,
    make: Callable[[Checkpoint, str], Plan],
    revision: str | None,
    stream: bool,
    workers: int,
    max_memory: int | None,
    device: str,
) -> Prepared:
    if output is not None:
        if not os.fspath(output):
            raise UsageError("-o is empty", "give a directory, or leave -o out")
        refuse_root(Path(output))
    source = find_source(model, revision)
    if stream and source.repo is None:
        raise UsageError(f"{model} is a local directory, nothing of it can be streamed", "leave --stream out")
    with _without_collector():
        checkpoint = _without_own_log(open_checkpoint(source.root, source.remote, source.absent), source.absent)
        stamps = source.stamps(checkpoint)
        plan = make(checkpoint, source.identity)
    target = Path(output) if output is not None else _default_output(source, plan.scheme)
    refuse_overlap(source.root, target)
    workers = _affordable(workers, plan, max_memory, memory_needed(source, stream), device)
    return Prepared(source, checkpoint, stamps, plan, target, workers, device, stream)


def _without_own_log(checkpoint: Checkpoint, absent: Container[str]) -> Checkpoint:
    """The checkpoint but for a file that this process writes its messages to, as with `> convert.log` inside it."""
    streams = []
    for handle in (1, 2):
        with suppress(OSError):
            streams.append(os.fstat(handle))
    with readable():
        logs = {
            name
            for name in checkpoint.files
            if name not in absent
            and any(os.path.samestat((checkpoint.root / name).stat(), stream) for stream in streams)
        }
    files = {name: size for name, size in checkpoint.files.items() if name not in logs}
    return replace(checkpoint, files=files, left_out=tuple(sorted({*checkpoint.left_out, *logs})))


def _affordable(workers: int, plan: Plan, max_memory: int | None, fetching: int, device: str) -> int:
    """As many of the workers as the memory allows.

    Raises:
        UsageError: it does not allow one.
    """
    if max_memory is None:
        return workers
    held, each = peak_rss() + fetching, worker_memory(plan, device)
    if max_memory < held + each:
        raise UsageError(
            f"a memory of {max_memory:,} bytes is too little: this model takes {held + each:,} with a single worker",
            "give a larger --max-memory",
        )
    return min(workers, (max_memory - held) // each)


@contextmanager
def _without_collector() -> Iterator[None]:
    """A plan is millions of objects without a cycle; looking for some over and over takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def push(directory: str | os.PathLike[str], target: Push) -> str:
    """Publish a directory that compress() made.

    Args:
        directory: the directory; it must be finished.
        target: where to.

    Returns:
        The address of the commit or pull request.

    Raises:
        OpenQuantError: it is not finished or damaged, or cannot be published.
    """
    path = Path(directory)
    digest, files = finished_files(path)
    require_sound(path, files)
    shards = [name for name in files if name.endswith(".safetensors")]
    publisher = Publisher(target, path, digest, shards)
    with silent():
        with explained(path, "read"):
            publisher.prepare(read_small(path / "README.md", f"{path}/README.md"))
        with publisher:
            return publisher.finish(sorted(files - set(shards)), path.resolve().name).address


def _default_output(source: Source, scheme: Scheme) -> Path:
    name = source.name + scheme.suffix
    here = Path.cwd().resolve()
    root = source.root.resolve()
    # From inside the source (`-m .`) the output goes beside it, since it must not lie in it.
    return root.parent / name if here == root or root in here.parents else Path(name)
