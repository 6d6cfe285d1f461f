"""`openquant fit --search`: size and KL divergence of mixtures and of single schemes, measured on the model itself.

found = search_mixtures("Qwen/Qwen3-32B", "4090")
[(point.name, point.bytes, point.kl) for point in found.points]
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..distributed import Ranks
from ..formats.names import CacheScheme
from ..job import open_source
from ..options import Run, Search, Texts, documented
from ..plan import summary
from ..plan.decisions import PlanOptions
from ..plan.tensor_parallel import text_config
from ..result import Reporter
from ..streaming.memory import memory_left
from .budget import read_gpus, weights_on_gpus
from .frontier import Asked, Points, mixtures_of_sizes, sorted_points, whole_and_half_bits
from .menu import BestMixtures, make_menu
from .result import SearchResult
from .session import Session


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
    wanted_engines = request.engines or "both"
    menu = make_menu(
        opened,
        options,
        request.candidates,
        wanted_engines,
        None if budget is None else budget.gpu,
        request.architecture,
    )
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
    reporter.calibrating(f"--search: comparing {len(named)} outputs on {corpus.described}")
    records = session.measure(corpus, list(named.values()))
    asked = Asked(
        model,
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
        points=sorted_points(points),
    )
