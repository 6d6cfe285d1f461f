"""How much a model's answers depend on the outputs of each layer, by which GPTQ then weighs tokens and outputs.

GPTQ makes the squared error of a layer's outputs small, and all tokens and outputs count alike. But answers depend on
some far more than on others. An error e of a layer's output changes the answers by a KL divergence of e' G e / 2 with
G = E[g g'], where g is the gradient at that output of the logits times a random vector. The vector's covariance is the
curvature of the KL, diag(p) - p p' with the probabilities p of the next token, so no labels are needed. The weight of a
token comes from the sum of squares of g, as in GuidedQuant (Kim et al., arXiv 2505.07004) with one group of outputs.
How outputs count together is the sum of x'x g g' over all tokens with inputs x, as in YAQA (Tseng et al., arXiv
2505.22988), in blocks on its diagonal.

    groups = {"model.layers.0.mlp.gate_proj": "mlp 0", "model.layers.0.mlp.up_proj": "mlp 0", ..}
    tokens, outputs = find_sensitivities(run, groups, budget=1 << 30)
    tokens["mlp 0"]                              # float32 [documents, tokens]
    outputs["model.layers.0.mlp.gate_proj"]      # float32 [out / BLOCK, BLOCK, BLOCK]

A few texts at a time run through the model, since what goes into each layer is kept until gradients are back there.
They flow from the head down, and each layer is loaded and computed once more on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..data.corpus import Corpus
from ..distributed import Ranks
from ..errors import OpenQuantError
from ..machine import give_memory_back
from ..streaming.interleaved import ForwardPass, TextRun, explain_errors, run_interleaved
from ..streaming.memory import BLOCK, hidden_bytes
from ..streaming.meta_model import REST
from ..streaming.model import StreamedModel, limited_threads, products_in_float32
from ..streaming.pass_checkpoint import PassCheckpoint

# Power of the sum of squares. One draw of the gradient says little of a single token, and a few tokens have most of the
# sum: on SmolLM2 with 12k tokens, 0.5, 0.7 and 1 gave 0.847, 0.819 and 0.836 of GPTQ's KL in int4.
EXPONENT = 0.7
# Documents whose layers are computed together, at most. Each layer is read twice for all of them, and what was found is
# kept after them.
AT_ONCE = 8
# Sums over documents are made in so many parts, which ranks share, and then added, in the same order for any number of
# ranks.
PARTS = 4
_HINT = "leave --tune out"


class Sensitivities(NamedTuple):
    """How much a model's answers depend on the outputs of its layers.

    Attributes:
        tokens: for each group that the answers depend on, float32 [documents, tokens]: the sum of squares of the
            gradient to the power of EXPONENT, divided by its mean.
        outputs: for each Linear that the answers depend on, by module name, float32 [blocks, BLOCK, BLOCK]: the
            curvature of the KL over BLOCK outputs in turn; that over the weights is its product with the Hessian of
            the inputs. The last block has zeros beyond the last output.
    """

    tokens: dict[str, Tensor]
    outputs: dict[str, Tensor]


def find_sensitivities(
    run: TextRun,
    groups: Mapping[str, str],
    budget: int,
    ranks: Ranks | None = None,
    open_part: Callable[[int], PassCheckpoint] | None = None,
) -> Sensitivities:
    """Find how much a model's answers depend on the outputs of its layers.

    What is found does not depend on memory and ranks.

    Args:
        run: the texts and the source model, all of whose shards must be on disk. Hidden states stay in memory.
        groups: for each Linear, by module name, the name of its group, whose outputs count together. Each computes all
            tokens of a text.
        budget: bytes of memory for what goes into the layers; one document may take more.
        ranks: the processes that share the documents; None for this one alone.
        open_part: opens the file of a part of the documents, by its number below PARTS, which all ranks can read; None
            to keep all parts in memory, in a single process.

    Raises:
        SourceError: a weight cannot be read.
        OutputError: a part cannot be written, or another rank has failed.
        OpenQuantError: transformers' model fails on these weights or texts, or cannot be differentiated.
    """
    if not groups:
        return Sensitivities({}, {})
    ranks = ranks or Ranks()
    count = len(run.corpus.documents)
    parts = [range(count * number // PARTS, count * (number + 1) // PARTS) for number in range(PARTS)]
    parts = [documents for documents in parts if documents]
    weigh = partial(_weigh_part, run, groups, budget)

    found: Iterator[_Found]
    if open_part is None:
        found = (weigh(documents, None) for documents in parts)
    else:
        for number in range(ranks.rank, len(parts), ranks.size):
            weigh(parts[number], open_part(number))
            give_memory_back()
        ranks.agree(None)
        found = (open_part(number).saved for number in range(len(parts)))

    squares: dict[str, list[Tensor]] = {}
    outputs: dict[str, Tensor] = {}
    for _, part_squares, part_outputs in found:
        for group, of_documents in part_squares.items():
            squares.setdefault(group, []).append(of_documents)
        for name, products in part_outputs.items():
            outputs[name] = outputs[name].add_(products) if name in outputs else products

    tokens: dict[str, Tensor] = {}
    for group, of_parts in squares.items():
        weights = torch.cat(of_parts) ** EXPONENT
        if not torch.isfinite(weights).all():
            raise OpenQuantError(f"gradients at the outputs of {group} are not finite", _HINT)
        if weights.any():
            tokens[group] = weights / weights.mean()
    # Large inputs and gradients together may overflow where each does not.
    outputs = {name: blocks for name, blocks in outputs.items() if blocks.isfinite().all() and blocks.any()}
    return Sensitivities(tokens, outputs)


# The number of documents that are done; and `squares` and `outputs` of a _GradientRecorder.
_Found = tuple[int, dict[str, Tensor], dict[str, Tensor]]


def _weigh_part(
    run: TextRun, groups: Mapping[str, str], budget: int, documents: range, saved_in: PassCheckpoint | None
) -> _Found:
    """Add up the gradients of a part of the documents, and go on from its file."""
    model = run.model
    corpus = run.corpus
    recorder = _GradientRecorder(groups, documents, corpus.length)
    done = 0
    if saved_in is not None:
        if saved_in.saved is not None:
            done, recorder.squares, recorder.outputs = saved_in.saved
        saved_in.extra = lambda: (done, recorder.squares, recorder.outputs)

    inputs_of_layers = len(model.layers) * hidden_bytes(model.checkpoint, corpus.length)
    at_once = max(1, min(AT_ONCE, budget // max(1, inputs_of_layers)))

    with limited_threads(model, corpus.length), products_in_float32(model.device), recorder.hooked(model):
        while done < len(documents):
            some = documents[done : done + at_once]
            # Gradients come to a layer for the last of them first. So documents are added in order, and sums are the
            # same however many run together.
            _run_back_and_forth(model, corpus, some[::-1], recorder)

            done += len(some)
            if run.progress is not None:
                run.progress(some.stop * corpus.length, len(corpus.documents) * corpus.length)
            if saved_in is not None:
                saved_in.write_measured(is_last=done == len(documents))
    return done, recorder.squares, recorder.outputs


class _GradientRecorder:
    """Sums gradients at the outputs of Linears.

    Args:
        groups: for each Linear, by module name, the name of its group.
        documents: the numbers of the documents.
        length: tokens of each.

    Attributes:
        squares: sums of squares of gradients, float32 [documents, tokens] of each group.
        outputs: as those of Sensitivities.
        document: the number of the document that a layer is computed for.
    """

    def __init__(self, groups: Mapping[str, str], documents: range, length: int) -> None:
        self.groups = groups
        self.length = length
        self.first = documents.start
        self.squares = {group: torch.zeros(len(documents), length) for group in groups.values()}
        self.outputs: dict[str, Tensor] = {}
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
            model.model.get_submodule(name).register_forward_hook(partial(self._follow, name)) for name in self.groups
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _follow(self, name: str, _: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        # Routers of some models return several tensors; they are not quantized.
        if isinstance(output, Tensor) and output.requires_grad:
            squares = inputs[0].detach().reshape(self.length, -1).float().square().mean(-1)
            output.register_hook(partial(self._add, name, self.document, squares))  # type: ignore[no-untyped-call]

    def _add(self, name: str, document: int, input_squares: Tensor, gradient: Tensor) -> None:
        width = gradient.shape[-1]
        gradients = gradient.reshape(self.length, -1).float()
        squares = gradients.square().sum(-1)
        self.squares[self.groups[name]][document - self.first] += squares.cpu()

        # A Linear of several groups, as in DeepSeek-V4, has outputs of its own for each.
        if gradients.shape[1] != width:
            return
        blocks = nn.functional.pad(gradients, (0, -width % BLOCK)).reshape(self.length, -1, BLOCK).transpose(0, 1)
        products = torch.bmm((blocks * input_squares[:, None]).mT, blocks).cpu()
        self.outputs[name] = self.outputs[name].add_(products) if name in self.outputs else products


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

    assert model.head is not None
    passes = [[ForwardPass(model, partial(body, number), partial(recorder.computing, number))] for number in documents]
    layers = _ComputedAgain(model)
    hooks = model.head.register_forward_pre_hook(cut), model.model.get_input_embeddings().register_forward_hook(follow)
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
