"""Runs the questions of tasks through a source and its outputs, among the texts of an evaluation.

Packs of questions are batches of the same interleaved pass as the texts. Each has one pass of the source and one of
each output as engines serve it; pass 0 is the source.

    passes = TaskPasses(requests, source_model, [served], ["Qwen3-8B", "Qwen3-8B-FP8"], ranks=None)
    run_interleaved([passes.of_pack(number) for number in range(len(passes.packs))], finished=passes.score)
    passes.scores.loglikelihoods(1)

The requests become token ids exactly as in lm-eval's backend for transformers (HFLM, 0.4.13).

    requests = encode_requests([("Question: ...\nAnswer:", " Mars")], tokenizer, max_length=8192, vocabulary=151936)
    requests[0].choice      # (21048,)
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..data.tasks import Tasks
from ..data.tokenizer import Tokenizer
from ..errors import SourceError
from ..files.model_files import short_repr
from ..plan.architecture import known_architecture
from ..streaming.interleaved import ForwardPass
from ..streaming.model import StreamedModel, products_in_float32
from ..streaming.packing import ChoiceRequest, Pack, make_packs, packed_logits, packing_of
from ..streaming.session import DocumentRanks, documents_of_rank
from .as_served import ServedModel
from .kl import CHUNK, divergences, log_probabilities

Figures = npt.NDArray[np.float64]

# Rows of the scores.
_LOGLIKELIHOOD, _GREEDY, _KL = range(3)


class RequestScores:
    """What each model makes of each request.

    Args:
        models: the number of models; the first is the source.
        requests: the number of requests.
    """

    def __init__(self, models: int, requests: int) -> None:
        # NaN until a request is computed; all ranks together compute each once.
        self._scores = np.full((models, 3, requests), np.nan)

    def loglikelihoods(self, model: int) -> Figures:
        """Return the log-probability of each request's choice, in nats [requests]."""
        values: Figures = self._scores[model, _LOGLIKELIHOOD]
        return values

    def greedy(self, model: int) -> npt.NDArray[np.bool_]:
        """Return whether each token of a choice is the most probable one [requests]."""
        top: npt.NDArray[np.bool_] = self._scores[model, _GREEDY] > 0
        return top

    def kl(self, model: int) -> Figures:
        """Return KL(source || model), summed over the tokens of each choice, in nats [requests]."""
        values: Figures = self._scores[model, _KL]
        return values

    def add(self, model: int, pack: Pack, logits: Tensor, source: Tensor, names: Sequence[str]) -> None:
        """Score a model's logits for a pack.

        Args:
            model: number of the model.
            pack: the pack.
            logits: the model's logits [rows, vocabulary].
            source: the source's logits [rows, vocabulary]; the same tensor for the source itself.
            names: names of the models, for messages.

        Raises:
            SourceError: a logit is NaN or infinite.
        """
        scores = np.zeros((3, len(pack.requests)))
        scores[_GREEDY] = 1
        slots, rows, tokens = pack.predictions.T
        step = max(1, CHUNK // logits.shape[-1])

        # As many rows at a time as fit a chunk of logits.
        for start in range(0, len(pack.rows), step):
            log_q = log_probabilities(logits[start : start + step], start, "the tasks", names[model])
            here = (rows >= start) & (rows < start + step)
            chunk_rows, chunk_tokens = torch.from_numpy(rows[here] - start), torch.from_numpy(tokens[here])

            # Log-probabilities of the choices, and whether each token is the top one.
            np.add.at(scores[_LOGLIKELIHOOD], slots[here], log_q[chunk_rows, chunk_tokens].double().cpu().numpy())
            is_top = (log_q.argmax(-1).cpu()[chunk_rows] == chunk_tokens).numpy()
            np.minimum.at(scores[_GREEDY], slots[here], is_top)

            if source is not logits:
                log_p = log_probabilities(source[start : start + step], start, "the tasks", names[0])
                kl = divergences(log_p.exp(), log_p, log_q).cpu().numpy()
                np.add.at(scores[_KL], slots[here], kl[rows[here] - start])

        self._scores[model][:, list(pack.requests)] = scores

    def to_bytes(self) -> bytes:
        """Return the scores of this process, for `add_bytes`."""
        file = io.BytesIO()
        np.save(file, self._scores, allow_pickle=False)
        return file.getvalue()

    def add_bytes(self, data: bytes) -> None:
        """Add the scores of another process."""
        other = np.load(io.BytesIO(data), allow_pickle=False)
        self._scores = np.where(np.isnan(self._scores), other, self._scores)


class TaskPasses:
    """The passes of all packs of this process.

    Args:
        task_requests: the tokenized questions.
        source: the source's model.
        outputs: the outputs as engines serve them.
        names: names of source and outputs, for messages.
        ranks: the processes that share the packs; None for a single one.

    Attributes:
        packs: the packs of this process.
        packed: whether requests share the tokens that they begin with.
        tokens: the number of tokens of all packs of all processes, for one model.
        scores: the scores of all requests so far.
    """

    def __init__(
        self,
        task_requests: TaskRequests,
        source: StreamedModel,
        outputs: Sequence[ServedModel],
        names: Sequence[str],
        ranks: DocumentRanks | None,
    ) -> None:
        self._source, self._outputs, self._names = source, outputs, names
        requests = task_requests.requests
        packing = packing_of(source.model, known_architecture(source.checkpoint), task_requests.longest)
        packs = make_packs(requests, task_requests.length, packing)
        self.packed = packing == "tree"
        self.tokens = sum(pack.ids.size for pack in packs)
        self.packs = [packs[number] for number in documents_of_rank(len(packs), ranks)]
        self.scores = RequestScores(1 + len(outputs), len(requests))
        # The source's logits of the pack that is being compared.
        self._source_logits: Tensor | None = None

    @property
    def models(self) -> int:
        """The number of models, which is the number of passes of a pack."""
        return 1 + len(self._outputs)

    @property
    def local_tokens(self) -> int:
        """The number of tokens of this process's packs, for one model."""
        return sum(pack.ids.size for pack in self.packs)

    @property
    def local_rows(self) -> int:
        """The number of positions of this process's packs whose logits are computed, for one model."""
        return sum(len(pack.rows) for pack in self.packs)

    def of_pack(self, number: int) -> list[ForwardPass[Tensor]]:
        """Return the passes of a pack of this process: the source, then each output as engines serve it."""
        pack = self.packs[number]

        def source_around() -> AbstractContextManager[Any]:
            return products_in_float32(self._source.device)

        passes = [ForwardPass(self._source, partial(_logits, self._source, pack, lambda: None), source_around)]
        for served in self._outputs:
            body = partial(_logits, served.model, pack, served.text_cache)
            passes.append(ForwardPass(served.model, body, _round_uncounted(served)))
        return passes

    def score(self, number: int, model: int, logits: Tensor) -> None:
        """Score the logits of a pack of this process; called for the source first, then for each output."""
        if model == 0:
            self._source_logits = logits
        assert self._source_logits is not None
        self.scores.add(model, self.packs[number], logits, self._source_logits, self._names)
        if model + 1 == self.models:
            self._source_logits = None


def _logits(model: StreamedModel, pack: Pack, cache: Callable[[], Any]) -> Tensor:
    return packed_logits(model.model, pack, model.device, cache())


def _round_uncounted(served: ServedModel) -> Callable[[], AbstractContextManager[Any]]:
    """Round activations as served, without counting what static scales clip: figures of texts stay as they are."""

    @contextmanager
    def around() -> Iterator[None]:
        with served.clipped.pause(), served.round_inputs():
            yield

    return around


# Keys of config.json that say the longest sequence; and its length if nothing says it: lm_eval/models/huggingface.py.
_LENGTH_KEYS = ("n_positions", "max_position_embeddings", "n_ctx")
_DEFAULT_LENGTH = 2048
# Tokenizers without a maximum have a number near 1e30.
_NO_MAXIMUM = 1 << 32


@dataclass(frozen=True)
class TaskRequests:
    """The questions of all tasks, tokenized.

    Attributes:
        tasks: the questions, which score answers.
        requests: the token ids of their requests for probabilities.
        named: what the user named: tasks and names of files.
        limit: the most questions of a task; None for all.
        length: the most tokens of a pack.
    """

    tasks: Tasks
    requests: tuple[ChoiceRequest, ...]
    named: tuple[str, ...]
    limit: int | None
    length: int

    @property
    def longest(self) -> int:
        """The most tokens that a model reads for one request."""
        return max((len(request.inputs) for request in self.requests), default=0)

    @property
    def tokens(self) -> int:
        """The number of tokens that a model reads at most: those of all requests, each by itself."""
        return sum(len(request.inputs) for request in self.requests)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the token ids of all requests, hexadecimal."""
        digest = hashlib.sha256()
        for request in self.requests:
            for ids in (request.context, request.choice):
                digest.update(np.array([len(ids), *ids], "<i4").tobytes())
        return digest.hexdigest()


def longest_sequence(config: Mapping[str, Any], tokenizer: Tokenizer) -> int:
    """Return the most tokens that a model is given at once.

    Args:
        config: its config.json.
        tokenizer: its tokenizer, whose maximum counts if the config has none.
    """
    text_config = config.get("text_config")
    for part in (config, text_config if isinstance(text_config, dict) else {}):
        for key in _LENGTH_KEYS:
            if isinstance(value := part.get(key), int) and value > 0:
                return value
    maximum = getattr(tokenizer.inner, "model_max_length", None)
    return maximum if isinstance(maximum, int) and 0 < maximum < _NO_MAXIMUM else _DEFAULT_LENGTH


def encode_requests(
    pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer, max_length: int, vocabulary: int | None
) -> tuple[ChoiceRequest, ...]:
    """Tokenize requests.

    Spaces at the end of a context belong to the continuation. A continuation's tokens are those that follow the
    context's tokens in the tokens of both together. An empty context is the BOS token, or else the EOS token.

    Args:
        pairs: context and continuation of each.
        tokenizer: the source's tokenizer.
        max_length: the most tokens that the model reads. Contexts are shortened to that at their beginning.
        vocabulary: the model's vocabulary size, which token ids are checked against; None for no check.

    Raises:
        SourceError: a continuation has no token or too many, or the model does not have a token.
    """
    inner: Any = tokenizer.inner
    prefix = inner.bos_token_id if inner.bos_token_id is not None else inner.eos_token_id
    first = tokenizer.decode([prefix]) if prefix is not None else None
    encoded: dict[str, list[int]] = {}

    def encode(text: str) -> list[int]:
        special = not (first and text.startswith(first))
        return tokenizer.encode(text, special=special)

    requests = []
    for context, choice in pairs:
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + choice
        if not stripped:
            ids = tokenizer.encode(continuation)
            if prefix is None:
                raise SourceError(
                    f"{tokenizer.where} has neither a BOS nor an EOS token, which a question without a prompt needs",
                    "leave that task out",
                )
            before, after = ([prefix], ids) if ids[:1] != [prefix] else (ids[:1], ids[1:])
        else:
            if stripped not in encoded:
                # Requests of one question follow one another.
                encoded.clear()
                encoded[stripped] = encode(stripped)
            before = encoded[stripped]
            after = encode(stripped + continuation)[len(before) :]
        if not before or not 0 < len(after) <= max_length:
            raise SourceError(
                f"the tokenizer of {tokenizer.where} makes {len(before)} and {len(after)} tokens of a prompt and its "
                f"choice {short_repr(continuation)}; both need one at least, and a choice {max_length} at most",
                "leave that task out",
            )
        kept = max_length + 1 - len(after)
        requests.append(ChoiceRequest(tuple(before[-kept:]), tuple(after)))
    highest = max((max(request.context + request.choice) for request in requests), default=0)
    if vocabulary is not None and highest >= vocabulary:
        raise SourceError(
            f"the tokenizer of {tokenizer.where} gives token {highest}, the model has {vocabulary}",
            "copy the tokenizer's files from the model it was made from",
        )
    return tuple(requests)
