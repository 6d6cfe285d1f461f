"""GPTQ in a run of compress(): runs the texts through the model, and rounds its layers before the conversion.

Rounded layers lie in `OUTPUT.rounded` beside the output, a file for each decoder layer, until the output is finished.

torch and transformers are imported only when a model is run.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ..convert.conversion import COMPILED_MEMORY
from ..convert.devices import loops
from ..distributed import Ranks
from ..files.fingerprint import Fingerprint
from ..files.layer_store import LayerStore, TensorPlace
from ..hub.shards import supply_shards
from ..job import Prepared, in_all_ranks
from ..plan.gptq import rounded_bytes
from ..plan.plan import Plan
from ..result import Reporter
from ..streaming.memory import gptq_steps, hessian_memory, memory_left
from ..streaming.session import BUDGET, ArrivingShards, hidden_bytes, scratch_for

if TYPE_CHECKING:
    from ..data.corpus import Corpus


def apply_gptq(prepared: Prepared, corpus: Corpus, ranks: Ranks, reporter: Reporter) -> Plan:
    """Round the layers of a plan by GPTQ, so that the conversion copies them. Layers of an earlier run are reused.

    The first rank does it. All others wait, and use what it has written.

    Args:
        prepared: options of the run, source checkpoint, plan and output directory.
        corpus: the calibration texts, as tokens.
        ranks: the processes of this run, all of which call this together.
        reporter: receives notes and progress.

    Returns:
        The plan with the places of rounded tensors.

    Raises:
        SourceError: the model cannot be read, its activations are not finite, or a file of an earlier run is damaged.
        PlanError: a weight is too large for its scheme.
        UsageError: the disk has too little space for shards that are streamed.
        OutputError: rounded layers or hidden states cannot be written, or another rank has failed.
        OpenQuantError: transformers' model fails on these weights or texts.
    """
    places = in_all_ranks(ranks, lambda: _round_layers(prepared, corpus, ranks, reporter) if ranks.first else None)
    if places is None:
        places = rounded_layer_store(prepared.target, _digest(prepared)).places()
    return prepared.plan.with_rounded(places)


def missing_bytes(prepared: Prepared) -> int:
    """Return the bytes of disk that rounded layers will still take, in addition to those that are there.

    Args:
        prepared: options of the run, source checkpoint, plan and output directory.
    """
    return max(0, rounded_bytes(prepared.plan.gptq_rounded) - rounded_layer_store(prepared.target).nbytes)


def _digest(prepared: Prepared) -> str:
    """SHA-256 in hexadecimal of all that decides about the rounded layers, by which a run knows its own."""
    facts = [prepared.plan.digest, dict(prepared.stamps), [version(name) for name in ("torch", "transformers")]]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _round_layers(prepared: Prepared, corpus: Corpus, ranks: Ranks, reporter: Reporter) -> dict[str, TensorPlace]:
    """Run the texts and round each decoder layer; where its tensors then lie, by name."""
    # Only now is torch imported.
    from ..streaming.model import StreamedModel, shards_by_unit
    from ..streaming.pass_checkpoint import PassCheckpoint
    from .gptq_pass import round_layers

    plan, source, run = prepared.plan, prepared.source, prepared.run
    digest = _digest(prepared)
    store = rounded_layer_store(prepared.target, digest)
    store.claim()
    pass_checkpoint = PassCheckpoint(store.pass_checkpoint, lambda: {"run": digest})
    continued = () if pass_checkpoint.saved is None else ("an earlier run is continued",)
    reporter.calibrating("; ".join((f"GPTQ with {corpus.described}", *corpus.notes, *continued)))

    def report_progress(done: int, total: int) -> None:
        ranks.check()
        reporter.calibrated(done, total)

    streamed = StreamedModel(prepared.checkpoint, device=prepared.device)
    shards = shards_by_unit(streamed)
    fingerprint = Fingerprint(prepared.checkpoint, source.remote, source.identity, prepared.stamps)
    directory = prepared.target.absolute().parent
    hidden = hidden_bytes(prepared.checkpoint, len(corpus.documents) * corpus.length)
    with ExitStack() as stack:
        free = memory_left(run.max_memory, gptq_steps(prepared.checkpoint, plan, corpus.length), refuse=False)
        fast = prepared.fast and (free is None or free > COMPILED_MEMORY)
        # One half is for hidden states, the other for Hessians beyond the largest one.
        half = BUDGET if free is None else (free - fast * COMPILED_MEMORY) // 2
        max_hessian_bytes = BUDGET if free is None else hessian_memory(plan) + half
        offload = scratch_for(hidden, directory, half, may_be_in_memory=False)
        scratch = stack.enter_context(offload) if offload else None
        supplies = supply_shards([(source, shards)], run.stream, directory, hidden if offload else 0)
        [supply] = stack.enter_context(supplies)
        streamed.shard_provider = ArrivingShards(supply, shards, source.name, fingerprint, ranks, hashes=False)
        places = round_layers(
            streamed,
            plan,
            corpus,
            store,
            loops(fast),
            max_hessian_bytes=max_hessian_bytes,
            scratch=scratch,
            progress=report_progress,
            pass_checkpoint=pass_checkpoint,
            note=reporter.calibrating,
        )
    fingerprint.require_unchanged()
    pass_checkpoint.remove()
    return places


def rounded_layer_store(target: Path, digest: str = "") -> LayerStore:
    """Return the store of layers that GPTQ has rounded for an output directory.

    Args:
        target: the output directory.
        digest: SHA-256 in hexadecimal of what decides about the layers, by which a run knows its own; "" to count or
            remove those of any run.

    Returns:
        The store in the directory `OUTPUT.rounded`, with one file for each decoder layer; nothing is read yet.
    """
    return LayerStore(rounded_layers_path(target), digest)


def rounded_layers_path(target: Path) -> Path:
    """Return the directory of rounded layers for `target`, the output directory: `OUTPUT.rounded` beside it."""
    return target.with_name(f"{target.name}.rounded")
