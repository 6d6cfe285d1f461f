"""`openquant fit --search`: size and KL divergence of mixtures and of single schemes, measured on the model itself.

found = search_mixtures("Qwen/Qwen3-32B", "4090")
[(point.name, point.bytes, point.kl) for point in found.points]
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence

from ..distributed import Ranks
from ..evaluation.kl import DocumentRecord, bootstrap_interval, mean_kl
from ..formats.names import CacheScheme
from ..job import open_source
from ..options import Run, Search, Texts, documented
from ..plan import summary
from ..plan.decisions import PlanOptions
from ..plan.tensor_parallel import text_config
from ..reporter import Reporter
from ..streaming.memory import memory_left
from ..vllm_probe.choose import ArchitectureChoice
from .budget import read_gpus, weights_on_gpus
from .menu import BestMixtures, Menu, make_menu
from .result import Point, SearchResult
from .session import Session
from .units import Mixture, bits_per_weight

# Bits of a weight between two mixtures.
STEP = 0.5


@documented(Search)
def search_mixtures(
    model: str | os.PathLike[str],
    gpu: str | None = None,
    *,
    context: int | str = 8192,
    engines: str | None = None,
    kv_cache: CacheScheme = "auto",
    ignore: str | Sequence[str] = (),
    quantize_lm_head: bool = False,
    quantize_embeddings: bool = False,
    architecture: str | None = None,
    candidates: str | Sequence[str] = (),
    text: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    dataset: str | None = None,
    device: str = "cpu",
    max_memory: int | str | None = None,
    stream: bool = False,
    revision: str | None = None,
    reporter: Reporter | None = None,
) -> SearchResult:
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
    request = Search.parse(
        model=model,
        gpu=gpu,
        context=context,
        engines=engines,
        kv_cache=kv_cache,
        ignore=ignore,
        quantize_lm_head=quantize_lm_head,
        quantize_embeddings=quantize_embeddings,
        architecture=architecture,
        candidates=candidates,
        text=text,
        dataset=dataset,
        device=device,
        max_memory=max_memory,
        stream=stream,
        revision=revision,
    )
    reporter = reporter or Reporter()
    budget = None if request.gpu is None else read_gpus(request.gpu)
    run = Run.parse(model=model, device=device, stream=stream, revision=revision)
    opened = open_source(run, Ranks())
    fp8 = request.kv_cache == "fp8"
    options = PlanOptions(tuple(request.ignore), head=quantize_lm_head, embedding=quantize_embeddings)
    entry = ArchitectureChoice(request.architecture).entry(opened.checkpoint)
    wanted_engines = request.engines or "both"
    menu = make_menu(opened, options, request.candidates, wanted_engines, None if budget is None else budget.gpu, entry)
    limit = None
    if budget is not None:
        config = text_config(menu.plan.decoded, menu.plan.model)
        limit = weights_on_gpus(budget, menu.plan, config, request.context, fp8)
    directory = opened.source.default_path("x").absolute().parent
    texts = Texts(request.text, dataset=request.dataset)
    session = Session(opened, menu, texts, directory, request.stream, request.max_memory, Ranks(), reporter)
    fills = limit is not None and menu.smallest <= limit < menu.largest
    bits = _bits(menu)
    compared = len(menu.plans) + len(bits) + fills
    memory_left(request.max_memory, session.steps(compared))
    session.report_forecast(compared)
    best = BestMixtures(menu, session.scores())
    named = {name: menu.uniform(name) for name in menu.plans}
    named |= {f"{each:g}bits": best.best(menu.bytes_of_bits(each)) for each in bits}
    if limit is not None and fills:
        named[f"fits {request.gpu}"] = best.best(limit)
    corpus = session.corpus()
    reporter.calibrating(f"--search: comparing {len(named)} outputs on {corpus.described}")
    records = session.measure(corpus, list(named.values()))
    base = ["openquant", "compress", "-m", os.fspath(model), *_given(request)]
    points = [
        _point(name, mixture, found, menu, best, base, request, limit)
        for (name, mixture), found in zip(named.items(), records, strict=True)
    ]
    return SearchResult(
        model=os.fspath(model),
        revision=opened.source.revision,
        architecture=menu.plan.model.name,
        source_bytes=summary.source_bytes(menu.plan),
        texts=corpus.described,
        texts_sha256=corpus.sha256,
        engines=wanted_engines,
        gpu=request.gpu,
        context=request.context,
        limit=limit,
        points=tuple(sorted(points, key=lambda point: (point.bytes, point.kl))),
    )


def _bits(menu: Menu) -> list[float]:
    """Whole and half bits a weight between the smallest and the largest single scheme."""
    weights = sum(unit.elements for unit in menu.units)
    sizes = [menu.size(menu.uniform(name)) - menu.fixed for name in menu.plans]
    first, last = (8 * size / weights / STEP for size in (min(sizes), max(sizes)))
    return [STEP * number for number in range(math.ceil(first), math.floor(last) + 1)]


def _given(request: Search) -> list[str]:
    """The options that compress needs too, as words."""
    words = [word for pattern in request.ignore for word in ("--ignore", pattern)]
    words += ["--quantize-lm-head"] if request.quantize_lm_head else []
    words += ["--quantize-embeddings"] if request.quantize_embeddings else []
    words += ["--kv-cache", "fp8"] if request.kv_cache == "fp8" else []
    words += ["--architecture", request.architecture] if request.architecture else []
    return words


def _point(
    name: str,
    mixture: Mixture,
    records: Sequence[DocumentRecord],
    menu: Menu,
    best: BestMixtures,
    base: Sequence[str],
    request: Search,
    limit: int | None,
) -> Point:
    nbytes = menu.size(mixture)
    weights: dict[str, int] = {}
    for number, unit in enumerate(menu.units):
        scheme = unit.choices[mixture[number]].scheme_name
        weights[scheme] = weights.get(scheme, 0) + unit.elements
    whole = sum(weights.values())
    words = ["--scheme", name]
    if name not in menu.plans:
        words = ["--fit", name if name.endswith("bits") else str(request.gpu)]
        words += ["--context", str(request.context)] if not name.endswith("bits") and request.context != 8192 else []
        words += ["--for", request.engines] if request.engines else []
        words += ["--candidates", ",".join(request.candidates)] if request.candidates else []
        words += [word for path in request.text for word in ("--text", os.fspath(path))]
        words += ["--dataset", request.dataset] if request.dataset else []
    return Point(
        name=name,
        scheme=name if name in menu.plans else None,
        bytes=nbytes,
        bits=bits_per_weight(menu.units, nbytes - menu.fixed),
        predicted=best.predicted(mixture),
        kl=mean_kl(records),
        interval=bootstrap_interval([record.kl for record in records], 0),
        shares={scheme: part / whole for scheme, part in sorted(weights.items())},
        fits=None if limit is None else nbytes <= limit,
        command=shlex.join([*base, *words]),
    )
