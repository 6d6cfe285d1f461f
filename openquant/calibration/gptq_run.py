"""What GPTQ does for a run of compress(): texts run through the model, and layers are rounded before the conversion.

They lie in `OUTPUT.rounded` beside the output until that is finished, a file for each decoder layer.

transformers is imported by the modules that run models, and these when they are needed.
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
from ..reporter import Reporter
from ..streaming.memory import gptq_steps, hessian_memory, memory_left
from ..streaming.session import BUDGET, ArrivingShards, hidden_bytes, scratch_for

if TYPE_CHECKING:
    from ..data.corpus import Corpus


def apply_gptq(prepared: Prepared, corpus: Corpus, ranks: Ranks, reporter: Reporter) -> Plan:
    """Round layers by GPTQ before the conversion, which then copies them; those that an earlier run left are taken.

    The first of several ranks does it; all others wait, and take what it has written.

    Args:
        prepared: the run.
        corpus: the texts.
        ranks: this process among several, all of which call this together.
        reporter: is told of it.

    Returns:
        The plan with these layers rounded.

    Raises:
        SourceError: the model cannot be read or computed, or what an earlier run left is damaged.
        OutputError: a layer found no room on disk, or hidden states did not.
    """
    places = in_all_ranks(ranks, lambda: _round_layers(prepared, corpus, ranks, reporter) if ranks.first else None)
    if places is None:
        places = claim_rounded_layers(prepared.target, _about(prepared)).places()
    return prepared.plan.with_rounded(places)


def missing_bytes(prepared: Prepared) -> int:
    """Bytes of disk that rounded layers will take, those that are there left out."""
    return max(0, rounded_bytes(prepared.plan.gptq_rounded) - claim_rounded_layers(prepared.target).nbytes)


def _about(prepared: Prepared) -> str:
    """What the rounded layers of a run are known by."""
    facts = [prepared.plan.digest, dict(prepared.stamps), [version(name) for name in ("torch", "transformers")]]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _round_layers(prepared: Prepared, corpus: Corpus, ranks: Ranks, reporter: Reporter) -> dict[str, TensorPlace]:
    """Run the texts, and round each decoder layer as they are through it; where its tensors then lie."""
    # Only now is torch imported.
    from ..streaming.model import StreamedModel, shards_by_unit
    from ..streaming.pass_checkpoint import PassCheckpoint
    from .gptq_pass import round_layers

    plan, source, run = prepared.plan, prepared.source, prepared.run
    about = _about(prepared)
    folder = claim_rounded_layers(prepared.target, about)
    folder.claim()
    kept = PassCheckpoint(folder.passes, lambda: {"run": about})
    continued = () if kept.found is None else ("an earlier run is continued",)
    reporter.calibrating("; ".join((f"GPTQ with {corpus.described}", *corpus.notes, *continued)))

    def advanced(done: int, total: int) -> None:
        ranks.check()
        reporter.calibrated(done, total)

    streamed = StreamedModel(prepared.checkpoint, device=prepared.device)
    shards = shards_by_unit(streamed)
    fingerprint = Fingerprint(prepared.checkpoint, source.remote, source.identity, prepared.stamps)
    place = prepared.target.absolute().parent
    hidden = hidden_bytes(prepared.checkpoint, len(corpus.documents) * corpus.length)
    with ExitStack() as stack:
        left = memory_left(run.max_memory, gptq_steps(prepared.checkpoint, plan, corpus.length), refuse=False)
        fast = prepared.fast and (left is None or left > COMPILED_MEMORY)
        # For hidden states, and for more Gram matrices than the largest.
        share = BUDGET if left is None else (left - fast * COMPILED_MEMORY) // 2
        hessians = BUDGET if left is None else hessian_memory(plan) + share
        room = scratch_for(hidden, place, share, asked=False)
        held = stack.enter_context(room) if room else None
        supplies = supply_shards([(source, shards)], run.stream, place, hidden if room else 0)
        [supply] = stack.enter_context(supplies)
        streamed.traffic = ArrivingShards(supply, shards, source.name, fingerprint, ranks, hashes=False)
        found = round_layers(
            streamed,
            plan,
            corpus,
            folder,
            loops(fast),
            room=hessians,
            scratch=held,
            progress=advanced,
            remaining=reporter.remaining,
            kept=kept,
            say=reporter.calibrating,
        )
    fingerprint.require_unchanged()
    kept.remove()
    return found


def claim_rounded_layers(target: Path, about: str = "") -> LayerStore:
    """Where an output's layers lie as GPTQ has rounded them: in `OUTPUT.rounded`."""
    return LayerStore(rounded_layers_of(target), about)


def rounded_layers_of(target: Path) -> Path:
    """The directory of layers that GPTQ has rounded for an output."""
    return target.with_name(f"{target.name}.rounded")
