"""compress(): the whole job, open -> plan -> convert -> finish, without printing anything."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from .card import model_card
from .checkpoint import INDEX_FILE, Checkpoint, open_checkpoint, readable
from .convert import convert, worker_memory
from .errors import SourceError, UsageError
from .fates import Options
from .fetch import MEMORY as FETCH_MEMORY
from .fetch import Supply, scratch_bytes, source_needs
from .hub import Source, find_source, silent
from .output import SOURCE, WORK, OutputDirectory, finished_files, refuse_overlap
from .plan import Plan, make_plan
from .publish import AT_ONCE, Publisher, Push
from .ranks import Ranks
from .schemes import Scheme, find_others, find_scheme


@dataclass(frozen=True)
class Result:
    """What a run did, or a dry run would do.

    Attributes:
        model: as it was asked for.
        revision: the source's commit on the Hub, or None.
        output: the output directory.
        scheme: "tensor", "channel", "block" or "mxfp8".
        schemes: number of weights stored in each scheme: that one, and others that some layers have instead.
        architecture: the registry's entry that the plan was made by.
        dry_run: whether nothing was written.
        source_bytes: size of the source's tensors.
        output_bytes: size of the output's tensors.
        download_bytes: size of the shards that are fetched from the Hub.
        repository: the Hub repository that the output was published in; None if it was not.
        pushed_to: address of the commit or pull request that published the output; None if it was not.
        quantized_tensors: number of weights stored as float8_e4m3fn.
        ignored_layers: what quantization_config lists as left out.
        shards: number of output shards.
        tensor_parallel: the tensor-parallel sizes, of 1 to 16 and the one asked for, that can serve the result.
        seconds: wall time.
        peak_rss_bytes: largest resident memory of the process so far.
        resumed: whether an earlier run's work was continued, or already complete.
    """

    model: str
    revision: str | None
    output: str
    scheme: str
    schemes: dict[str, int]
    architecture: str
    dry_run: bool
    source_bytes: int
    output_bytes: int
    download_bytes: int
    repository: str | None
    pushed_to: str | None
    quantized_tensors: int
    ignored_layers: list[str]
    shards: int
    tensor_parallel: list[int]
    seconds: float
    peak_rss_bytes: int
    resumed: bool

    def to_json(self) -> dict[str, Any]:
        """The same as a dictionary."""
        return asdict(self)


class Reporter(Protocol):
    """What compress() tells while it works. Calls may come from any thread, never from two at once."""

    def planned(self, plan: Plan, source: Source, output: Path) -> None:
        """The plan is made; nothing is written yet."""

    def started(self, total: int, done: int) -> None:
        """Conversion begins: bytes of source weights in all, and those an earlier run converted."""

    def advanced(self, nbytes: int) -> None:
        """So many more bytes of the source are converted."""

    def publishing(self, repo: str) -> None:
        """All is converted; what is not uploaded yet goes to that repository."""

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
    ignore: Sequence[str] = (),
    scheme_for: Mapping[str, str] | None = None,
    tp: int | None = None,
    quantize_lm_head: bool = False,
    architecture: str | None = None,
    dry_run: bool = False,
    device: str = "auto",
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
            compressed-tensors format have `-CT` added, block with ue8m0 scales `-UE8M0`.
        scheme: "tensor" (one scale per joined set), "channel" (one per output row), "block" (one per 128x128 block)
            or "mxfp8" (one per 32 inputs of a row).
        format: "fp8" or "compressed-tensors", how that is serialized; "fp8" if None, but for channel and mxfp8, which
            have only the other.
        scale_format: "float", or "ue8m0" (scales rounded up to powers of two): for block in the fp8 format either,
            "float" if None; mxfp8 has only the latter, all else only the former.
        ignore: patterns over module names that stay unquantized.
        scheme_for: patterns over module names, each with the scheme of what matches ("tensor", "channel" or "block",
            in the compressed-tensors format); the first that matches counts.
        tp: a tensor-parallel size that must be able to serve the result. Layers that 128x128 blocks do not divide
            for it fall back to one scale per output row, in the fp8 format they stay unquantized.
        quantize_lm_head: also quantize the output head, in the compressed-tensors format.
        architecture: plan by this entry of the registry although config.json names another class; "generic" goes by
            names and shapes alone.
        dry_run: plan only.
        device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N".
        workers: number of threads; the CPUs this process may use if None, divided by the ranks on this machine.
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
    begin = time.monotonic()
    reporter = reporter or _Silent()
    chosen = find_scheme(scheme, format, scale_format)
    options = Options(tuple(ignore), find_others(chosen, scheme_for or {}), tp, quantize_lm_head)
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UsageError(f"{device} is not a device", "choose auto, cpu, cuda or cuda:N")
    if workers is not None and workers < 1:
        raise UsageError(f"{workers} workers cannot work", "give --workers 1 or more")
    ranks = ranks or Ranks()
    workers = workers or max(1, available_cpus() // ranks.local_size)
    with closing(ranks):
        prepared, error = _attempt(
            lambda: _prepare(
                os.fspath(model), output, chosen, options, architecture, revision, stream, workers, max_memory
            )
        )
        digests = ranks.agree(error, prepared and prepared.plan.digest)
        if len(set(digests)) > 1:
            raise SourceError("ranks see different sources", "let all of them read the same files")
        assert prepared is not None
        plan = prepared.plan

        def result(resumed: bool, published: tuple[str, str] | None) -> Result:
            return Result(
                model=os.fspath(model),
                revision=prepared.source.revision,
                output=str(prepared.target),
                scheme=chosen.name,
                schemes={scheme.name: count for scheme, count in plan.schemes.items()},
                architecture=plan.architecture,
                dry_run=dry_run,
                source_bytes=plan.source_bytes,
                output_bytes=plan.output_bytes,
                download_bytes=prepared.source.remote_bytes(plan.source_shards),
                repository=published and published[0],
                pushed_to=published and published[1],
                quantized_tensors=plan.quantized_tensors,
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
        resumed, already_complete, published = _carry_out(prepared, ranks, overwrite, device, push, reporter)
        done = result(resumed, published)
        reporter.finished(done, already_complete)
        return done


@dataclass(frozen=True)
class _Prepared:
    """What a run needs to begin writing."""

    source: Source
    checkpoint: Checkpoint
    identity: str
    plan: Plan
    target: Path
    workers: int
    stream: bool


def _prepare(
    model: str,
    output: str | os.PathLike[str] | None,
    scheme: Scheme,
    options: Options,
    architecture: str | None,
    revision: str | None,
    stream: bool,
    workers: int,
    max_memory: int | None,
) -> _Prepared:
    source = find_source(model, revision)
    if stream and source.repo is None:
        raise UsageError(f"{model} is a local directory, nothing of it can be streamed", "leave --stream out")
    with _without_collector():
        checkpoint = open_checkpoint(source.root, source.remote)
        identity = source.identity(checkpoint)
        plan = make_plan(checkpoint, scheme, options, identity, architecture)
    if output is not None and not os.fspath(output):
        raise UsageError("-o is empty", "give a directory, or leave -o out")
    target = Path(output) if output is not None else _default_output(source, scheme)
    refuse_overlap(source.root, target)
    fetching = FETCH_MEMORY if stream and source.remote else 0
    workers = _affordable(workers, plan, max_memory, fetching)
    return _Prepared(source, checkpoint, identity, plan, target, workers, stream)


def _affordable(workers: int, plan: Plan, max_memory: int | None, fetching: int) -> int:
    """As many of the workers as the memory allows.

    Raises:
        UsageError: it does not allow one.
    """
    if max_memory is None:
        return workers
    held, each = peak_rss() + fetching, worker_memory(plan)
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


Made = TypeVar("Made")


def _attempt(do: Callable[[], Made]) -> tuple[Made | None, Exception | None]:
    """What `do` returns or raises, so that the other ranks can be told before anything else happens."""
    try:
        return do(), None
    except Exception as error:
        return None, error


def push(directory: str | os.PathLike[str], target: Push) -> str:
    """Publish a directory that compress() made.

    Args:
        directory: the directory; it must be finished.
        target: where to.

    Returns:
        The address of the commit or pull request.

    Raises:
        OpenQuantError: it is not finished, or cannot be published.
    """
    path = Path(directory)
    digest, files = finished_files(path)
    shards = [name for name in files if name.endswith(".safetensors")]
    publisher = Publisher(target, path, digest, shards)
    with silent():
        publisher.prepare(None)
        with publisher:
            return publisher.finish(sorted(files - set(shards)), path.resolve().name)


class _Traffic:
    """Shards from the supply to the publisher, if there is one."""

    def __init__(self, supply: Supply, publisher: Publisher | None) -> None:
        self.supply = supply
        self.publisher = publisher
        self.path = supply.path

    def wait_for(self, output: str, stopped: Callable[[], bool]) -> None:
        if self.publisher is not None:
            self.publisher.wait_for_room(output, stopped)
        self.supply.wait_for(output, stopped)

    def finished(self, output: str) -> None:
        self.supply.finished(output)
        if self.publisher is not None:
            self.publisher.finished(output)


def _carry_out(
    prepared: _Prepared, ranks: Ranks, overwrite: bool, device: str, push: Push | None, reporter: Reporter
) -> tuple[bool, bool, tuple[str, str] | None]:
    """Write the output; whether an earlier run was continued, or had left nothing to do, and where it was pushed."""
    plan, source = prepared.plan, prepared.source
    shards = {shard.name: shard.nbytes for shard in plan.shards}
    # Made before anything is converted, so that nothing about them can fail after hours.
    made = _made_files(prepared)
    others = {**plan.files, **{name: len(data) for name, data in made.items()}}
    publisher = Publisher(push, prepared.target, plan.digest, shards) if push else None
    directory = OutputDirectory(
        prepared.target,
        plan.digest,
        shards,
        others,
        overwrite,
        elsewhere=publisher.elsewhere() if publisher else frozenset(),
        at_once=AT_ONCE if push and push.only else None,
        scratch=scratch_bytes(source, source_needs(source, plan)) * ranks.size if prepared.stream else 0,
    )
    chosen: list[str] = []
    with ExitStack() as stack:
        if source.remote or publisher:
            stack.enter_context(silent())

        def claim() -> tuple[list[str] | None, str]:
            """The unfinished shards, None if nothing at all is left to do, and where to push; for the first to say."""
            chosen.append(_device(device, ranks))
            if not ranks.first:
                return None, ""
            stack.enter_context(directory)
            if publisher:
                publisher.prepare(source.repo)
            unfinished = [name for name in shards if not directory.is_finished(name)]
            return None if directory.complete else unfinished, publisher.repo if publisher else ""

        claimed, error = _attempt(claim)
        told = ranks.agree(error, claimed)[0]
        assert told is not None
        todo, repo = told
        if publisher:
            publisher.repo = repo
            stack.enter_context(publisher)
        if todo is not None:
            names, where = set(todo), prepared.checkpoint.where
            mine = ranks.share([shard for shard in plan.shards if shard.name in names])
            done_bytes = sum(
                info.nbytes for info in prepared.checkpoint.tensors.values() if where[info.name].shard not in names
            )
            reporter.started(plan.source_bytes, done_bytes)

            def work() -> None:
                needs = source_needs(source, plan, [shard.name for shard in mine])
                scratch = prepared.target / WORK / f"{SOURCE}{ranks.rank}" if prepared.stream else None
                if source.remote and scratch is None:
                    source.require_cache_space({name for names in needs.values() for name in names})
                with Supply(source, needs, scratch) as supply:
                    traffic = _Traffic(supply, publisher)
                    convert(plan, mine, traffic, directory, prepared.workers, chosen[0], reporter.advanced)
                if publisher:
                    publisher.drain()

            _, error = _attempt(work)
            ranks.agree(error)

        def finish() -> tuple[str, str] | None:
            if not ranks.first:
                return None
            if todo is not None:
                _write_others(prepared, directory, made)
                directory.finish()
            if publisher is None:
                return None
            reporter.publishing(publisher.repo)
            title = f"{source.name} in FP8 ({plan.title})"
            return publisher.repo, publisher.finish(sorted(others), title)

        published, error = _attempt(finish)
        ranks.agree(error)
    return directory.resumed, todo is None, published


def _made_files(prepared: _Prepared) -> dict[str, bytes]:
    """The files that are written rather than copied, config.json last: without it no engine takes this for a model."""
    made = {"README.md": _card(prepared.plan, prepared.source)}
    if prepared.plan.indexed:
        made[INDEX_FILE] = _index(prepared.plan)
    made["config.json"] = _config(prepared.checkpoint, prepared.plan)
    return made


def _write_others(prepared: _Prepared, directory: OutputDirectory, made: dict[str, bytes]) -> None:
    if prepared.source.identity(prepared.checkpoint) != prepared.identity:
        raise SourceError(
            f"{prepared.source.root} changed while it was being converted",
            "wait until nothing writes to it, then run again with --overwrite",
        )
    for name in prepared.plan.files:
        if name not in made and not directory.is_finished(name):
            directory.copy(prepared.source.root / name, name)
    for name, data in made.items():
        if not directory.is_finished(name):
            directory.write(name, data)


def _card(plan: Plan, source: Source) -> bytes:
    base = None
    if "README.md" in plan.files:
        with readable():
            base = (source.root / "README.md").read_text(encoding="utf-8-sig", errors="replace")
    return model_card(base, plan, source.name, source.repo, source.revision).encode()


def _index(plan: Plan) -> bytes:
    placed = {info.name: shard.name for shard in plan.shards for info in plan.outputs(shard.name)}
    index = {"metadata": {"total_size": plan.output_bytes}, "weight_map": dict(sorted(placed.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def _config(checkpoint: Checkpoint, plan: Plan) -> bytes:
    config = {**checkpoint.config, "quantization_config": plan.quantization_config}
    try:
        return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair, which JSON can only hold escaped.
        return (json.dumps(config, indent=2) + "\n").encode()


def _default_output(source: Source, scheme: Scheme) -> Path:
    name = source.name + scheme.suffix
    here = Path.cwd().resolve()
    root = source.root.resolve()
    # From inside the source (`-m .`) the output goes beside it, since it must not lie in it.
    return root.parent / name if here == root or root in here.parents else Path(name)


def _device(name: str, ranks: Ranks) -> str:
    if name == "cpu":
        return "cpu"
    # Importing torch to learn that there is no GPU would cost more than a small conversion.
    if name == "auto" and not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))):
        return "cpu"
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = int(name[5:]) if name.startswith("cuda:") else ranks.local_rank % max(1, count)
    if number < count:
        return f"cuda:{number}"
    if name == "auto":
        return "cpu"
    raise UsageError(f"there is no {name}: torch {torch.__version__} sees {count} GPUs", "use --device cpu")


def available_cpus() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_rss() -> int:
    """Largest resident memory of this process so far, in bytes."""
    try:
        # ru_maxrss begins at the parent's size; this does not.
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
