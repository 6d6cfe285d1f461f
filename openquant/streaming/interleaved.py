"""Runs forward passes through models interleaved, so that every weight is read once.

A unit is the part of a model that is loaded at once, as in FSDP: an embedding table, a decoder layer or the output
head. The model's own `forward` runs once for each pass, in a greenlet that is suspended wherever a unit is called. The
driver loads the unit, computes it for all passes that wait for it, and frees its weights. So the weights of one unit
are in memory at a time, and this module knows no architecture.

All greenlets run in the caller's thread and share its state: the driver enters inference mode once for all of them, or
enables gradients.
Each has its own context variables, empty at first.

    streamed = StreamedModel(open_checkpoint(path))
    passes = [
        ForwardPass(streamed, lambda ids=ids: streamed.model(input_ids=ids, use_cache=False).logits) for ids in texts
    ]
    run_interleaved([[forward_pass] for forward_pass in passes], finished=lambda batch, number, logits: ...)

Hooks that observe or replace the inputs of a model's layers, and a KV cache that keeps nothing.

transformers computes the stacked experts of a layer in one module, which has two hook points: the input of gate and up,
and the input of down.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from ..data.corpus import Corpus
from ..errors import OpenQuantError
from ..machine import give_memory_back, memory_used_again
from . import transformers_internals
from .meta_model import REST
from .model import Advanced, PassProgress, StreamedModel, limited_threads, products_in_float32
from .offload import HiddenStateStore, OffloadedTensors, OffloadFile
from .pass_checkpoint import PassCheckpoint

T = TypeVar("T")


@dataclass(frozen=True)
class ForwardPass(Generic[T]):
    """One forward pass of one model over one text or a few.

    Attributes:
        model: the model it runs.
        body: calls `model.model` and returns the pass's result, such as logits. It runs in its own greenlet.
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
    gradients: bool = False,
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
        progress: called with unit name, how many batches are through it, and the number of batches.
        checkpoint: file that waiting passes are saved to, and continued from if it has any. All passes must then wait
            for units of the same names.
        gradients: whether torch notes what gradients need, in place of inference mode.

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
    )

    mode = torch.enable_grad() if gradients else torch.inference_mode()
    with memory_used_again(), transformers_internals.quiet_transformers(), mode, run.driver:
        try:
            run.run()
        finally:
            for suspended in run.passes:
                suspended.abandon()


@dataclass
class TextRun:
    """Texts that run through a model, layer by layer.

    Attributes:
        model: the model.
        corpus: the texts, as tokens.
        scratch: file for hidden states that exceed its budget of memory; None keeps all in memory.
        progress: called with the number of tokens that are done and of all tokens. A token that is through half of the
            layers counts half.
        checkpoint: file that waiting passes are saved to, and continued from if it has any.
    """

    model: StreamedModel
    corpus: Corpus
    scratch: OffloadFile | None = None
    progress: Advanced | None = None
    checkpoint: PassCheckpoint | None = None

    def run(
        self,
        documents: Sequence[int],
        body: Callable[[Tensor], object],
        hooks: Sequence[ModuleHooks[Any]],
        until: str,
        after_unit: Callable[[str, int, int, Tensor], None],
    ) -> None:
        """Run documents up to a layer, with hooks that see the inputs of its layers.

        Args:
            documents: numbers of the documents.
            body: calls `model.model` with token ids, int64 [length].
            hooks: they are on while a layer is computed.
            until: the last layer to compute.
            after_unit: as in `run_interleaved`, with the place in `documents` as batch number.
        """
        model = self.model

        @contextmanager
        def observe(number: int) -> Iterator[None]:
            with products_in_float32(model.device), ExitStack() as stack:
                for each in hooks:
                    stack.enter_context(each.on(number))
                yield

        def make_pass(number: int) -> ForwardPass[object]:
            ids = torch.tensor(self.corpus.documents[number].ids, device=model.device)
            return ForwardPass(model, partial(body, ids), partial(observe, number))

        resumed = frozenset() if self.checkpoint is None else self.checkpoint.done
        layers = [layer for layer in model.layers[: model.layers.index(until) + 1] if layer not in resumed]

        with limited_threads(model, self.corpus.length):
            run_interleaved(
                [[make_pass(number)] for number in documents],
                finished=lambda *_: None,
                after_unit=after_unit,
                scratch=self.scratch,
                until=until,
                progress=PassProgress(layers, len(documents) * self.corpus.length, self.progress).layer_done,
                checkpoint=self.checkpoint,
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
        for model in self.models:
            model.load(REST)
            for name, module in model.units.items():
                # A caller may have replaced the class's forward in this instance.
                self._replaced.append((module, module.__dict__.get("forward")))
                self.forwards[id(model), name] = module.forward
                module.forward = self._suspending(name, module.forward)
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
            return self.main_greenlet.switch((name, (args, kwargs)))

        return call

    def resume(self, suspended: _SuspendedPass[Any], output: Any = None) -> None:
        """Run a pass up to its next unit or its end; `output` is what the unit it waits for returned."""
        self.running = suspended.greenlet
        switched = suspended.greenlet.switch(output)
        if suspended.greenlet.dead:
            suspended.value = switched
            suspended.done = True
        else:
            suspended.unit, suspended.call = switched

    def compute(self, suspended: _SuspendedPass[Any]) -> Any:
        """Compute the unit that a pass waits for, and return its output."""
        args, kwargs = suspended.call
        suspended.call = (), {}
        model = suspended.model
        for other in self.models:
            if other is not model:
                other.release_pages()

        unit = suspended.unit
        what = f"{unit} of {type(model.model).__name__} cannot be computed"
        with suspended.forward_pass.around(), explain_errors(what, _FAILS):
            forward = self.forwards[id(model), unit]
            if model.units[unit] is model.model.get_input_embeddings():
                return model.embed_in_pieces(forward, args, kwargs)
            if model.units[unit] is model.head:
                return model.project_in_pieces(forward, args, kwargs)
            return forward(*args, **kwargs)


_FAILS = "transformers' model fails on these weights or this text"


@contextmanager
def explain_errors(what: str, hint: str) -> Iterator[None]:
    """Raise errors of a model's own code as an OpenQuantError.

    Args:
        what: what cannot be done, which begins the message.
        hint: what the user can do.
    """
    try:
        yield
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, NotImplementedError) as error:
        raise OpenQuantError(f"{what}: {str(error).strip()[:300]}", hint) from error


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

    def _skip_computed(self, checkpoint: PassCheckpoint) -> bool:
        """Let passes skip the unit they wait for if an earlier run computed it, and say whether they did.

        At the unit that the checkpoint was saved at, passes get the saved arguments instead.
        """
        model = self.passes[0].model
        unit = self.passes[0].unit
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
        """Save passes to the checkpoint, unless they have ended."""
        if self.passes[0].done:
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


