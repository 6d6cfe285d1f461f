"""Passes through models side by side: each is suspended wherever a unit is called, and every weight is read once.

A model's own `forward` runs once for each pass, in a greenlet that is suspended wherever a unit is called. The driver
loads a unit, computes it for all passes that wait for it, and frees its weights; so only one unit's are in memory, and
no architecture is known here.

All greenlets run in the caller's thread and share its state: the driver enters inference mode once around all of them.
Each has its own context variables, empty at first.

    streamed = StreamedModel(open_checkpoint(path))
    passes = [Pass(streamed, lambda ids=ids: streamed.model(input_ids=ids, use_cache=False).logits) for ids in batches]
    run([[each] for each in passes], finished=lambda group, number, logits: ...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import nn

from ..errors import OpenQuantError
from ..machine import give_memory_back, memory_used_again
from . import transformers_internals
from .meta_model import REST
from .model import StreamedModel
from .offload import HiddenStateStore, OffloadedTensors, OffloadFile
from .pass_checkpoint import PassCheckpoint

T = TypeVar("T")


@dataclass(frozen=True)
class ForwardPass(Generic[T]):
    """One forward pass over one batch.

    Attributes:
        model: what it runs.
        body: calls `model.model` and makes of its output what is wanted; in a greenlet of its own, in inference mode.
        around: entered whenever one of the model's units is computed for this pass.
    """

    model: StreamedModel
    body: Callable[[], T]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


class _Suspended(Generic[T]):
    """A pass in its greenlet, suspended wherever a unit is called.

    A greenlet is a call stack of its own. Control goes from one to the other in a single call, which an interrupt comes
    before or after. What raises in the greenlet of a pass, KeyboardInterrupt too, raises in the driver that resumed it.
    """

    def __init__(self, of: ForwardPass[T], group: int, number: int) -> None:
        self.of, self.group, self.number = of, group, number
        self.unit = ""
        self.call: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self.done = False
        self.value: T
        self.held = OffloadedTensors()
        # Nothing on its stack refers to this object: without a cycle its frames are freed as soon as nobody needs it.
        self.greenlet = greenlet(lambda _, body=of.body: body())

    def resume(self, result: Any = None) -> None:
        """Run it on to the next unit or to its end.

        Args:
            result: what the unit it waits for gave.

        Raises:
            BaseException: what it raised.
        """
        given = self.greenlet.switch(result)
        if self.greenlet.dead:
            self.value, self.done = given, True
        else:
            self.unit, args, kwargs = given
            self.call = args, kwargs

    def abandon(self) -> None:
        """End it, wherever it is, and free what its frames hold."""
        self.call, self.done = ((), {}), True
        while not self.greenlet.dead:
            self.greenlet.throw()


def run_interleaved(
    groups: Sequence[Sequence[ForwardPass[T]]],
    *,
    finished: Callable[[int, int, T], None],
    after_unit: Callable[[str, int, int, torch.Tensor], None] | None = None,
    scratch: OffloadFile | None = None,
    until: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    kept: PassCheckpoint | None = None,
    again: Callable[[str], bool] | None = None,
) -> None:
    """Run passes together, unit by unit; every weight is read once.

    The passes of a group go side by side: after a unit group by group, in each pass by pass, with that unit of all
    models loaded. After the last unit, the head, a pass runs to its end at once, so that only one group's logits exist
    at a time.

    Args:
        groups: the passes; ranks of several processes take shares of the groups.
        finished: told what a pass's body returned: group, number in the group, value.
        after_unit: told what a unit gave: its name, group, number in the group, hidden state. What it keeps of that is
            valid until the group's last pass is through the unit.
        scratch: where hidden states of groups that wait go beyond its budget; if None they stay in memory.
        until: the unit after which all passes end, before the next is loaded; `finished` is told nothing then.
        progress: told a unit, how many groups are through it, and how many there are; 0 where one went through it for
            `again`.
        kept: where passes of one model are kept as they wait, and go on from if they were before.
        again: asked of a unit of one model before it is computed: whether all passes are to be taken through it once
            more, and wait for it as before. What it gives then goes nowhere.

    Raises:
        OpenQuantError: a weight is missing or cannot be read, or a unit cannot be computed.
        BaseException: what a body, `finished` or `after_unit` raised.
    """
    if kept is not None:
        units = {unit for group in groups for each in group for unit in each.model.units}
        kept.require_units(units, until or "")
    passes = [[_Suspended(each, at, number) for number, each in enumerate(group)] for at, group in enumerate(groups)]
    models = list({id(each.of.model): each.of.model for group in passes for each in group}.values())
    with (
        memory_used_again(),
        transformers_internals.quiet_transformers(),
        torch.inference_mode(),
        _Driver(models) as driver,
    ):
        try:
            _drive(driver, passes, finished, after_unit, scratch, until, progress, kept, again)
        finally:
            for each in (each for group in passes for each in group):
                each.abandon()


class _Driver:
    """Models whose units hand their calls over; a context manager."""

    def __init__(self, models: list[StreamedModel]) -> None:
        self.models = models
        self.running: greenlet | None = None
        self.forwards: dict[tuple[int, str], Callable[..., Any]] = {}
        # The greenlet that loads and computes units, the parent of all passes.
        self.own: Any = getcurrent()
        self._replaced: list[tuple[nn.Module, Callable[..., Any] | None]] = []

    def __enter__(self) -> _Driver:
        try:
            for model in self.models:
                model.load(REST)
                for name, module in model.units.items():
                    # A caller may have put one of its own in the class's place.
                    self._replaced.append((module, module.__dict__.get("forward")))
                    self.forwards[id(model), name] = module.forward
                    module.forward = self._stub(name, module.forward)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for module, own in self._replaced:
            module.__dict__.pop("forward", None)
            if own is not None:
                module.forward = own
        for model in self.models:
            model.free(REST)

    def _stub(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if getcurrent() is not self.running:
                return forward(*args, **kwargs)
            return self.own.switch((name, args, kwargs))

        return call

    def resume(self, each: _Suspended[Any], result: Any = None) -> None:
        """Let a pass run on."""
        self.running = each.greenlet
        each.resume(result)

    def compute(self, each: _Suspended[Any]) -> Any:
        """What the unit gives that a pass waits for."""
        args, kwargs = each.call
        each.call = (), {}
        model = each.of.model
        for other in self.models:
            if other is not model:
                other.rest()
        try:
            with each.of.around():
                forward = self.forwards[id(model), each.unit]
                if model.units[each.unit] is model.model.get_input_embeddings():
                    return model.look_up(forward, args, kwargs)
                if model.units[each.unit] is transformers_internals.output_head(model.model):
                    return model.project(forward, args, kwargs)
                return forward(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, NotImplementedError) as error:
            raise OpenQuantError(
                f"{each.unit} of {type(model.model).__name__} cannot be computed: {str(error).strip()[:300]}",
                "transformers' model fails on these weights or this text",
            ) from error


def _drive(
    driver: _Driver,
    groups: list[list[_Suspended[T]]],
    finished: Callable[[int, int, T], None],
    after_unit: Callable[[str, int, int, torch.Tensor], None] | None,
    scratch: OffloadFile | None,
    until: str | None,
    progress: Callable[[str, int, int], None] | None,
    kept: PassCheckpoint | None,
    again: Callable[[str], bool] | None,
) -> None:
    store = HiddenStateStore(scratch, len(groups))
    for group in groups:
        for each in group:
            driver.resume(each)
            _end(each, finished)
        store.put_away(group)
    while waiting := [each for group in groups for each in group if not each.done]:
        # Of each model the unit that the first of its passes waits for.
        units: dict[int, tuple[StreamedModel, str]] = {}
        for each in waiting:
            units.setdefault(id(each.of.model), (each.of.model, each.unit))
        if kept is not None and _go_on(driver, groups, store, kept, progress):
            continue
        last = until in [unit for _, unit in units.values()]
        for model, unit in units.values():
            model.load(unit)
            if not last:
                model.expect(model.following[unit])
        while again is not None and again(waiting[0].unit):
            _rehearse(driver, groups, store, progress)
        # Of a pass that runs on it is the next one.
        computed = waiting[0].unit
        for at, group in enumerate(groups):
            store.bring_back(group)
            now = [each for each in group if not each.done and units[id(each.of.model)][1] == each.unit]
            for each in now:
                output = driver.compute(each)
                if kept is not None and not isinstance(each.of.model.units[each.unit], nn.Embedding):
                    kept.note(each.unit, output)
                if after_unit is not None:
                    after_unit(each.unit, each.group, each.number, _hidden(output))
                if not last:
                    driver.resume(each, output)
                del output
                _end(each, finished)
            if progress is not None and now:
                progress(computed, at + 1, len(groups))
            if not last:
                store.put_away(group)
                continue
            # What came back from the file for this unit has no use after it.
            for each in now:
                each.abandon()
        for model, unit in units.values():
            model.free(unit)
        give_memory_back()
        if last:
            return
        if kept is not None and kept.due(unit):
            _keep(groups, store, kept)


def _rehearse(
    driver: _Driver,
    groups: list[list[_Suspended[T]]],
    store: HiddenStateStore,
    progress: Callable[[str, int, int], None] | None,
) -> None:
    """Compute a unit for all passes that wait for it, which stay before it."""
    for group in groups:
        store.bring_back(group)
        for each in group:
            call = each.call
            driver.compute(each)
            each.call = call
        store.put_away(group)
        if progress is not None:
            progress(group[0].unit, 0, len(groups))


def _go_on(
    driver: _Driver,
    groups: list[list[_Suspended[T]]],
    store: HiddenStateStore,
    kept: PassCheckpoint,
    progress: Callable[[str, int, int], None] | None,
) -> bool:
    """Have passes of one model go on from where they were kept; whether the unit they wait for was done before."""
    waiting = [each for group in groups for each in group]
    model, unit = waiting[0].of.model, waiting[0].unit
    if not kept.begin(unit, isinstance(model.units[unit], nn.Embedding)):
        calls = kept.bring_back(unit, [(each.group, each.number, each.call) for each in waiting], model.device)
        for each, call in zip(waiting, calls, strict=False):
            each.call = call
            if each is groups[each.group][-1]:
                store.put_away(groups[each.group])
        return False
    for at, group in enumerate(groups):
        for each in group:
            each.call = (), {}
            with kept.sound():
                driver.resume(each, kept.stand_in(unit, model.device))
        if progress is not None:
            progress(unit, at + 1, len(groups))
    return True


def _keep(groups: list[list[_Suspended[T]]], store: HiddenStateStore, kept: PassCheckpoint) -> None:
    """Keep passes, if all wait for the same unit."""
    units = {each.unit for group in groups for each in group if not each.done}

    @contextmanager
    def at_hand(group: int) -> Iterator[None]:
        store.bring_back(groups[group])
        yield
        store.put_away(groups[group])

    if len(units) == 1 and not any(each.done for group in groups for each in group):
        kept.write(units.pop(), [[each.call for each in group] for group in groups], at_hand)


def _end(each: _Suspended[T], finished: Callable[[int, int, T], None]) -> None:
    if each.done and hasattr(each, "value"):
        value = each.value
        del each.value
        finished(each.group, each.number, value)


def _hidden(output: Any) -> torch.Tensor:
    """The hidden state among what a unit gave."""
    while isinstance(output, (tuple, list)):
        output = output[0]
    assert isinstance(output, torch.Tensor)
    return output
