"""What a run reports: its progress, as callbacks; its result, which `--json` prints; and what a dry run would do."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .patterns import collapse

if TYPE_CHECKING:
    from .files.destination import DiskSpace
    from .hub.source import Source
    from .plan.plan import Plan


def zero_notes(modules: Iterable[str]) -> list[str]:
    """Write a note on layers of zeros, as a part of a file has that was never downloaded.

    Args:
        modules: modules whose weights are all zero.

    Returns:
        A list of one note; empty if there are none.
    """
    names = collapse(modules)
    return [f"all weights are zero: {', '.join(names)}"] if names else []


def lost_notes(modules: Iterable[str]) -> list[str]:
    """Write a note on layers that lost many of their weights, because others that share a scale are so large.

    Args:
        modules: modules of which far more weights than usual became zero as they were quantized.

    Returns:
        A list of one note; empty if there are none.
    """
    names = collapse(modules)
    lost = f"far more weights than usual became 0, beside much larger ones that share their scale: {', '.join(names)}"
    return [f"{lost}; --ignore leaves such layers as they are"] if names else []


@dataclass(frozen=True)
class Result:
    """What a run did, or what it would do with --dry-run.

    Attributes:
        model: the source as the user named it.
        revision: the source's commit on the Hub; None for a local directory.
        output: the output directory.
        scheme: name of the scheme, such as "tensor"; "bf16" for a run that dequantizes.
        schemes: number of weights in each scheme: the one above, and those of single layers (--scheme-for).
        kv_cache: "fp8" if the output has scales for an FP8 KV cache, else "auto".
        folded: description of the smoothing by SmoothQuant or AWQ, "SmoothQuant 0.5: inputs divided by powers of two
            in 16 norms and projections"; None without it.
        architecture: name of the registry's entry that the plan follows.
        dry_run: whether nothing was written.
        source_bytes: size of the source's tensors in bytes.
        output_bytes: size of the output's tensors in bytes.
        download_bytes: bytes of the shards and other files that are fetched from the Hub.
        disk_bytes: the most bytes that the run has to write to the disk of its output at a time, the output included; 0
            if it was complete already.
        repository: Hub repository that the output was published in; None if it was not published.
        pushed_to: address of the commit or pull request that published the output; None if it was not published.
        pushed_revision: revision of the output while a pull request is open, such as "refs/pr/1"; None for main.
        quantized_tensors: number of weights that are stored quantized.
        decoded_tensors: number of weights that are quantized in the source and unquantized in the output.
        ignored_layers: the ignore list of quantization_config.
        shards: number of output shards.
        tensor_parallel: tensor-parallel sizes that can serve the output, among 1 to 16 and --tp.
        serving: GPUs and memory to serve the source and the output (docs/serving.md); None for a run that dequantizes.
        seconds: wall time in seconds.
        peak_rss_bytes: peak resident memory of the process in bytes.
        resumed: whether an earlier run was continued, or had completed the output.
        not_finite: unquantized tensors that hold NaN or infinity, by their name in the output:
            {"model.norm.weight": "NaN (3 values)"}. Empty if the output was complete already, as nothing is read then.
        unread_shards: number of shards that were not checked for this, as an earlier run has written them.
        notes: remarks on the plan and on the model, as the command prints them after "note:". The last name
            layers of zeros, and layers of which many weights became zero.
        engines: the engines that load the output: ["vLLM", "SGLang"].
        fit: what `fit` chose from, with the keys that `fit --search --json` prints; None without it.
    """

    model: str
    revision: str | None
    output: str
    scheme: str
    schemes: dict[str, int]
    kv_cache: str
    folded: str | None
    architecture: str
    dry_run: bool
    source_bytes: int
    output_bytes: int
    download_bytes: int
    disk_bytes: int
    repository: str | None
    pushed_to: str | None
    pushed_revision: str | None
    quantized_tensors: int
    decoded_tensors: int
    ignored_layers: list[str]
    shards: int
    tensor_parallel: list[int]
    serving: dict[str, Any] | None
    seconds: float
    peak_rss_bytes: int
    resumed: bool
    not_finite: dict[str, str] = field(default_factory=dict)
    unread_shards: int = 0
    notes: list[str] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)
    fit: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name, as `--json` prints them."""
        return asdict(self)

    def __repr__(self) -> str:
        would = "would write" if self.dry_run else "wrote"
        sizes = f"{_bytes(self.source_bytes)} -> {_bytes(self.output_bytes)}"
        return f"<Result: {would} {self.output}, {self.scheme}, {sizes}>"


def _bytes(count: int) -> str:
    """Such as "8.39 MB"."""
    unit, size = ("GB", 1e9) if count >= 1e9 else ("MB", 1e6)
    return f"{count / size:.3g} {unit}"


class Reporter:
    """Callbacks of the functions that take a `reporter`. The methods of this class do nothing.

    Override those that you need. They may be called from any thread, but never by two at once. An exception that one of
    them raises ends the run. A run calls only those whose work it has to do. compress() and dequantize() call them in
    the order below; GPTQ reports as a calibration does, after the second plan. The other functions call `on_note`,
    `on_progress`.
    """

    def on_disk_space(self, space: DiskSpace) -> None:
        """Called with the disk space that the run needs, once, before the first `on_plan`.

        It is not called if the run will be refused because of its output directory.
        """

    def on_plan(self, plan: Plan, source: Source, output: Path) -> None:
        """Called when the plan is made, before anything is written.

        A run that calibrates or rounds by GPTQ calls it once more, with the final plan.
        """

    def on_note(self, about: str) -> None:
        """Called when a calibration, an evaluation or a download begins.

        Args:
            about: a line that describes it, such as its texts.
        """

    def on_progress(self, done: int, total: int, unit: str = "tokens") -> None:
        """Called as a calibration or the work of another function advances, from 0 on.

        Args:
            done: what is done. A token that is through layers of half the cost counts half; each pass of it counts.
            total: all there is to do.
            unit: "tokens", "layers" or "bytes".
        """

    def on_start(self, total: int, done: int) -> None:
        """Called when the conversion begins.

        Args:
            total: bytes of all tensors of the output.
            done: bytes that an earlier run has written.
        """

    def on_advance(self, nbytes: int) -> None:
        """Called when `nbytes` more bytes of the output are written; it may be 0."""

    def on_publishing(self, repo: str) -> None:
        """Called when everything is converted, before the rest of it is uploaded to the Hub repository `repo`."""

    def on_finish(self, result: Result, already_complete: bool) -> None:
        """Called when everything is written and published; `already_complete` if nothing was left to do."""


class NotebookReporter(Reporter):
    """Shows the progress of a call as bars, as notebooks draw them. It is the reporter there if none is given."""

    def __init__(self) -> None:
        self._bar: Any = None

    def on_note(self, about: str) -> None:
        """Print it."""
        print(about)

    def on_progress(self, done: int, total: int, unit: str = "tokens") -> None:
        """Draw the bar; a new one for other work, as another pass over the same texts is."""
        if self._bar is None or self._bar.total != total or done < self._bar.n:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, unit=f" {unit}")
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()

    def on_start(self, total: int, done: int) -> None:
        """Draw the bar of the conversion."""
        self._bar = None
        self.on_progress(done, total, "bytes")

    def on_advance(self, nbytes: int) -> None:
        """Move it on."""
        self.on_progress(self._bar.n + nbytes, self._bar.total)


def default_reporter() -> Reporter:
    """Return the reporter of a call that was given none: in a notebook it draws bars."""
    return NotebookReporter() if "ipykernel" in sys.modules else Reporter()