R = TypeVar("R")

# Names of the parameters of stacked experts: those that the module's input goes into, and the one after the gate.
FIRST, DOWN = ("gate_up_proj", "gate_proj", "up_proj"), ("down_proj",)


@dataclass
class RoutedTokens:
    """The routing of one call of a module of stacked experts: which tokens go to which experts.

    Attributes:
        experts: the number of experts in the module.
        chosen: int64 [tokens, k], the experts of each token. Some routers also choose a number beyond the last expert,
            which computes nothing. None if the module's input is one block of rows for each expert, as in Llama 4,
            with zeros for tokens that do not go to it.
        passed: the number of rows that `split_sorted` has divided so far.
    """

    experts: int
    chosen: Tensor | None
    passed: int = 0

    def counts(self) -> Tensor | None:
        """Count the tokens of each expert: int64 [experts] on the CPU; None if `chosen` is."""
        if self.chosen is None:
            return None
        return torch.bincount(self.chosen.reshape(-1), minlength=self.experts)[: self.experts].cpu()

    def rows_of(self, expert: int, rows: Tensor) -> Tensor:
        """Select the rows that go to an expert.

        Args:
            expert: its number.
            rows: inputs of gate and up, [tokens, in]; [experts * tokens, in] if `chosen` is None.

        Returns:
            A copy of its rows, [expert's tokens, in]; without rows of zeros if `chosen` is None.
        """
        if self.chosen is None:
            block = rows.reshape(self.experts, -1, rows.shape[-1])[expert]
            return block[block.any(-1)]
        return rows[(self.chosen.reshape(len(rows), -1) == expert).any(-1)]

    def split_sorted(self, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Divide inputs of down, which are sorted by expert, and count them in `passed`.

        Args:
            rows: the next rows [n, in]; transformers passes all at once, or those of one expert in each call. All
                at once, in a block for each expert, if `chosen` is None.

        Yields:
            Number of each expert that has some of these rows, and its rows [m, in]. If `chosen` is None, every expert
            with its rows that are not zero, maybe none.
        """
        counts = self.counts()
        if counts is None:
            yield from ((expert, self.rows_of(expert, rows)) for expert in range(self.experts))
            return

        begin = self.passed
        end = 0
        self.passed += len(rows)
        for expert, count in enumerate(counts.tolist()):
            low = end
            end += count
            if end > begin and low < self.passed:
                yield expert, rows[max(low - begin, 0) : end - begin]


@dataclass(frozen=True)
class ExpertWeights(Generic[T]):
    """What a hook needs to know at the two hook points of a module of stacked experts, such as their observers.

    Attributes:
        first: for the input of gate and up; None for no hook.
        down: for the input of down; None for no hook.
    """

    first: T | None
    down: T | None


def holds_experts(module: nn.Module) -> bool:
    """Whether a module has stacked experts that transformers' common code computes, so that hooks know its inputs."""
    return hasattr(module, "is_concatenated")


class ModuleHooks(ABC, Generic[T]):
    """Calls `on_input` with the inputs of layers while it is on. T is what a subclass knows of a layer.

    Args:
        model: the model that hooks are registered on.
        layers: for each hooked nn.Linear, by module name, what is passed to `on_input`.
        experts: the same for modules of stacked experts.

    Attributes:
        document: the number that was passed to `on`.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, T], experts: Mapping[str, ExpertWeights[T]]) -> None:
        self._active = False
        self.document = 0
        # The last activations and what was computed from them, by a key that the subclass chooses.
        self._last: dict[Any, tuple[Tensor, Any]] = {}

        for name, layer in layers.items():
            model.get_submodule(name).register_forward_pre_hook(self._input_hook(layer, name), with_kwargs=True)

        # Routing of each module of experts in its current call; None if the module does not say.
        self._routed: dict[str, RoutedTokens | None] = {}
        for name, points in experts.items():
            module = model.get_submodule(name)
            module.register_forward_pre_hook(self._routing_hook(name), with_kwargs=True)
            if points.first is not None:
                module.register_forward_pre_hook(self._input_hook(points.first, name), with_kwargs=True)
            if points.down is not None:
                self._hook_down(module, points.down, name)

    @abstractmethod
    def on_input(self, values: Tensor, layer: T, module_name: str) -> Tensor:
        """Observe or replace a layer's input.

        Args:
            values: the input, [..., in].
            layer: what was passed for the layer to the constructor.
            module_name: the name of its module.

        Returns:
            What the layer computes with, [..., in].
        """

    @contextmanager
    def on(self, document: int = 0) -> Iterator[None]:
        """Call `on_input` inside this context; for `ForwardPass.around`.

        Args:
            document: number of the document that is computed, for those that need it.
        """
        self._active = True
        self.document = document
        try:
            yield
        finally:
            self._active = False
            self._last.clear()
            self._routed.clear()

    def _once(self, key: Any, values: Tensor, make: Callable[[], R]) -> R:
        """Return what `make` returns, computed once for layers with the same input: q, k and v, or gate and up."""
        last = self._last.get(key)
        if last is None or last[0] is not values:
            last = self._last[key] = values, make()
        result: R = last[1]
        return result

    def _routing_hook(self, module_name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._active:
                return
            # The second argument of modules of stacked experts has the experts of each token.
            _, *others = (*args, *kwargs.values())
            stacks = (getattr(module, name, None) for name in (*FIRST, *DOWN))
            experts = next(len(stack) for stack in stacks if stack is not None)
            if not others:
                self._routed[module_name] = RoutedTokens(experts, None)
            elif isinstance(others[0], Tensor) and not others[0].is_floating_point():
                self._routed[module_name] = RoutedTokens(experts, others[0])
            else:
                self._routed[module_name] = None

        return before

    def _input_hook(self, layer: T, module_name: str) -> Callable[..., Any]:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._active:
                return None
            if args:
                return (self.on_input(args[0], layer, module_name), *args[1:]), kwargs
            # Called by keyword: hidden_states of experts, input of a Linear.
            first = next(iter(kwargs))
            return args, {**kwargs, first: self.on_input(kwargs[first], layer, module_name)}

        return before

    def _hook_down(self, module: nn.Module, layer: T, module_name: str) -> None:
        """Hook the input of down in stacked experts, which is the output of the gate or of the activation function."""
        name = "_apply_gate" if getattr(module, "has_gate", True) else "act_fn"
        if not hasattr(module, name):
            self._hook_down_product(module, layer, module_name)
            return
        original = getattr(module, name)
        # Not by setattr: torch refuses to replace a module by a function.
        module.__dict__[name] = lambda *args: (
            self.on_input(original(*args), layer, module_name) if self._active else original(*args)
        )

    def _hook_down_product(self, module: nn.Module, layer: T, module_name: str) -> None:
        """Hook the input of down in Llama 4's experts, whose forward computes the gate inline."""
        original = module.forward

        def forward(*args: Any) -> Any:
            if not self._active:
                return original(*args)
            with _ReplaceFactor(module.down_proj, lambda values: self.on_input(values, layer, module_name)):
                return original(*args)

        module.__dict__["forward"] = forward


class _ReplaceFactor(TorchFunctionMode):
    """Replaces the first argument of products with a parameter.

    Args:
        parameter: the second argument of the products.
        change: returns what replaces the first.
    """

    def __init__(self, parameter: object, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._parameter = parameter
        self._change = change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(args) == 2 and args[1] is self._parameter:
            args = self._change(args[0]), args[1]
        return func(*args, **(kwargs or {}))


class TextCache(DynamicCache):  # type: ignore[misc]  # mypy does not read transformers
    """A KV cache that stores neither keys and values nor states, because no token comes after the text.

    Otherwise a text that waits for its next layer would hold those of all layers before it.

    Args:
        config: the model's config, of transformers.
    """

    # Read by pass_checkpoint.py: a pass that continues may have another cache.
    holds_nothing = True

    def __init__(self, config: Any) -> None:
        super().__init__(config=config.get_text_config())

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values [batch, heads, length, dim]."""
        del layer_idx, args, kwargs
        return key_states, value_states

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the layer computes with, and drop the state."""
        states: Tensor = super().update_conv_state(conv_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        layer.conv_states = dict.fromkeys(layer.conv_states)
        layer.is_conv_states_initialized = dict.fromkeys(layer.conv_states, False)
        return states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Return the state, and do not store it."""
        del layer_idx, args, kwargs
        return recurrent_states
