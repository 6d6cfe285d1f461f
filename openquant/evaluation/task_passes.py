"""Runs the questions of tasks through a source and its outputs, among the texts of an evaluation.

Packs of questions are batches of the same interleaved pass as the texts. Each has one pass of the source and one of
each output as engines serve it; pass 0 is the source.

    passes = TaskPasses(requests, source_model, [served], ["Qwen3-8B", "Qwen3-8B-FP8"], ranks=Ranks())
    run_interleaved([passes.of_pack(number) for number in range(len(passes.packs))], finished=passes.score)
    passes.scores.loglikelihoods(1)

The requests become token ids exactly as in lm-eval's backend for transformers (HFLM, 0.4.13).

    requests = encode_requests([("Question: ...\nAnswer:", " Mars")], tokenizer, max_length=8192)
    requests[0].choice      # (21048,)

Builds the figures of tasks, as eval.json has them; docs/tasks.md explains the keys.

    evaluate_tasks(task_requests, task_passes, seed=0)[0]["pooled"]["metrics"][0]["recovery"]      # 0.993

Its statistics are intervals, a paired test, and the smallest loss that shows. A score is a number from 0 to 1 for each
question, mostly one of the two. Intervals of differences are paired: each resample draws questions, with the scores of
both models.

    mcnemar(10, 2)      # 0.0386
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.tasks import Figures, TaskAnswers, Tasks
from ..data.tokenizer import Tokenizer
from ..distributed import Ranks
from ..errors import SourceError
from ..files.model_files import short_repr
from ..plan.architecture import known_architecture
from ..streaming.interleaved import ForwardPass
from ..streaming.memory import config_levels
from ..streaming.model import StreamedModel, products_in_float32
from ..streaming.packing import ChoiceRequest, Pack, make_packs, packed_logits, packing_of
from ..streaming.session import documents_of_rank
from .as_served import ServedModel
from .kl import CHUNK, divergences, log_probabilities
from .verdict import counted_questions


class RequestScores:
    """What each model makes of each request.

    Args:
        models: the number of models; the first is the source.
        requests: the number of requests.

    Attributes:
        loglikelihoods: log-probability of each request's choice, in nats [models, requests].
        greedy: 1 if each token of a choice is the most probable one, else 0 [models, requests].
        kl: KL(source || model), summed over the tokens of each choice, in nats [models, requests].
    """

    def __init__(self, models: int, requests: int) -> None:
        # NaN until a request is computed; all ranks together compute each once.
        self._scores = np.full((3, models, requests), np.nan)
        self.loglikelihoods, self.greedy, self.kl = self._scores

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
        loglikelihoods, kl = np.zeros((2, len(pack.requests)))
        greedy = np.ones(len(pack.requests))
        slots, rows, tokens = pack.predictions.T
        step = max(1, CHUNK // logits.shape[-1])

        # As many rows at a time as fit a chunk of logits.
        for start in range(0, len(pack.rows), step):
            log_q = log_probabilities(logits[start : start + step], start, "the tasks", names[model])
            here = (rows >= start) & (rows < start + step)
            chunk_rows, chunk_tokens = torch.from_numpy(rows[here] - start), torch.from_numpy(tokens[here])

            # Log-probabilities of the choices, and whether each token is the top one.
            np.add.at(loglikelihoods, slots[here], log_q[chunk_rows, chunk_tokens].double().cpu().numpy())
            is_top = (log_q.argmax(-1).cpu()[chunk_rows] == chunk_tokens).numpy()
            np.minimum.at(greedy, slots[here], is_top)

            if source is not logits:
                log_p = log_probabilities(source[start : start + step], start, "the tasks", names[0])
                of_rows = divergences(log_p.exp(), log_p, log_q).cpu().numpy()
                np.add.at(kl, slots[here], of_rows[rows[here] - start])

        self._scores[:, model, list(pack.requests)] = loglikelihoods, greedy, kl

    def state(self) -> Tensor:
        """Return the scores of this process, for `merge`."""
        return torch.from_numpy(self._scores)

    def merge(self, state: Tensor) -> None:
        """Add the scores of another process: its `state()`."""
        missing = np.isnan(self._scores)
        self._scores[missing] = state.numpy()[missing]


@dataclass
class TaskPasses:
    """The passes of all packs of this process.

    Attributes:
        task_requests: the tokenized questions.
        source: the source's model.
        outputs: the outputs as engines serve them.
        names: names of source and outputs, for messages.
        ranks: the processes that share the packs.
        packs: the packs of this process.
        packed: whether requests share the tokens that they begin with.
        tokens: the number of tokens of all packs of all processes, for one model.
        scores: the scores of all requests so far.
    """

    task_requests: TaskRequests
    source: StreamedModel
    outputs: Sequence[ServedModel]
    names: Sequence[str]
    ranks: Ranks

    def __post_init__(self) -> None:
        requests = self.task_requests.requests
        entry = known_architecture(self.source.checkpoint)
        packing = packing_of(self.source.model, entry, self.task_requests.longest)
        packs = make_packs(requests, self.task_requests.length, packing)
        self.packed = packing == "tree"
        self.tokens = sum(pack.ids.size for pack in packs)
        self.packs = [packs[number] for number in documents_of_rank(len(packs), self.ranks)]
        self.scores = RequestScores(self.models, len(requests))
        # The source's logits of the pack that is being compared.
        self._source_logits: Tensor | None = None

    @property
    def models(self) -> int:
        """The number of models, which is the number of passes of a pack."""
        return 1 + len(self.outputs)

    def of_pack(self, number: int) -> list[ForwardPass[Tensor]]:
        """Return the passes of a pack of this process: the source, then each output as engines serve it."""
        pack = self.packs[number]
        exact = partial(products_in_float32, self.source.device)
        passes = [ForwardPass(self.source, partial(_logits, self.source, pack, lambda: None), exact)]
        for served in self.outputs:
            body = partial(_logits, served.model, pack, served.text_cache)
            passes.append(ForwardPass(served.model, body, served.round_inputs))
        return passes

    def score(self, number: int, model: int, logits: Tensor) -> None:
        """Score the logits of a pack of this process; called for the source first, then for each output."""
        if model == 0:
            self._source_logits = logits
        assert self._source_logits is not None
        self.scores.add(model, self.packs[number], logits, self._source_logits, self.names)
        if model + 1 == self.models:
            self._source_logits = None


def _logits(model: StreamedModel, pack: Pack, cache: Callable[[], Any]) -> Tensor:
    return packed_logits(model.model, pack, model.device, cache())


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
    for part in config_levels(config):
        for key in _LENGTH_KEYS:
            if isinstance(value := part.get(key), int) and value > 0:
                return value
    maximum = getattr(tokenizer.inner, "model_max_length", None)
    return maximum if isinstance(maximum, int) and 0 < maximum < _NO_MAXIMUM else _DEFAULT_LENGTH


def encode_requests(
    pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer, max_length: int
) -> tuple[ChoiceRequest, ...]:
    """Tokenize requests.

    Spaces at the end of a context belong to the continuation. A continuation's tokens are those that follow the
    context's tokens in the tokens of both together. An empty context is the BOS token, or else the EOS token.

    Args:
        pairs: context and continuation of each.
        tokenizer: the source's tokenizer.
        max_length: the most tokens that the model reads. Contexts are shortened to that at their beginning.

    Raises:
        SourceError: a continuation has no token or too many.
    """
    inner: Any = tokenizer.inner
    prefix = inner.bos_token_id if inner.bos_token_id is not None else inner.eos_token_id
    first = tokenizer.decode([prefix]) if prefix is not None else None

    def encode(text: str) -> list[int]:
        special = not (first and text.startswith(first))
        return tokenizer.encode(text, special=special)

    # Requests of one question follow one another.
    encode_context = lru_cache(maxsize=1)(encode)
    requests = []
    for context, choice in pairs:
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + choice
        if not stripped:
            ids = tokenizer.encode(continuation)
            before = [] if prefix is None else [prefix]
            after = ids[1:] if ids[:1] == before else ids
        else:
            before = encode_context(stripped)
            after = encode(stripped + continuation)[len(before) :]
        if not before or not 0 < len(after) <= max_length:
            raise SourceError(
                f"the tokenizer of {tokenizer.where} makes {len(before)} and {len(after)} tokens of a prompt and its "
                f"choice {short_repr(continuation)}; both need one at least, and a choice {max_length} at most",
                "leave that task out",
            )
        kept = max_length + 1 - len(after)
        requests.append(ChoiceRequest(tuple(before[-kept:]), tuple(after)))
    return tuple(requests)


# Name of the figures over the questions of all tasks.
ALL = "all questions"


def evaluate_tasks(task_requests: TaskRequests, passes: TaskPasses, seed: int) -> list[dict[str, Any]]:
    """Compute the figures of each output.

    Args:
        task_requests: the questions.
        passes: their passes, after all are finished.
        seed: seed of the bootstrap.

    Returns:
        For each output what its eval.json has as `tasks`.
    """
    scores, tasks = passes.scores, task_requests.tasks
    source = tasks.answers(scores.loglikelihoods[0], scores.greedy[0] > 0)
    choice_tokens = np.array([len(request.choice) for request in task_requests.requests], np.float64)

    evaluations = []
    for model in range(1, passes.models):
        output = tasks.answers(scores.loglikelihoods[model], scores.greedy[model] > 0)
        kl = scores.kl[model]

        def mean_kl(answers: Sequence[TaskAnswers], kl: Figures = kl) -> float:
            requests = np.concatenate([of_task.requests for of_task in answers])
            return float(kl[requests].sum() / choice_tokens[requests].sum())

        of_tasks = [
            _figures(before.task, [before], [after], mean_kl([before]), seed)
            for before, after in zip(source, output, strict=True)
        ]
        pooled = _figures(ALL, source, output, mean_kl(source), seed)

        first = pooled["metrics"][0]
        changed = _join_scores(first["metric"], source, output).changed
        loss = smallest_loss(changed, pooled["questions"])

        evaluations.append(
            {
                "named": list(task_requests.named),
                "limit": task_requests.limit,
                "sha256": task_requests.sha256,
                "questions": pooled["questions"],
                "requests": len(task_requests.requests),
                "tokens": passes.tokens,
                "packed": passes.packed,
                "tasks": of_tasks,
                "pooled": pooled,
                "mean": _means(source, output, seed),
                "smallest_loss": loss,
                "reading": _reading(pooled, first, loss, graded=changed != first["lost"] + first["gained"]),
            }
        )

    return evaluations


def _figures(
    name: str, source: Sequence[TaskAnswers], output: Sequence[TaskAnswers], kl: float, seed: int
) -> dict[str, Any]:
    """Compute the figures of the questions of some tasks together, with the metrics that all of them have."""
    picked = [np.concatenate([answers.picked for answers in model]) for model in (source, output)]

    return {
        "task": name,
        "questions": len(picked[0]),
        "metrics": [
            _metric(metric, _join_scores(metric, source, output), seed)
            for metric in source[0].scores
            if all(metric in answers.scores for answers in source)
        ],
        "answered_otherwise": float((picked[0] != picked[1]).mean()),
        "kl": kl,
    }


def _join_scores(metric: str, source: Sequence[TaskAnswers], output: Sequence[TaskAnswers]) -> PairedScores:
    """Join the scores that all questions of several tasks have in one metric."""
    return PairedScores(*(np.concatenate([answers.scores[metric] for answers in model]) for model in (source, output)))


def _metric(metric: str, scores: PairedScores, seed: int) -> dict[str, Any]:
    return {
        "metric": metric,
        **mean_scores([scores], seed),
        "p": paired_p(scores, seed),
        "lost": scores.lost,
        "gained": scores.gained,
    }


def _means(source: Sequence[TaskAnswers], output: Sequence[TaskAnswers], seed: int) -> list[dict[str, Any]]:
    """Compute the mean of each metric over the tasks that have it."""
    means = []
    for metric in dict.fromkeys(metric for answers in source for metric in answers.scores):
        tasks = [
            PairedScores(before.scores[metric], after.scores[metric])
            for before, after in zip(source, output, strict=True)
            if metric in before.scores
        ]
        means.append({"metric": metric, "tasks": len(tasks), **mean_scores(tasks, seed)})
    return means


def _reading(pooled: Mapping[str, Any], metric: Mapping[str, Any], loss: float, graded: bool) -> str:
    """Say what the figures can tell at this number of questions."""
    changed = metric["lost"] + metric["gained"]
    count = f"{changed:,}" if changed else "none"
    flips = f"{count} got another score" if graded else f"{count} went from right to wrong or back"

    difference, p = 100 * metric["difference"], metric["p"]
    if p >= 0.05:
        found = f"the difference of {difference:+.1f} points is within chance (p = {p:.2g})"
    else:
        found = f"the difference of {difference:+.1f} points is more than chance (p = {p:.2g})"

    if mcnemar(pooled["questions"], 0) >= 0.05:
        power = "so few questions show no loss, not even of all right answers"
    else:
        power = (
            f"a loss of {100 * loss:.1f} points or more would show in 4 of 5 such evaluations, a smaller one mostly not"
        )

    return f"of {counted_questions(pooled['questions'])} {flips}; {power}; {found}"


# Resamples of the bootstrap, and how many are drawn at a time.
RESAMPLES, _AT_ONCE = 2000, 100
# Number of random sign changes of the permutation test.
PERMUTATIONS = 9999
# Quantiles of the normal distribution: for intervals of 95 %, and for finding a loss in 4 of 5 evaluations.
_INTERVAL, _POWER = 1.959964, 0.841621
# Fewest changed questions for which the smallest loss is not larger than all of them: (1.96 + 0.84)^2.
_FEWEST = 8
# Lower scores are none: grades of a file may be so small that a quotient is infinite.
_NONE_RIGHT = 1e-9


@dataclass(frozen=True)
class PairedScores:
    """Scores of the same questions of one task under two models.

    Attributes:
        source: the source's scores [questions].
        output: the output's scores [questions].
    """

    source: Figures
    output: Figures

    @property
    def lost(self) -> int:
        """The number of questions whose score is lower under the output."""
        return int((self.output < self.source).sum())

    @property
    def gained(self) -> int:
        """The number of questions whose score is higher under the output."""
        return int((self.output > self.source).sum())

    @property
    def changed(self) -> float:
        """The sum of the squared differences: the number of questions that changed, if all scores are 0 or 1."""
        return float(((self.output - self.source) ** 2).sum())


def mcnemar(lost: int, gained: int) -> float:
    """Return the p-value of McNemar's exact test, two-sided.

    It is the probability that the questions that changed are so unequally divided, if both directions are equally
    likely.

    Args:
        lost: the number of questions that only the source answers rightly.
        gained: the number of questions that only the output answers rightly.
    """
    changed = lost + gained
    # Exact integers: the number of ways to choose so many of them, and their sum.
    term = 1
    tail = 0
    for number in range(min(lost, gained) + 1):
        tail += term
        term = term * (changed - number) // (number + 1)
    return min(1.0, 2 * tail / (1 << changed))


def paired_p(scores: PairedScores, seed: int) -> float:
    """Return the p-value of a paired permutation test, two-sided.

    It is the probability of a difference as large as this one, if the sign of each question's difference is random. If
    all scores are 0 or 1, that is McNemar's exact test. Otherwise signs are drawn PERMUTATIONS times.

    Args:
        scores: the scores.
        seed: seed of the signs.
    """
    differences = scores.output - scores.source
    if np.isin(differences, (-1, 0, 1)).all():
        return mcnemar(scores.lost, scores.gained)
    generator, sums = np.random.default_rng(seed), np.zeros(PERMUTATIONS)
    # Signs of equal differences are drawn together: the number of positive ones is binomial.
    for size, count in zip(*np.unique(np.abs(differences), return_counts=True), strict=True):
        sums += size * (2 * generator.binomial(count, 0.5, PERMUTATIONS) - count)
    # Sums in another order differ by rounding.
    as_large = int((np.abs(sums) >= abs(differences.sum()) - 1e-9).sum())
    return (1 + as_large) / (1 + PERMUTATIONS)


def bootstrap_means(tasks: Sequence[PairedScores], seed: int) -> tuple[Figures, Figures]:
    """Resample the questions of each task, and return the mean over tasks of the mean scores.

    Args:
        tasks: the scores of each task; at least one task, each with at least one question.
        seed: seed of the bootstrap.

    Returns:
        The means of the source and of the output, each [RESAMPLES].
    """
    generator = np.random.default_rng(seed)
    sums = np.zeros((2, RESAMPLES))
    for task in tasks:
        # Only a few pairs of scores occur, mostly four, so how often each is drawn is enough.
        pairs, counts = np.unique(np.stack([task.source, task.output]), axis=1, return_counts=True)
        questions = len(task.source)
        for start in range(0, RESAMPLES, _AT_ONCE):
            drawn = generator.multinomial(questions, counts / questions, size=_AT_ONCE)
            sums[:, start : start + _AT_ONCE] += pairs @ drawn.T / questions
    source, output = sums / len(tasks)
    return source, output


def mean_scores(tasks: Sequence[PairedScores], seed: int) -> dict[str, Any]:
    """Compute the mean over tasks of the mean scores, and how much of the source's the output keeps.

    Args:
        tasks: the scores of each task; at least one task, each with at least one question.
        seed: seed of the bootstrap.

    Returns:
        `source` and `output`, the means; `difference`, output - source; and `recovery`, output / source, None if the
        source has none right. The last two have 95 % intervals; that of the recovery is None if the source has none
        right in a resample.
    """
    before = float(np.mean([task.source.mean() for task in tasks]))
    after = float(np.mean([task.output.mean() for task in tasks]))
    source, output = bootstrap_means(tasks, seed)

    return {
        "source": before,
        "output": after,
        "difference": after - before,
        "difference_interval": _interval(output - source),
        "recovery": None if before < _NONE_RIGHT else after / before,
        "recovery_interval": None if (source < _NONE_RIGHT).any() else _interval(output / source),
    }


def _interval(values: Figures) -> list[float]:
    return [float(edge) for edge in np.quantile(values, [0.025, 0.975])]


def smallest_loss(changed: float, questions: int) -> float:
    """Return the smallest loss that an evaluation would show in 4 of 5 cases, at a level of 95 %.

    A difference varies by as much as there are questions that only one of the models answers rightly.

    Args:
        changed: the number of those questions, as `PairedScores.changed`. Eight are assumed at least: with fewer, a
            loss of all of them would be smaller than what shows.
        questions: the number of all questions.

    Returns:
        The loss as a fraction of 1.
    """
    return min(1.0, (_INTERVAL + _POWER) * math.sqrt(max(_FEWEST, changed)) / questions)
