"""What goes into a model's layers, on its way there: looked at, or changed before it is computed with.

Stacked experts are one module of transformers, and two of its inputs count: what goes into gate and up, and into down.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

T = TypeVar("T")
R = TypeVar("R")

# Parameters of stacked experts, by what goes into them.
FIRST, DOWN = ("gate_up_proj", "gate_proj", "up_proj"), ("down_proj",)


@dataclass
class RoutedTokens:
    """Which tokens go to which experts of a module, as it is called.

    Attributes:
        experts: how many it holds.
        chosen: int64 [tokens, k], the experts of each token; some routers choose one that does nothing, beyond the
            last. None where all experts get as many rows, one below the other, of zeros where a token is not theirs.
        passed: how many rows have come that are sorted by experts.
    """

    experts: int
    chosen: Tensor | None
    passed: int = 0

    def counts(self) -> Tensor | None:
        """How many tokens each expert has, int64 [experts]; None where that is not told."""
        if self.chosen is None:
            return None
        return torch.bincount(self.chosen.reshape(-1), minlength=self.experts)[: self.experts].cpu()

    def of(self, expert: int, rows: Tensor) -> Tensor:
        """Those that go to an expert, of rows [n, in] that go into gate and up."""
        if self.chosen is None:
            own = rows.reshape(self.experts, -1, rows.shape[-1])[expert]
            return own[own.any(-1)]
        return rows[(self.chosen.reshape(len(rows), -1) == expert).any(-1)]

    def of_sorted(self, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The next rows [n, in] that go into down, by expert: all at once, or those of one expert after another."""
        counts = self.counts()
        if counts is None:
            yield from ((expert, self.of(expert, rows)) for expert in range(self.experts))
            return
        begin, end = self.passed, 0
        self.passed += len(rows)
        for expert, count in enumerate(counts.tolist()):
            low, end = end, end + count
            if end > begin and low < self.passed:
                yield expert, rows[max(low - begin, 0) : end - begin]


@dataclass(frozen=True)
class ExpertWeights(Generic[T]):
    """What is said of a module that holds the stacked experts of a layer; None for what stays as it is.

    Attributes:
        first: of what goes into gate and up.
        down: of what goes into down.
    """

    first: T | None
    down: T | None


def holds_experts(module: nn.Module) -> bool:
    """Whether a module is one of stacked experts, of transformers' usual kind: others compute in a way of their own."""
    return hasattr(module, "is_concatenated")


class ModuleHooks(ABC, Generic[T]):
    """Calls `put` for what goes into layers, while it is on.

    Args:
        model: the model.
        layers: what is said of its Linears, by module name.
        experts: the same of its modules of stacked experts.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, T], experts: Mapping[str, ExpertWeights[T]]) -> None:
        self._active = False
        # The last activations and what was made of them, by a key that each kind of interception has for itself.
        self._last: dict[Any, tuple[Tensor, Any]] = {}
        for name, each in layers.items():
            model.get_submodule(name).register_forward_pre_hook(self._hook(each, name), with_kwargs=True)
        # How each module of experts is called, while it computes.
        self._routed: dict[str, RoutedTokens | None] = {}
        for name, both in experts.items():
            module = model.get_submodule(name)
            module.register_forward_pre_hook(self._routing(name), with_kwargs=True)
            if both.first is not None:
                module.register_forward_pre_hook(self._hook(both.first, name), with_kwargs=True)
            if both.down is not None:
                self._wrap(module, both.down, name)

    @abstractmethod
    def put(self, values: Tensor, into: T, place: str) -> Tensor:
        """What is computed with in place of activations [..., in].

        Args:
            values: what was to go in.
            into: what is said of the layer.
            place: the name of its module.
        """

    @contextmanager
    def on(self) -> Iterator[None]:
        """Meanwhile `put` is called; for Pass.around."""
        self._active = True
        try:
            yield
        finally:
            self._active = False
            self._last.clear()
            self._routed.clear()

    def _once(self, key: Any, values: Tensor, make: Callable[[], R]) -> R:
        """What `make` gives for activations, made once where several layers have the same: q, k and v, gate and up."""
        last = self._last.get(key)
        if last is None or last[0] is not values:
            last = self._last[key] = values, make()
        found: R = last[1]
        return found

    def _routing(self, place: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._active:
                return
            # After what goes into them, modules of stacked experts are told the experts of each token.
            _, *others = (*args, *kwargs.values())
            experts = next(len(held) for name in (*FIRST, *DOWN) if (held := getattr(module, name, None)) is not None)
            if not others:
                self._routed[place] = RoutedTokens(experts, None)
            elif isinstance(others[0], Tensor) and not others[0].is_floating_point():
                self._routed[place] = RoutedTokens(experts, others[0])
            else:
                self._routed[place] = None

        return before

    def _hook(self, into: T, place: str) -> Callable[..., Any]:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._active:
                return None
            if args:
                return (self.put(args[0], into, place), *args[1:]), kwargs
            # The first argument, by its name: hidden_states of experts, input of a Linear.
            first = next(iter(kwargs))
            return args, {**kwargs, first: self.put(kwargs[first], into, place)}

        return before

    def _wrap(self, module: nn.Module, into: T, place: str) -> None:
        """Intercept what stacked experts put into down: what comes out of the gate, or of the activation function."""
        name = "_apply_gate" if getattr(module, "has_gate", True) else "act_fn"
        if not hasattr(module, name):
            self._wrap_forward(module, into, place)
            return
        original = getattr(module, name)
        # Not setattr of a function where a module was: torch would refuse it.
        module.__dict__[name] = lambda *args: (
            self.put(original(*args), into, place) if self._active else original(*args)
        )

    def _wrap_forward(self, module: nn.Module, into: T, place: str) -> None:
        """The same of Llama 4's, in whose forward the gate has no function of its own."""
        original = module.forward

        def forward(*args: Any) -> Any:
            if not self._active:
                return original(*args)
            with _Multiplied(module.down_proj, lambda values: self.put(values, into, place)):
                return original(*args)

        module.__dict__["forward"] = forward


class _Multiplied(TorchFunctionMode):
    """Meanwhile what is multiplied by a parameter is changed before.

    Args:
        parameter: the second argument of a product.
        change: makes of its first what is multiplied.
    """

    def __init__(self, parameter: object, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._parameter, self._change = parameter, change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(args) == 2 and args[1] is self._parameter:
            args = self._change(args[0]), args[1]
        return func(*args, **(kwargs or {}))
