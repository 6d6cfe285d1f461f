"""Hooks that observe or replace the inputs of a model's layers, and a KV cache that keeps nothing.

transformers computes the stacked experts of a layer in one module, which has two hook points: the input of gate and up,
and the input of down.
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
from transformers import DynamicCache

T = TypeVar("T")
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
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, T], experts: Mapping[str, ExpertWeights[T]]) -> None:
        self._active = False
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
    def on(self) -> Iterator[None]:
        """Call `on_input` inside this context; for `ForwardPass.around`."""
        self._active = True
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
