"""`openquant fit --search`: size and KL divergence of mixtures and of single schemes, measured on the model itself.

    found = search_mixtures("Qwen/Qwen3-32B", "4090")
    [(point.name, point.bytes, point.kl) for point in found.points]

Tables, pages and cards show these points.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ..distributed import Ranks
from ..evaluation.kl import DocumentRecord, bootstrap_interval, mean_kl
from ..job import open_source
from ..options import Recipe, Run, Search, Texts, verb
from ..plan import summary
from ..plan.architecture import text_config
from ..plan.decisions import PlanOptions
from ..result import Reporter
from ..streaming.memory import memory_left
from .budget import read_gpus, weights_on_gpus
from .menu import BestMixtures, Menu, Mixture, bits_per_weight, make_menu
from .session import Session
from .table import Point, SearchResult


@verb(Search, positional=("model", "gpu"))
def search_mixtures(request: Search, reporter: Reporter | None = None) -> SearchResult:
    """Measure mixtures of all sizes, and the single schemes, on texts that no score is from.

    The scores are kept beside the default output in `NAME.scores.json`, where `compress --fit` finds them. Nothing else
    is written. Weights are rounded to nearest.

    Args:
        model: Model directory, GGUF file, or Hub org/name[@rev].
        reporter: receives notes and progress; nothing is reported if None.

    Returns:
        The measured points, the smallest first.

    Raises:
        OpenQuantError: no scheme can be used for this model, there is no such GPU, or something else that the caller
            can fix.
    """
    reporter = reporter or Reporter()
    budget = None if request.gpu is None else read_gpus(request.gpu)
    run = Run(request.model, device=request.device, stream=request.stream, revision=request.revision)
    opened = open_source(run, Ranks())

    fp8 = request.kv_cache == "fp8"
    options = PlanOptions(tuple(request.ignore), head=request.quantize_lm_head, embedding=request.quantize_embeddings)
    wanted_engines = request.engines or "both"
    gpu_type = None if budget is None else budget.gpu
    menu = make_menu(opened, options, request.candidates, wanted_engines, gpu_type, request.architecture)

    limit = None
    # How much memory a CPU has for weights is not known.
    if budget is not None and budget.value:
        config = text_config(menu.plan.decoded, menu.plan.model)
        limit = weights_on_gpus(budget, menu.plan, config, request.context, fp8)

    directory = opened.source.default_path("x").absolute().parent
    texts = Texts(request.text, dataset=request.dataset)
    session = Session(opened, menu, texts, directory, request.stream, request.max_memory, Ranks(), reporter)
    fills = limit is not None and menu.smallest <= limit < menu.largest
    compared = len(menu.plans) + len(whole_and_half_bits(menu)) + fills
    memory_left(request.max_memory, session.steps(compared))

    best = BestMixtures(menu, session.scores())
    named = mixtures_of_sizes(menu, best)
    if limit is not None and fills:
        named[f"fits {request.gpu}"] = best.best(limit)

    corpus = session.corpus()
    reporter.on_note(f"--search: comparing {len(named)} outputs on {corpus.described}")
    records = session.measure(corpus, list(named.values()))
    asked = Asked(
        request.model,
        request,
        request.gpu,
        request.context,
        request.engines,
        request.candidates,
        request.text,
        request.dataset,
    )
    make = Points(best, asked, limit).point
    points = [make(name, mixture, found) for (name, mixture), found in zip(named.items(), records, strict=True)]
    return SearchResult(
        model=os.fspath(request.model),
        revision=opened.source.revision,
        architecture=menu.plan.model.name,
        source_bytes=summary.source_bytes(menu.plan),
        texts=corpus.described,
        texts_sha256=corpus.sha256,
        engines=wanted_engines,
        gpu=request.gpu,
        context=request.context,
        limit=limit,
        points=sorted_points(points),
    )


# Bits of a weight between two mixtures.
STEP = 0.5


def whole_and_half_bits(menu: Menu) -> list[float]:
    """Return whole and half bits a weight between the smallest and the largest single scheme."""
    weights = sum(unit.elements for unit in menu.units)
    sizes = [menu.size(menu.uniform(name)) - menu.fixed for name in menu.plans]
    first, last = (8 * size / weights / STEP for size in (min(sizes), max(sizes)))
    return [STEP * number for number in range(math.ceil(first), math.floor(last) + 1)]


def mixtures_of_sizes(menu: Menu, best: BestMixtures) -> dict[str, Mixture]:
    """Return the single schemes, and the best mixture of each whole and half bit, by name: "int5", "5.5bits"."""
    named = {name: menu.uniform(name) for name in menu.plans}
    bits = whole_and_half_bits(menu)
    return named | {f"{each:g}bits": best.best(menu.bytes_of_bits(each)) for each in bits}


@dataclass(frozen=True)
class Asked:
    """What was asked for, which commands repeat.

    Attributes:
        model: the model as it was named.
        options: options of the output.
        budget: the value of --fit, or of --gpu; None if there is none.
        context: tokens of the KV cache.
        engines: "vllm", "sglang" or "both"; None for the default.
        candidates: schemes that may be chosen; empty for the default.
        text: files of texts.
        dataset: a dataset with texts, or None.
    """

    model: str | os.PathLike[str]
    options: Recipe | Search
    budget: str | None
    context: int
    engines: str | None
    candidates: Sequence[str]
    text: Sequence[str | os.PathLike[str]]
    dataset: str | None

    def command(self, name: str, is_scheme: bool) -> str:
        """Return the command that makes a point: a scheme, "5.5bits", or by any other name what fits the budget."""
        options = self.options
        words = ["openquant", "compress", "-m", os.fspath(self.model)]
        words += [word for pattern in options.ignore for word in ("--ignore", pattern)]
        if options.quantize_lm_head:
            words.append("--quantize-lm-head")
        if options.quantize_embeddings:
            words.append("--quantize-embeddings")
        if options.kv_cache == "fp8":
            words += ["--kv-cache", "fp8"]
        if options.architecture:
            words += ["--architecture", options.architecture]
        if is_scheme:
            return shlex.join([*words, "--scheme", name])

        if name.endswith("bits") and not name.startswith("-"):
            words += ["--fit", name]
        else:
            words += ["--fit", str(self.budget)]
            if self.context != 8192:
                words += ["--context", str(self.context)]
        if self.engines:
            words += ["--for", self.engines]
        if self.candidates:
            words += ["--candidates", ",".join(self.candidates)]
        words += [word for path in self.text for word in ("--text", os.fspath(path))]
        if self.dataset:
            words += ["--dataset", self.dataset]
        return shlex.join(words)


@dataclass(frozen=True, eq=False)
class Points:
    """Makes points.

    Attributes:
        best: the scores of the units.
        asked: what the commands repeat.
        limit: bytes of all weights that fit; None if no GPUs are named.
        ratio: measured over predicted KL divergence, for points that were not measured.
    """

    best: BestMixtures
    asked: Asked
    limit: int | None
    ratio: float = 1.0

    def point(
        self, name: str, mixture: Mixture, records: Sequence[DocumentRecord] | None, written: bool = False
    ) -> Point:
        """Make the point of a mixture, or of a single scheme.

        Args:
            name: the scheme, or another name for a mixture.
            mixture: the choice of each unit.
            records: figures of each document; None if it was not measured.
            written: whether it is the output of this run.
        """
        menu = self.best.menu
        nbytes = menu.size(mixture)
        predicted = self.best.predict(mixture)
        kl = predicted * self.ratio
        interval = None
        if records is not None:
            kl = mean_kl(records)
            interval = bootstrap_interval([record.kl for record in records], 0)

        weights: dict[str, int] = {}
        for number, unit in enumerate(menu.units):
            scheme = unit.choices[mixture[number]].scheme_name
            weights[scheme] = weights.get(scheme, 0) + unit.elements
        whole = sum(weights.values())
        return Point(
            name=name,
            scheme=name if name in menu.plans else None,
            bytes=nbytes,
            bits=bits_per_weight(menu.units, nbytes - menu.fixed),
            predicted=predicted,
            kl=kl,
            interval=interval,
            measured=records is not None,
            shares={scheme: part / whole for scheme, part in sorted(weights.items())},
            fits=None if self.limit is None else nbytes <= self.limit,
            written=written,
            command=self.asked.command(name, name in menu.plans),
        )


def sorted_points(points: Sequence[Point]) -> tuple[Point, ...]:
    """Sort points, the smallest first."""
    return tuple(sorted(points, key=lambda point: (point.bytes, point.kl)))
