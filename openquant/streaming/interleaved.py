"""Runs forward passes through models interleaved, so that every weight is read once.

A unit is the part of a model that is loaded at once, as in FSDP: an embedding table, a decoder layer or the output
head. The model's own `forward` runs once for each pass, in a greenlet that is suspended wherever a unit is called. The
driver loads the unit, computes it for all passes that wait for it, and frees its weights. So the weights of one unit
are in memory at a time, and this module knows no architecture.

All greenlets run in the caller's thread and share its state: the driver enters inference mode once for all of them.
Each has its own context variables, empty at first.

    streamed = StreamedModel(open_checkpoint(path))
    passes = [
        ForwardPass(streamed, lambda ids=ids: streamed.model(input_ids=ids, use_cache=False).logits) for ids in texts
    ]
    run_interleaved([[forward_pass] for forward_pass in passes], finished=lambda batch, number, logits: ...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import nn

from ..data.corpus import Corpus
from ..errors import OpenQuantError
from ..machine import give_memory_back, memory_used_again
from . import transformers_internals
from .hooks import ModuleHooks
from .meta_model import REST
from .model import (
    Advanced,
    PassProgress,
    StreamedModel,
    layer_costs,
    limited_threads,
    products_in_float32,
    threads_for,
)
from .offload import HiddenStateStore, OffloadedTensors, OffloadFile
from .pass_checkpoint import PassCheckpoint

T = TypeVar("T")


@dataclass(frozen=True)
class ForwardPass(Generic[T]):
    """One forward pass of one model over one text or a few.

    Attributes:
        model: the model it runs.
        body: calls `model.model` and returns the pass's result, such as logits. It runs in its own greenlet, in
            inference mode.
        around: makes a context manager, entered whenever one of the model's units is computed for this pass.
    """

    model: StreamedModel
    body: Callable[[], T]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


class _SuspendedPass(Generic[T]):
    """A pass in its greenlet, suspended wherever a unit is called.

    A greenlet is a call stack of its own. Control goes from one to the other in a single call, so an interrupt comes
    before or after it. What raises in a pass's greenlet, KeyboardInterrupt too, raises in the driver that resumed it.

    Attributes:
        forward_pass: the pass.
        batch: number of its batch.
        number: its number in the batch.
        unit: the unit it waits for.
        call: positional and keyword arguments that it calls the unit with.
        done: whether it returned or was abandoned.
        value: what its body returned.
        offloaded: its large tensors, which can be moved to a file.
    """

    def __init__(self, forward_pass: ForwardPass[T], batch: int, number: int) -> None:
        self.forward_pass = forward_pass
        self.batch = batch
        self.number = number
        self.unit = ""
        self.call: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self.done = False
        self.value: T
        self.offloaded = OffloadedTensors()
        # Nothing on the greenlet's stack refers to this object: a cycle would keep its frames alive.
        self.greenlet = greenlet(lambda _, body=forward_pass.body: body())

    @property
    def model(self) -> StreamedModel:
        return self.forward_pass.model

    def resume(self, output: Any = None) -> None:
        """Run the pass up to its next unit or its end.

        Args:
            output: what the unit it waits for returned.

        Raises:
            BaseException: what the body raised.
        """
        switched = self.greenlet.switch(output)
        if self.greenlet.dead:
            self.value = switched
            self.done = True
        else:
            self.unit, args, kwargs = switched
            self.call = args, kwargs

    def abandon(self) -> None:
        """End the pass wherever it is, and free what its frames refer to."""
        self.call = (), {}
        self.done = True
        while not self.greenlet.dead:
            self.greenlet.throw()


def run_interleaved(
    batches: Sequence[Sequence[ForwardPass[T]]],
    *,
    finished: Callable[[int, int, T], None],
    after_unit: Callable[[str, int, int, torch.Tensor], None] | None = None,
    scratch: OffloadFile | None = None,
    until: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    checkpoint: PassCheckpoint | None = None,
    recompute: Callable[[str], bool] | None = None,
) -> None:
    """Run forward passes together, unit by unit, so that every weight is read once.

    A batch is a list of passes that belong together, such as one text through the source and through each output. Each
    unit is computed batch by batch, and in a batch pass by pass, with that unit of all models loaded. After the last
    unit, the head, a pass runs to its end at once, so the logits of only one batch exist at a time.

    Args:
        batches: the passes.
        finished: called with batch number, number in the batch and the value that the body returned.
        after_unit: called with unit name, batch number, number in the batch and hidden state [batch, tokens, hidden].
            The hidden state is valid until the batch's last pass is through the unit.
        scratch: file for hidden states of waiting batches that exceed its memory budget; None keeps all in memory.
        until: the last unit to compute, after which all passes are abandoned and `finished` is not called; None to
            compute all.
        progress: called with unit name, how many batches are through it, and the number of batches. The second is 0
            while a unit is computed for `recompute`.
        checkpoint: file that waiting passes are saved to, and continued from if it has any; used as long as all passes
            wait for units of one name.
        recompute: called with the unit of a single model before it is computed. While it returns True, the unit is
            computed for all passes and its outputs are discarded. GPTQ does this for layers whose Hessians do not fit
            into memory at once.

    Raises:
        SourceError: a weight is missing or cannot be read.
        OutputError: hidden states or the checkpoint cannot be written.
        OpenQuantError: a unit cannot be computed.
        BaseException: what a body, `finished` or `after_unit` raised.
    """
    suspended_batches = [
        [_SuspendedPass(forward_pass, at, number) for number, forward_pass in enumerate(batch)]
        for at, batch in enumerate(batches)
    ]
    run = _Run(
        suspended_batches,
        finished=finished,
        after_unit=after_unit,
        scratch=scratch,
        until=until,
        progress=progress or (lambda *_: None),
        checkpoint=checkpoint,
        recompute=recompute or (lambda _: False),
    )
    with memory_used_again(), transformers_internals.quiet_transformers(), torch.inference_mode(), run.driver:
        try:
            run.run()
        finally:
            for suspended in run.passes:
                suspended.abandon()


def run_with_hooks(
    model: StreamedModel,
    corpus: Corpus,
    documents: Sequence[int],
    body: Callable[[torch.Tensor], object],
    hooks: ModuleHooks[Any],
    *,
    until: str,
    after_unit: Callable[[str, int, int, torch.Tensor], None],
    scratch: OffloadFile | None = None,
    progress: Advanced | None = None,
    checkpoint: PassCheckpoint | None = None,
    recompute: Callable[[str], bool] | None = None,
    readings: Mapping[str, int] | None = None,
) -> None:
    """Run documents through a model up to a layer, with hooks that see the inputs of its layers.

    Args:
        model: the model.
        corpus: the texts, as tokens.
        documents: numbers of the documents.
        body: calls `model.model` with token ids, int64 [length].
        hooks: are on while a layer is computed.
        until: the last layer to compute.
        after_unit: as in `run_interleaved`, with the place in `documents` as batch number.
        scratch: file for hidden states that exceed its budget of memory; None keeps all in memory.
        progress: called with the number of tokens that are done and of all tokens. A token that is through half of the
            layers counts half.
        checkpoint: file that waiting passes are saved to, and continued from if it has any.
        recompute: as in `run_interleaved`.
        readings: how often texts run through a layer, by its name; others count once.
    """

    @contextmanager
    def observe() -> Iterator[None]:
        with products_in_float32(model.device), hooks.on():
            yield

    texts = [torch.tensor(corpus.documents[number].ids, device=model.device) for number in documents]
    resumed = frozenset() if checkpoint is None else checkpoint.done
    layers = model.layers[: model.layers.index(until) + 1]
    costs = layer_costs(model, [layer for layer in layers if layer not in resumed])
    costs = {layer: cost * (readings or {}).get(layer, 1) for layer, cost in costs.items()}

    with limited_threads(threads_for(model, corpus.length)):
        run_interleaved(
            [[ForwardPass(model, partial(body, ids), observe)] for ids in texts],
            finished=lambda *_: None,
            after_unit=after_unit,
            scratch=scratch,
            until=until,
            progress=PassProgress(costs, len(texts) * corpus.length, progress).layer_done,
            checkpoint=checkpoint,
            recompute=recompute,
        )


class _Driver:
    """Context manager in which calls of the models' units suspend the pass that makes them."""

    def __init__(self, models: list[StreamedModel]) -> None:
        self.models = models
        self.running: greenlet | None = None
        self.forwards: dict[tuple[int, str], Callable[..., Any]] = {}
        # The greenlet that loads and computes units, the parent of all passes.
        self.main_greenlet: Any = getcurrent()
        self._replaced: list[tuple[nn.Module, Callable[..., Any] | None]] = []

    def __enter__(self) -> _Driver:
        try:
            for model in self.models:
                model.load(REST)
                for name, module in model.units.items():
                    # A caller may have replaced the class's forward in this instance.
                    self._replaced.append((module, module.__dict__.get("forward")))
                    self.forwards[id(model), name] = module.forward
                    module.forward = self._suspending(name, module.forward)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for module, instance_forward in self._replaced:
            module.__dict__.pop("forward", None)
            if instance_forward is not None:
                module.forward = instance_forward
        for model in self.models:
            model.free(REST)

    def _suspending(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if getcurrent() is not self.running:
                return forward(*args, **kwargs)
            return self.main_greenlet.switch((name, args, kwargs))

        return call

    def resume(self, suspended: _SuspendedPass[Any], output: Any = None) -> None:
        """Run a pass up to its next unit or its end; `output` is what the unit it waits for returned."""
        self.running = suspended.greenlet
        suspended.resume(output)

    def compute(self, suspended: _SuspendedPass[Any]) -> Any:
        """Compute the unit that a pass waits for, and return its output."""
        args, kwargs = suspended.call
        suspended.call = (), {}
        model = suspended.model
        for other in self.models:
            if other is not model:
                other.release_pages()

        try:
            with suspended.forward_pass.around():
                forward = self.forwards[id(model), suspended.unit]
                if model.units[suspended.unit] is model.model.get_input_embeddings():
                    return model.embed_in_pieces(forward, args, kwargs)
                if model.units[suspended.unit] is transformers_internals.output_head(model.model):
                    return model.project_in_pieces(forward, args, kwargs)
                return forward(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, NotImplementedError) as error:
            raise OpenQuantError(
                f"{suspended.unit} of {type(model.model).__name__} cannot be computed: {str(error).strip()[:300]}",
                "transformers' model fails on these weights or this text",
            ) from error


@dataclass
class _Run(Generic[T]):
    """One call of `run_interleaved`, whose arguments these are."""

    batches: list[list[_SuspendedPass[T]]]
    finished: Callable[[int, int, T], None]
    after_unit: Callable[[str, int, int, torch.Tensor], None] | None
    scratch: OffloadFile | None
    until: str | None
    progress: Callable[[str, int, int], None]
    checkpoint: PassCheckpoint | None
    recompute: Callable[[str], bool]

    def __post_init__(self) -> None:
        self.passes = [suspended for batch in self.batches for suspended in batch]
        self.driver = _Driver(list({id(suspended.model): suspended.model for suspended in self.passes}.values()))
        self.store = HiddenStateStore(self.scratch)

    def run(self) -> None:
        """Run all passes to their end, or through the last unit."""
        for batch in self.batches:
            for suspended in batch:
                self.driver.resume(suspended)
                self._report_end(suspended)
            self.store.offload(batch)

        while waiting := [suspended for suspended in self.passes if not suspended.done]:
            if self.checkpoint is not None and self._skip_computed(self.checkpoint):
                continue
            # For each model, the unit that the first of its passes waits for.
            units: dict[StreamedModel, str] = {}
            for suspended in waiting:
                units.setdefault(suspended.model, suspended.unit)
            is_last = self.until in units.values()

            for model, unit in units.items():
                model.load(unit)
                if not is_last:
                    model.prefetch(model.next_unit[unit])
            self._compute_units(units, waiting[0].unit, is_last)
            for model, unit in units.items():
                model.free(unit)
            give_memory_back()

            if is_last:
                return
            if self.checkpoint is not None and self.checkpoint.is_due(unit):
                self._save(self.checkpoint)

    def _report_end(self, suspended: _SuspendedPass[T]) -> None:
        """Give the value of a pass to the caller once it is done."""
        if suspended.done:
            value = suspended.value
            del suspended.value
            self.finished(suspended.batch, suspended.number, value)

    def _compute_units(self, units: Mapping[StreamedModel, str], reported: str, is_last: bool) -> None:
        """Compute the loaded unit of each model for the passes that wait for it, and let them run on."""
        while self.recompute(reported):
            self._compute_and_discard()

        for at, batch in enumerate(self.batches):
            self.store.restore(batch)
            waiting = [suspended for suspended in batch if not suspended.done]
            ready = [suspended for suspended in waiting if suspended.unit == units[suspended.model]]
            for suspended in ready:
                output = self._compute(suspended)
                if not is_last:
                    self.driver.resume(suspended, output)
                # What a pass returns is compared without the output of the head in memory.
                del output
                self._report_end(suspended)
            if ready:
                self.progress(reported, at + 1, len(self.batches))

            if not is_last:
                self.store.offload(batch)
                continue
            # Hidden states that were restored for the last unit are not needed after it.
            for suspended in ready:
                suspended.abandon()

    def _compute(self, suspended: _SuspendedPass[T]) -> Any:
        """Compute the unit that a pass waits for; its output is recorded and shown to the caller."""
        output = self.driver.compute(suspended)
        unit = suspended.unit
        if self.checkpoint is not None and not isinstance(suspended.model.units[unit], nn.Embedding):
            self.checkpoint.record_output(unit, output)
        if self.after_unit is not None:
            self.after_unit(unit, suspended.batch, suspended.number, hidden_state(output))
        return output

    def _compute_and_discard(self) -> None:
        """Compute a unit for all passes, which wait for it, without resuming them."""
        for batch in self.batches:
            self.store.restore(batch)
            for suspended in batch:
                call = suspended.call
                self.driver.compute(suspended)
                suspended.call = call
            self.store.offload(batch)
            self.progress(batch[0].unit, 0, len(self.batches))

    def _skip_computed(self, checkpoint: PassCheckpoint) -> bool:
        """Let passes skip the unit they wait for if an earlier run computed it, and say whether they did.

        At the unit that the checkpoint was saved at, passes get the saved arguments instead.
        """
        model = self.passes[0].model
        unit = self.passes[0].unit
        if any(suspended.done or suspended.unit != unit for suspended in self.passes):
            checkpoint.refuse_units()
            return False

        if not checkpoint.enter_unit(unit, isinstance(model.units[unit], nn.Embedding)):
            calls = checkpoint.saved_calls(unit, [suspended.call for suspended in self.passes], model.device)
            for suspended, call in zip(self.passes, calls, strict=False):
                suspended.call = call
                if suspended is self.batches[suspended.batch][-1]:
                    self.store.offload(self.batches[suspended.batch])
            return False

        for number, suspended in enumerate(self.passes):
            suspended.call = (), {}
            self.driver.resume(suspended, checkpoint.zero_output(unit, number, model.device))
            if suspended is self.batches[suspended.batch][-1]:
                self.progress(unit, suspended.batch + 1, len(self.batches))
        return True

    def _save(self, checkpoint: PassCheckpoint) -> None:
        """Save passes to the checkpoint, if all wait for the same unit."""
        if any(suspended.done or suspended.unit != self.passes[0].unit for suspended in self.passes):
            return

        @contextmanager
        def in_memory(batch: int) -> Iterator[None]:
            self.store.restore(self.batches[batch])
            yield
            self.store.offload(self.batches[batch])

        calls = [[suspended.call for suspended in batch] for batch in self.batches]
        checkpoint.write(self.passes[0].unit, calls, in_memory)


def hidden_state(output: Any) -> torch.Tensor:
    """Return the hidden state [batch, tokens, hidden] in a unit's output: a tensor, or a tuple that starts with it."""
    while isinstance(output, (tuple, list)):
        output = output[0]
    assert isinstance(output, torch.Tensor)
    return output
