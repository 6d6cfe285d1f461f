"""Runs texts through a model: for the scores of its units, and for whole mixtures.

Several ranks share the units that are scored, and the texts that mixtures are compared on. All get the same figures.

Scores of a model, kept beside its output in `NAME.scores.json`, so that another `--fit` of it starts from them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..convert.conversion import loops, worth_compiling
from ..data.corpus import Corpus, read_corpus
from ..errors import OpenQuantError, UsageError
from ..evaluation.kl import DocumentRecord
from ..files.destination import Destination, FileKind
from ..files.model_files import parse_json, read_small
from ..job import Opened
from ..machine import COMPILED_MEMORY
from ..options import Texts
from ..plan.architecture import known_architecture
from ..streaming.memory import MemoryStep, hidden_bytes, memory_left, mixtures_step, scoring_step
from ..streaming.session import BUDGET, TEXTS_OR_CHECKPOINTS, documents_of_rank, find_tokenizer, part_path
from ..version import __version__
from .menu import UNQUANTIZED, Menu, Mixture, Scores, Unit

if TYPE_CHECKING:
    from ..streaming.pass_checkpoint import PassCheckpoint
    from .scores import Measured

# Documents and tokens of each that scores are measured on, and of those that mixtures are compared on.
SCORED = (3, 96)
COMPARED = (16, 256)


@dataclass
class Session:
    """Measures a model's units and mixtures.

    Attributes:
        opened: the model.
        menu: its units and their choices.
        texts: options that say which texts are read.
        directory: where scores and scratch files are.
    """

    opened: Opened
    menu: Menu
    texts: Texts
    directory: Path

    @cached_property
    def scored(self) -> Corpus:
        """The texts that scores are measured on."""
        return self._read(SCORED, "calibration")

    @cached_property
    def _conditions(self) -> dict[str, str]:
        """What scores depend on."""
        units = [[unit.modules, sorted(unit.choices)] for unit in self.menu.units]
        return {
            "model": self.opened.fingerprint().stamp,
            "texts": self.scored.sha256,
            "layers and schemes": hashlib.sha256(json.dumps(units).encode()).hexdigest(),
            "openquant": __version__,
            **{name: version(name) for name in ("torch", "transformers")},
        }

    @cached_property
    def _target(self) -> Destination:
        """The file of scores."""
        target = Destination(self.directory / f"{self.opened.source.name}{SUFFIX}", "", SCORES)
        target.require()
        return target

    @cached_property
    def kept(self) -> Scores | None:
        """Scores of an earlier run; None if there are none of this model with these texts, schemes and versions."""
        return read_scores(self._target.path, self._conditions)

    @cached_property
    def _variants(self) -> tuple[list[Mixture], dict[int, list[str]]]:
        """The mixtures and changes that this rank measures: those of every `size`-th unit."""
        from ..streaming.model import StreamedModel
        from .scores import find_variants

        model = StreamedModel(self.opened.checkpoint, device=self.opened.device)
        mixtures, changes = find_variants(model, self.menu.units)
        ranks = self.opened.ranks
        own = range(ranks.rank, len(self.menu.units), ranks.size)
        return (
            [mixture for mixture in mixtures if next(iter(mixture)) in own],
            {number: names for number, names in changes.items() if number in own},
        )

    def steps(self, mixtures: int) -> list[MemoryStep]:
        """Estimate the memory of scoring, unless there are scores, and of comparing mixtures with the source."""
        steps = [self._comparing(mixtures, COMPARED[1])]
        if self.kept is None:
            steps.insert(0, self._scoring(len(self._variants[0]), self.scored))
        return steps

    def _comparing(self, mixtures: int, length: int) -> MemoryStep:
        copies = min(mixtures, len(self.menu.plans))
        return mixtures_step(self.opened.checkpoint, mixtures, copies, length, self.menu.plan.options.head)

    def _scoring(self, mixtures: int, corpus: Corpus) -> MemoryStep:
        documents = len(corpus.documents)
        head = self.menu.plan.options.head
        return scoring_step(self.opened.checkpoint, 1 + mixtures, documents, corpus.length, head)

    def scores(self, keeps_only: bool = False) -> Scores:
        """Measure the scores, or read those of an earlier run. All ranks call this together.

        Args:
            keeps_only: whether nothing may be written, so that there must be scores.

        Raises:
            UsageError: there are none, and nothing may be written.
            SourceError: the model or a text cannot be read, or ranks read different ones.
            OutputError: the scores cannot be written, or another rank has failed.
        """
        from ..streaming.pass_checkpoint import PassCheckpoint
        from .scores import scores_of

        kept = self.kept
        target = self._target
        on_note = self.opened.reporter.on_note
        corpus = self.scored
        ranks = self.opened.ranks
        ranks.require_same([self._conditions, kept], TEXTS_OR_CHECKPOINTS)
        if kept is None and keeps_only:
            raise UsageError(
                f"--dry-run writes nothing, and there are no scores of this model in {target.path}",
                "the mixture is not known without them: leave --dry-run out once, and the scores are kept",
            )
        if kept is not None:
            on_note(f"--fit: scores of {len(kept)} units from {target.path}")
            return kept

        on_note(f"--fit: scoring {len(self.menu.units)} units in {', '.join(self.menu.plans)} with {corpus.described}")
        mixtures, changes = self._variants
        checkpoint = None
        # Of others something else than arguments may go from layer to layer.
        if known_architecture(self.opened.checkpoint) is not None:
            conditions = {**self._conditions, "number of ranks": str(ranks.size)}
            checkpoint = PassCheckpoint(part_path(target.path, ranks), conditions)
        if checkpoint is not None and checkpoint.saved is not None:
            on_note("--fit: an earlier run is continued")

        measured = self._measure(corpus, mixtures, changes, checkpoint)
        by_rank = ranks.agree(None, scores_of(self.menu.units, mixtures, changes, measured))
        scores = [by_rank[number % ranks.size][number] for number in range(len(self.menu.units))]
        if ranks.first:
            target.write(scores_json(scores, self.menu.units, self._conditions))
        on_note(f"--fit: wrote {target.path}")
        # The other ranks keep their checkpoints until the file is written.
        ranks.agree(None)
        if checkpoint is not None:
            checkpoint.remove()
        return scores

    def measure(self, corpus: Corpus, mixtures: Sequence[Mixture]) -> Sequence[Sequence[DocumentRecord]]:
        """Run the source and mixtures of it over texts, and return the figures of each document for each mixture.

        All ranks call this together.
        """
        ranks = self.opened.ranks
        own = documents_of_rank(len(corpus.documents), ranks)
        measured: Sequence[Sequence[DocumentRecord]] = [[] for _ in mixtures]
        if own:
            part = replace(corpus, documents=tuple(corpus.documents[number] for number in own))
            measured = self._measure(part, mixtures)[0]

        by_rank = ranks.agree(None, [[record.figures().tolist() for record in records] for records in measured])
        return [
            [
                DocumentRecord.from_figures(document, np.array(by_rank[number % ranks.size][at][number // ranks.size]))
                for number, document in enumerate(corpus.documents)
            ]
            for at in range(len(mixtures))
        ]

    def corpus(self) -> Corpus:
        """Read the texts that mixtures are compared on."""
        return self._read(COMPARED, "evaluation")

    def _read(self, amount: tuple[int, int], purpose: Any) -> Corpus:
        """Read so many documents of so many tokens each."""
        samples, length = amount
        given = self.texts
        wanted = Texts(given.text, dataset=given.dataset, samples=max(samples, len(given.text)), length=length)
        opened = self.opened
        return read_corpus(wanted, find_tokenizer(opened.source, opened.checkpoint), purpose)

    def _measure(
        self,
        corpus: Corpus,
        mixtures: Sequence[Mixture],
        changes: Mapping[int, Sequence[str]] | None = None,
        checkpoint: PassCheckpoint | None = None,
    ) -> Measured:
        from .scores import measure_mixtures

        opened = self.opened
        plan = self.menu.plan
        if changes:
            # All documents of a scoring go through a layer together, with their hidden states in memory.
            hidden = 0
            step = self._scoring(len(mixtures), corpus)
        else:
            hidden = hidden_bytes(opened.checkpoint, (1 + len(mixtures)) * len(corpus.documents) * corpus.length)
            step = self._comparing(len(mixtures), corpus.length)
        free = memory_left(opened.run.max_memory, [step], refuse=False)
        fast = worth_compiling(plan) and (free is None or free > COMPILED_MEMORY)

        budget = BUDGET if free is None else free - fast * COMPILED_MEMORY
        with opened.run_texts(corpus, checkpoint, hidden, budget, self.directory, opened.ranks.local_size) as run:
            return measure_mixtures(run, self.menu.units, plan.decisions.fused, mixtures, loops(fast), changes)


SUFFIX = ".scores.json"
_KEY = "openquant_scores"
_VERSION = 1
# Bytes.
_MOST = 64 << 20


SCORES = FileKind("a file of scores", lambda file: bool(re.match(rb'\{\s*"openquant_scores"', file.read(64))))


def scores_json(scores: Scores, units: Sequence[Unit], conditions: dict[str, Any]) -> bytes:
    """Return the content of the file.

    Args:
        scores: the scores.
        units: the units that they are of.
        conditions: what they depend on: the model's stamp, the texts and versions.
    """
    measured = [
        {"modules": list(unit.modules), "kl": {name: kl for name, kl in found.items() if name != UNQUANTIZED}}
        for unit, found in zip(units, scores, strict=True)
    ]
    return f"{json.dumps({_KEY: _VERSION, 'conditions': conditions, 'units': measured}, indent=1)}\n".encode()


def read_scores(path: Path, conditions: dict[str, Any]) -> Scores | None:
    """Read scores of an earlier run.

    Args:
        path: the file, which may be missing.
        conditions: what the scores must have been measured under.

    Returns:
        The scores; None if there is no such file, it is of other conditions, or damaged.
    """
    try:
        content = parse_json(read_small(path, str(path), _MOST), str(path))
        if content["conditions"] != conditions:
            return None
        return tuple({UNQUANTIZED: 0.0, **kept["kl"]} for kept in content["units"])
    except (OpenQuantError, OSError, LookupError, TypeError):
        return None
