"""The models under test, and the settings of an evaluation.

source, output = ModelUnderTest("Qwen3-8B", checkpoint), ModelUnderTest("Qwen3-8B-FP8", quantized_checkpoint)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from ..data.tokenizer import Tokenizer
from ..errors import UsageError
from ..files.cards import stated_facts
from ..files.checkpoint import Checkpoint, Fingerprint
from ..files.destination import WeightFacts
from ..streaming.model import StreamedModel
from ..streaming.offload import OffloadFile
from ..streaming.pass_checkpoint import PassCheckpoint
from ..streaming.session import DocumentRanks
from .as_served import ServedModel
from .task_passes import TaskRequests
from .types import NamedModel
from .verdict import WeightChange


@dataclass(frozen=True)
class ModelUnderTest:
    """A checkpoint of an evaluation: the source or an output.

    Attributes:
        name: name for messages, such as "Qwen3-8B-FP8".
        checkpoint: the opened checkpoint.
        tokenizer_differences: behaviours in which its tokenizer differs from the source's, such as "the chat template".
        given_fingerprint: fingerprint that the caller has made already; None to make it of the checkpoint's directory.
    """

    name: str
    checkpoint: Checkpoint
    tokenizer_differences: tuple[str, ...] = ()
    given_fingerprint: Fingerprint | None = None

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the checkpoint's files."""
        return self.given_fingerprint or Fingerprint(self.checkpoint)

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(info.nbytes for info in self.checkpoint.tensors.values())

    def identity(self) -> NamedModel:
        """Return its name and the digest and stamp of its fingerprint, as eval.json has them.

        Raises:
            SourceError: a shard cannot be read.
        """
        return {"name": self.name, "digest": self.fingerprint.hexdigest(), "stamp": self.fingerprint.stamp}


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of `compare_outputs`.

    Attributes:
        seed: seed of the rounding noise and of the bootstrap.
        kv_cache: "fp8" to round every output's KV cache to FP8, "auto" for what its config says.
        device: torch device that the models run on.
        tokenizer: the source's tokenizer; None to leave out answers to prompts.
        prompts: file of prompts; None for built-in ones.
        streamed: makes a context in which the models get their shards as they arrive, and which gives the file for
            hidden states; by default all shards are in the checkpoints' directories, and all states in memory.
        answers_prompts: whether the models answer prompts after the texts, for which all weights are read once more.
        ranks: the processes that share the documents; None if this is the only one.
        tasks: questions of tasks that the models answer too; None for none.
        pass_checkpoint: file from which an interrupted evaluation continues; None for none.
        answer_memory: bytes that the weights of a model which answers prompts may take; None for no limit but the
            machine's memory.
    """

    seed: int = 0
    kv_cache: str = "auto"
    device: str = "cpu"
    tokenizer: Tokenizer | None = None
    prompts: str | os.PathLike[str] | None = None
    streamed: Callable[[Sequence[StreamedModel]], AbstractContextManager[OffloadFile | None]] = lambda _: nullcontext()
    answers_prompts: bool = True
    ranks: DocumentRanks | None = None
    answer_memory: int | None = None
    tasks: TaskRequests | None = None
    pass_checkpoint: PassCheckpoint | None = None


@dataclass
class OutputUnderTest:
    """An output during an evaluation.

    Attributes:
        subject: the checkpoint and its name.
        served: the model as engines serve it.
        first: number of its first pass among those of all models; this pass rounds weights alone.
        passes: number of its passes: 2 if engines round activations or the KV cache too, else 1.
        changes: differences of its weights from the source's, added while the texts run.
    """

    subject: ModelUnderTest
    served: ServedModel
    first: int
    passes: int
    changes: list[WeightChange] = field(default_factory=list)

    @cached_property
    def facts(self) -> WeightFacts:
        """What was done to its weights, by its journal or model card."""
        return stated_facts(self.subject.checkpoint)

    @property
    def last(self) -> int:
        """Number of its last pass, with everything that engines round."""
        return self.first + self.passes - 1


def require_one_model(
    source: ModelUnderTest, source_model: StreamedModel, output: ModelUnderTest, output_model: StreamedModel
) -> None:
    """Require that an output has the class, number of layers and vocabulary of its source.

    Args:
        source: the source's checkpoint, with its name for messages.
        source_model: the source's model; its weights are not read.
        output: the output's checkpoint, with its name for messages.
        output_model: the output's model; its weights are not read.

    Raises:
        UsageError: one of them differs.
    """
    facts = []
    for model in (source_model, output_model):
        embedding = model.model.get_input_embeddings()
        size = getattr(embedding, "num_embeddings", None)
        layers = sum(not isinstance(module, nn.Embedding) for module in model.units.values())
        facts.append((type(model.model).__name__, f"{size} tokens", f"{layers} layers"))

    for source_fact, output_fact in zip(*facts, strict=True):
        if source_fact != output_fact:
            raise UsageError(
                f"{output.name} has {output_fact}, {source.name} has {source_fact}",
                "name the model that it was made from",
            )
