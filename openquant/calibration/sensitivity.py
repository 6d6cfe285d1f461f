"""How much a model's answers depend on each token's output of each layer, by which GPTQ then weighs tokens.

GPTQ makes the squared error of a layer's outputs small, and all tokens count alike. But answers depend on some tokens
far more than on others. An error e of a layer's output changes the answers by a KL divergence of e' G e / 2 with
G = E[g g'], where g is the gradient at that output of the logits times a random vector. The vector's covariance is the
curvature of the KL, diag(p) - p p' with the probabilities p of the next token, so no labels are needed. The weight of a
token comes from the sum of squares of g, as in GuidedQuant (Kim et al., arXiv 2505.07004) with one group of outputs.

    sensitivities = find_sensitivities(model, corpus, {"model.layers.0.mlp.gate_proj": "mlp 0", ..}, budget=1 << 30)
    sensitivities["mlp 0"]         # float32 [documents, tokens]

A few texts at a time run through the model, since what goes into each layer is kept until gradients are back there.
They flow from the head down, and each layer is loaded and computed once more on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..data.corpus import Corpus
from ..distributed import Ranks
from ..errors import OpenQuantError
from ..streaming import transformers_internals
from ..streaming.interleaved import ForwardPass, explain_errors, run_interleaved
from ..streaming.memory import hidden_bytes
from ..streaming.meta_model import REST
from ..streaming.model import Advanced, StreamedModel, limited_threads, products_in_float32
from ..streaming.pass_checkpoint import PassCheckpoint, dump, load
from ..streaming.session import documents_of_rank

# Power of the sum of squares. One draw of the gradient says little of a single token, and a few tokens have most of the
# sum: on SmolLM2 with 12k tokens, 0.5, 0.7 and 1 gave 0.847, 0.819 and 0.836 of GPTQ's KL in int4.
EXPONENT = 0.7
# Documents whose layers are computed together, at most. Each layer is read twice for all of them, and what was found is
# kept after them.
AT_ONCE = 8
_HINT = "leave --tune out"


def find_sensitivities(
    model: StreamedModel,
    corpus: Corpus,
    groups: Mapping[str, str],
    *,
    budget: int,
    ranks: Ranks | None = None,
    progress: Advanced | None = None,
    pass_checkpoint: PassCheckpoint | None = None,
) -> dict[str, Tensor]:
    """Find how much a model's answers depend on each token's output of its layers.

    What is found of a document depends neither on memory nor on other documents.

    Args:
        model: the source model. All its shards must be on disk.
        corpus: the texts, as tokens.
        groups: for each Linear, by module name, the name of its group, whose outputs count together. Each computes all
            tokens of a text.
        budget: bytes of memory for what goes into the layers; one document may take more.
        ranks: the processes that share the documents; None for this one alone. The first gets what all have found.
        progress: called with the number of tokens that are done and of all tokens.
        pass_checkpoint: file from which an interrupted run continues; None for none.

    Returns:
        For each group that the answers depend on, float32 [documents, tokens]: the sum of squares of the gradient to
        the power of EXPONENT, divided by its mean.

    Raises:
        SourceError: a weight cannot be read.
        OutputError: the checkpoint cannot be written, or another rank has failed.
        OpenQuantError: transformers' model fails on these weights or texts, or cannot be differentiated.
    """
    if not groups:
        return {}
    ranks = ranks or Ranks()
    recorder = _GradientRecorder(groups, len(corpus.documents), corpus.length)
    done = 0
    if pass_checkpoint is not None:
        if pass_checkpoint.saved is not None:
            done, recorder.squares = pass_checkpoint.saved
        pass_checkpoint.extra = lambda: (done, recorder.squares)

    documents = documents_of_rank(len(corpus.documents), ranks)
    inputs_of_layers = len(model.layers) * hidden_bytes(model.checkpoint, corpus.length)
    at_once = max(1, min(AT_ONCE, budget // max(1, inputs_of_layers)))

    with limited_threads(model, corpus.length), products_in_float32(model.device), recorder.hooked(model):
        while done < len(documents):
            some = documents[done : done + at_once]
            _run_back_and_forth(model, corpus, some, recorder)

            done += len(some)
            if progress is not None:
                progress(done * corpus.length, len(documents) * corpus.length)
            if pass_checkpoint is not None:
                pass_checkpoint.write_measured(is_last=done == len(documents))

    # Documents of other ranks are zeros here.
    if ranks.size > 1:
        for data in ranks.gather(bytes(dump(recorder.squares))):
            for group, squares in load(data).items():
                recorder.squares[group] += squares
    for group, squares in recorder.squares.items():
        if not torch.isfinite(squares).all():
            raise OpenQuantError(f"gradients at the outputs of {group} are not finite", _HINT)
    weights = {group: squares**EXPONENT for group, squares in recorder.squares.items() if squares.any()}
    return {group: weight / weight.mean() for group, weight in weights.items()}


class _GradientRecorder:
    """Sums the squares of gradients at the outputs of Linears.

    Args:
        groups: for each Linear, by module name, the name of its group.
        documents: the number of documents.
        length: tokens of each.

    Attributes:
        squares: float32 [documents, tokens] of each group.
        document: the number of the document that a layer is computed for.
    """

    def __init__(self, groups: Mapping[str, str], documents: int, length: int) -> None:
        self.groups = groups
        self.length = length
        self.squares = {group: torch.zeros(documents, length) for group in groups.values()}
        self.document = 0

    @contextmanager
    def computing(self, document: int) -> Iterator[None]:
        """Note which document a layer is computed for; for `ForwardPass.around`."""
        self.document = document
        yield

    @contextmanager
    def hooked(self, model: StreamedModel) -> Iterator[None]:
        """Record gradients at the outputs that the model computes inside this context."""
        handles = [
            model.model.get_submodule(name).register_forward_hook(partial(self._follow, group))
            for name, group in self.groups.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _follow(self, group: str, _: nn.Module, _inputs: object, output: object) -> None:
        # Routers of some models return several tensors; they are not quantized.
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(self._add, group, self.document))  # type: ignore[no-untyped-call]

    def _add(self, group: str, document: int, gradient: Tensor) -> None:
        norms = torch.linalg.vector_norm(gradient.reshape(self.length, -1), dim=-1, dtype=torch.float32)
        self.squares[group][document] += norms.square().cpu()


def _run_back_and_forth(
    model: StreamedModel, corpus: Corpus, documents: Sequence[int], recorder: _GradientRecorder
) -> None:
    """Run documents through a model, and the gradients of their logits back through it."""
    ends: list[tuple[Tensor, Tensor]] = []

    def cut(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Let gradients of the logits end below the head, so that only one document has logits at a time."""
        end = args[0].detach().requires_grad_()
        ends.append((args[0], end))
        return end, *args[1:]

    def follow(_: nn.Module, _inputs: object, embeddings: Tensor) -> Tensor:
        """Let gradients flow to the embeddings; a copy, because models may write into them."""
        return embeddings.requires_grad_().clone()

    def body(number: int) -> None:
        ids = torch.tensor(corpus.documents[number].ids, device=model.device)
        logits = model.logits(ids)
        with explain_errors(f"{type(model.model).__name__} cannot be differentiated", _HINT):
            torch.autograd.backward(logits, draw_gradient(logits, number))

    head = transformers_internals.output_head(model.model)
    assert head is not None
    passes = [[ForwardPass(model, partial(body, number), partial(recorder.computing, number))] for number in documents]
    layers = _ComputedAgain(model)
    hooks = head.register_forward_pre_hook(cut), model.model.get_input_embeddings().register_forward_hook(follow)
    try:
        with layers.in_place():
            run_interleaved(passes, finished=lambda *_: None, gradients=True)
            layers.run_back([hidden for hidden, _ in ends], [end.grad for _, end in ends])
    finally:
        for hook in hooks:
            hook.remove()


