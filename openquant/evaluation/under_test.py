"""What is evaluated, and how: checkpoints with their names, and the outputs among them as models.

source, output = Subject("Qwen3-8B", checkpoint), Subject("Qwen3-8B-FP8", other)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from ..data.tokenizer import Tokenizer
from ..errors import UsageError
from ..files.cards import card_of, is_rounded_by_gptq, is_smoothed
from ..files.checkpoint import Checkpoint
from ..files.fingerprint import Fingerprint
from ..streaming.documents import DocumentRanks
from ..streaming.model import StreamedModel, shards_by_unit
from ..streaming.offload import OffloadFile
from ..streaming.shard_provider import ShardProvider
from .as_served import ServedModel
from .types import NamedModel
from .weight_changes import WeightChange

# Of a model, the shards of each unit, in the order in which units are computed.
Needs = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class ModelUnderTest:
    """A checkpoint to be evaluated, or its source.

    Attributes:
        name: what it is called, for people.
        checkpoint: what it holds.
        tokenizer: in what its tokenizer does something else than the source's, such as "the chat template".
        own_fingerprint: tells its checkpoint from every other one; that of its directory if None.
    """

    name: str
    checkpoint: Checkpoint
    tokenizer: tuple[str, ...] = ()
    own_fingerprint: Fingerprint | None = None

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Tells its checkpoint from every other one."""
        return self.own_fingerprint or Fingerprint(self.checkpoint)

    @property
    def nbytes(self) -> int:
        """Size of its tensors."""
        return sum(info.nbytes for info in self.checkpoint.tensors.values())

    def identity(self) -> NamedModel:
        """What eval.json has of it: name, and the digest and the stamp of its fingerprint.

        Raises:
            SourceError: a shard cannot be read.
        """
        return {"name": self.name, "digest": self.fingerprint.hexdigest(), "stamp": self.fingerprint.stamp}


@dataclass(frozen=True)
class EvaluationSettings:
    """How to evaluate.

    Attributes:
        seed: of the noise and of the bootstrap.
        kv_cache: "fp8", or "auto" for what an output's config says.
        device: of torch.
        scratch: where hidden states go beyond a budget; None for nowhere.
        tokenizer: the source's, to show what models answer to prompts; None to have none.
        prompts: a file of them; built-in ones if None.
        supply: opens the ways by which shards come, the source's and each output's, given the shards of each unit in
            order; if None they lie in the checkpoints' directories.
        again: whether all weights can be had once more when texts are through, for models to answer.
        team: the processes that share the documents; None for this one alone.
        answering: bytes that the weights of a model which answers prompts may take; None where only the machine counts.
    """

    seed: int = 0
    kv_cache: str = "auto"
    device: str = "cpu"
    scratch: OffloadFile | None = None
    tokenizer: Tokenizer | None = None
    prompts: str | os.PathLike[str] | None = None
    supply: Callable[[Sequence[Needs]], AbstractContextManager[Sequence[ShardProvider]]] | None = None
    again: bool = True
    team: DocumentRanks | None = None
    answering: int | None = None


@dataclass
class OutputUnderTest:
    """An output, and what is found of its weights as texts go through.

    Attributes:
        of: the checkpoint.
        served: its model, as engines serve it.
        first: the number of its first pass among those of all models, that with weights alone.
        passes: how many it has, one or two.
        changes: how its weights differ from the source's.
    """

    of: ModelUnderTest
    served: ServedModel
    first: int
    passes: int
    changes: list[WeightChange] = field(default_factory=list)

    @cached_property
    def folded(self) -> bool:
        """Whether its card says that inputs of layers are divided in norms, and weights multiplied by as much."""
        return is_smoothed(card_of(self.of.checkpoint))

    @cached_property
    def by_gptq(self) -> bool:
        """Whether its card says that GPTQ rounded its weights."""
        return is_rounded_by_gptq(card_of(self.of.checkpoint))

    @property
    def needs(self) -> Needs:
        """The shards of each unit of its model, those with scales of activations too."""
        return shards_by_unit(self.served.model, self.served.scales)

    @property
    def last(self) -> int:
        """The number of the pass with all that engines round."""
        return self.first + self.passes - 1


def require_one_model(
    source: ModelUnderTest, mine: StreamedModel, output: ModelUnderTest, theirs: StreamedModel
) -> None:
    """Refuse what cannot be held against one another.

    Raises:
        UsageError: classes, layers or vocabularies differ.
    """
    facts = []
    for model in (mine, theirs):
        table = model.model.get_input_embeddings()
        size = getattr(table, "num_embeddings", None)
        layers = sum(not isinstance(module, nn.Embedding) for module in model.units.values())
        facts.append((type(model.model).__name__, f"{size} tokens", f"{layers} layers"))
    for before, after in zip(*facts, strict=True):
        if before != after:
            raise UsageError(
                f"{output.name} has {after}, {source.name} has {before}", "name the model that it was made from"
            )
