"""compress(): the whole job, open -> plan -> convert -> finish, without printing anything."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from .card import model_card
from .checkpoint import INDEX_FILE, Checkpoint, open_checkpoint
from .convert import convert
from .errors import UsageError
from .hub import Source, find_source
from .output import OutputDirectory, refuse_overlap
from .plan import Plan, make_plan
from .schemes import SCHEMES, Scheme

# What config.json, the index, the card and the journal take up at most, beside the shards.
SMALL_FILES = 4 << 20


@dataclass(frozen=True)
class Result:
    """What a run did, or a dry run would do.

    Attributes:
        model: as it was asked for.
        revision: the source's commit on the Hub, or None.
        output: the output directory.
        scheme: "tensor" or "block".
        architecture: the source's class.
        dry_run: whether nothing was written.
        source_bytes: size of the source's tensors.
        output_bytes: size of the output's tensors.
        quantized_tensors: number of weights stored as float8_e4m3fn.
        ignored_layers: what quantization_config lists under that name.
        shards: number of output shards.
        tensor_parallel: the tensor-parallel sizes, of 1 to 16, that can serve the result.
        seconds: wall time.
        peak_rss_bytes: largest resident memory of the process so far.
        resumed: whether an earlier run's work was continued, or already complete.
    """

    model: str
    revision: str | None
    output: str
    scheme: str
    architecture: str
    dry_run: bool
    source_bytes: int
    output_bytes: int
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

    def finished(self, result: Result, already_complete: bool) -> None:
        """All is written."""


class _Silent:
    def planned(self, plan: Plan, source: Source, output: Path) -> None: ...

    def started(self, total: int, done: int) -> None: ...

    def advanced(self, nbytes: int) -> None: ...

    def finished(self, result: Result, already_complete: bool) -> None: ...


def compress(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    scheme: str = "tensor",
    *,
    ignore: Sequence[str] = (),
    dry_run: bool = False,
    device: str = "auto",
    workers: int | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    reporter: Reporter | None = None,
) -> Result:
    """Turn a checkpoint into an FP8 directory.

    Args:
        model: a local directory, or a Hub repository `org/name` or `org/name@revision`.
        output: directory to write; `<name>-FP8` or `<name>-FP8-W128` in the working directory if None.
        scheme: "tensor" (one scale per joined set) or "block" (one per 128x128 block).
        ignore: patterns over module names that stay unquantized.
        dry_run: plan only.
        device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N".
        workers: number of threads; the CPUs this process may use if None.
        revision: branch, tag or commit on the Hub.
        overwrite: replace what an earlier run left in `output`.
        reporter: is told the plan and the progress.

    Returns:
        What was done, or with `dry_run` would be.

    Raises:
        OpenQuantError: something the caller can fix; see errors.py for the kinds.
    """
    begin = time.monotonic()
    reporter = reporter or _Silent()
    chosen = _scheme(scheme)
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UsageError(f"{device} is not a device", "choose auto, cpu, cuda or cuda:N")
    if workers is not None and workers < 1:
        raise UsageError(f"{workers} workers cannot work", "give --workers 1 or more")
    source = find_source(os.fspath(model), revision)
    checkpoint = open_checkpoint(source.root)
    plan = make_plan(checkpoint, chosen, tuple(ignore), source.identity())
    target = Path(output) if output is not None else _default_output(source, chosen)
    refuse_overlap(source.root, target)

    def result(resumed: bool) -> Result:
        return Result(
            model=os.fspath(model),
            revision=source.revision,
            output=str(target),
            scheme=chosen.name,
            architecture=plan.architecture,
            dry_run=dry_run,
            source_bytes=plan.source_bytes,
            output_bytes=plan.output_bytes,
            quantized_tensors=plan.quantized_tensors,
            ignored_layers=plan.ignored_layers,
            shards=len(plan.shards),
            tensor_parallel=plan.parallel_sizes,
            seconds=round(time.monotonic() - begin, 3),
            peak_rss_bytes=peak_rss(),
            resumed=resumed,
        )

    reporter.planned(plan, source, target)
    if dry_run:
        return result(resumed=False)
    chosen_device = _device(device)
    shards = {shard.name: shard.size for shard in plan.shards}
    others = {*plan.files, "README.md", "config.json", *([INDEX_FILE] if plan.indexed else [])}
    other_bytes = sum(plan.files.values()) + SMALL_FILES
    with OutputDirectory(target, plan.digest, shards, others, other_bytes, overwrite) as directory:
        already_complete = directory.complete
        if not already_complete:
            _fill(plan, checkpoint, source, directory, workers or available_cpus(), chosen_device, reporter)
        directory.finish()
    done = result(resumed=directory.resumed)
    reporter.finished(done, already_complete)
    return done


def _fill(
    plan: Plan,
    checkpoint: Checkpoint,
    source: Source,
    directory: OutputDirectory,
    workers: int,
    device: str,
    reporter: Reporter,
) -> None:
    finished = {shard.name for shard in plan.shards if directory.is_finished(shard.name)}
    finished_bytes = sum(
        info.nbytes for name, info in checkpoint.tensors.items() if checkpoint.where[name].shard in finished
    )
    reporter.started(plan.source_bytes, finished_bytes)
    convert(plan, source.root, directory, workers, device, reporter.advanced)
    for name in plan.files:
        if name not in ("README.md", "config.json") and not directory.is_finished(name):
            directory.copy(source.root / name, name)
    directory.write("README.md", _card(plan, source))
    if plan.indexed:
        directory.write(INDEX_FILE, _index(plan))
    # Last: without it no engine takes the directory for a model.
    directory.write("config.json", _config(checkpoint, plan))


def _card(plan: Plan, source: Source) -> bytes:
    try:
        base = (source.root / "README.md").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        base = None
    return model_card(base, plan, source.name, source.repo, source.revision).encode()


def _index(plan: Plan) -> bytes:
    placed = {info.name: shard.name for shard in plan.shards for info, _ in shard.tensors}
    index = {"metadata": {"total_size": plan.output_bytes}, "weight_map": dict(sorted(placed.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def _config(checkpoint: Checkpoint, plan: Plan) -> bytes:
    config = {**checkpoint.config, "quantization_config": plan.quantization_config}
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _scheme(name: str) -> Scheme:
    if name not in SCHEMES:
        raise UsageError(f"{name} is not a scheme", f"choose one of {', '.join(SCHEMES)}")
    return SCHEMES[name]


def _default_output(source: Source, scheme: Scheme) -> Path:
    name = source.name + scheme.suffix
    here = Path.cwd().resolve()
    root = source.root.resolve()
    # From inside the source (`-m .`) the output goes beside it, since it must not lie in it.
    return root.parent / name if here == root or root in here.parents else Path(name)


def _device(name: str) -> str:
    if name == "cpu":
        return "cpu"
    # Importing torch to learn that there is no GPU would cost more than a small conversion.
    if name == "auto" and not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))):
        return "cpu"
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = int(name[5:]) if name.startswith("cuda:") else 0
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