class _ComputedAgain:
    """Keeps only what goes into each layer, and loads and computes the layer again when gradients come to it.

    Args:
        model: the model.
    """

    def __init__(self, model: StreamedModel) -> None:
        self.model = model
        self.is_forward = True
        # The layer that is loaded while gradients flow back.
        self.loaded = REST

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model's layers do so inside this context."""
        layers = [self.model.units[name] for name in self.model.layers]
        try:
            for name, layer in zip(self.model.layers, layers, strict=True):
                layer.forward = partial(self._compute, name, layer.forward)
            yield
        finally:
            for layer in layers:
                layer.__dict__.pop("forward", None)

    def _compute(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def compute(*args: Any, **kwargs: Any) -> Any:
            if self.is_forward:
                return forward(*args, **kwargs)
            self._load(name)
            # torch leaves such modes while gradients flow.
            with products_in_float32(self.model.device):
                return forward(*args, **kwargs)

        return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    def _load(self, name: str) -> None:
        if name != self.loaded:
            self._free()
            self.model.load(name)
            self.loaded = name

    def _free(self) -> None:
        if self.loaded != REST:
            self.model.free(self.loaded)
            self.loaded = REST

    def run_back(self, ends: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Run gradients back from the last layer's outputs; they come to a layer for all documents in turn."""
        self.is_forward = False
        self.model.load(REST)
        try:
            with explain_errors(f"{type(self.model.model).__name__} cannot be differentiated", _HINT):
                torch.autograd.backward(ends, gradients)
        finally:
            self._free()
            self.model.free(REST)


def draw_gradient(logits: Tensor, seed: int) -> Tensor:
    """Draw a gradient of the logits whose covariance is diag(p) - p p' at each token, the curvature of the KL.

    Args:
        logits: [tokens, vocabulary] of any float dtype.
        seed: the same seed gives the same gradient.

    Returns:
        The gradient, as `logits`.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        chances = torch.softmax(logits.float(), -1)
        noise = torch.randn(logits.shape, generator=generator).to(logits.device)
        noise *= chances.sqrt()
        return noise.sub_(chances * noise.sum(-1, keepdim=True)).to(logits.dtype)
