"""`openquant fit --search`: size and KL divergence of mixtures and of single schemes, measured on the model itself.

    found = search_mixtures("Qwen/Qwen3-32B", "4090")
    [(point.name, point.bytes, point.kl) for point in found.points]

Tables, pages and cards show these points.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..distributed import Ranks
from ..evaluation.kl import DocumentRecord, bootstrap_interval, mean_kl
from ..job import open_source
from ..options import Run, Search, Texts, verb
from ..plan import summary
from ..plan.decisions import PlanOptions
from ..result import Reporter
from ..streaming.memory import memory_left
from .budget import read_gpus, weights_on_gpus
from .menu import BestMixtures, Menu, Mixture, bits_per_weight, make_menu
from .session import Session
from .table import Point, SearchResult, words_of_options

if TYPE_CHECKING:
    from ..data.corpus import Corpus
    from ..hub.source import Source


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

    options = PlanOptions(tuple(request.ignore), head=request.quantize_lm_head, embedding=request.quantize_embeddings)
    wanted_engines = request.engines or "both"
    gpu_type = None if budget is None else budget.gpu
    menu = make_menu(opened, options, request.candidates, wanted_engines, gpu_type, request.architecture)

    limit = None
    # How much memory a CPU has for weights is not known.
    if budget is not None and budget.value:
        limit = weights_on_gpus(budget, menu.plan, request.context, request.kv_cache == "fp8")

    directory = opened.source.default_path("x").absolute().parent
    texts = Texts(request.text, dataset=request.dataset)
    session = Session(opened, menu, texts, directory, request.stream, request.max_memory, reporter)
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
    points = Points(best, vars(request), request.gpu, limit)
    return points.result(
        [points.point(name, mixture, found) for (name, mixture), found in zip(named.items(), records, strict=True)],
        opened.source,
        corpus,
        wanted_engines,
        request.gpu,
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


# Options that every command repeats, and those that commands with --fit repeat.
_OUTPUT = ("ignore", "quantize_lm_head", "quantize_embeddings", "kv_cache", "architecture")
_MIXTURE = ("engines", "candidates", "text", "dataset")


@dataclass(frozen=True, eq=False)
class Points:
    """Makes points.

    Attributes:
        best: the scores of the units.
        asked: values of options by name, which commands repeat.
        budget: the value of --fit, or of --gpu; None if there is none.
        limit: bytes of all weights that fit; None if no GPUs are named.
        ratio: measured over predicted KL divergence, for points that were not measured.
    """

    best: BestMixtures
    asked: Mapping[str, Any]
    budget: str | None
    limit: int | None
    ratio: float = 1.0

    def command(self, name: str, is_scheme: bool) -> str:
        """Return the command that makes a point: a scheme, "5.5bits", or by any other name what fits the budget."""
        words = ["openquant", "compress", "-m", os.fspath(self.asked["model"]), *words_of_options(self.asked, _OUTPUT)]
        if is_scheme:
            return shlex.join([*words, "--scheme", name])

        if name.endswith("bits") and not name.startswith("-"):
            words += ["--fit", name]
        else:
            words += ["--fit", str(self.budget), *words_of_options(self.asked, ["context"])]
        return shlex.join([*words, *words_of_options(self.asked, _MIXTURE)])

    def result(
        self, points: Iterable[Point], source: Source, corpus: Corpus, engines: str, gpu: str | None
    ) -> SearchResult:
        """Return the result with these points, the smallest first.

        Args:
            points: the points.
            source: where the model comes from.
            corpus: the texts that they were measured on.
            engines: "vllm", "sglang" or "both".
            gpu: the GPUs as they were named; None if none were.
        """
        plan = self.best.menu.plan
        return SearchResult(
            model=os.fspath(self.asked["model"]),
            revision=source.revision,
            architecture=plan.model.name,
            source_bytes=summary.source_bytes(plan),
            texts=corpus.described,
            texts_sha256=corpus.sha256,
            engines=engines,
            gpu=gpu,
            context=self.asked["context"],
            limit=self.limit,
            points=tuple(sorted(points, key=lambda point: (point.bytes, point.kl))),
        )

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
            command=self.command(name, name in menu.plans),
        )
