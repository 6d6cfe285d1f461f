"""Activations rounded as engines round them: what goes into quantized layers, and keys and values in an FP8 cache.

Codes are decoded at once, to the model's dtype, so a forward pass computes with what they stand for.

    rounding = Rounding(model, {"model.layers.0.mlp.up_proj": Layer(Inputs(E4M3, (1, None)))})
    with rounding.on():
        model(ids, use_cache=True, past_key_values=RoundedCache(model.config, lambda layer: (1.0, 1.0)))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache

from ..errors import UsageError
from ..formats.activations import ActivationQuantization
from ..formats.format import Format, GlobalScale, Scale
from ..formats.numbers import E2M1, E4M3
from ..formats.reference import decode, encode, group_absmax, group_scale
from ..streaming.hooks import ExpertWeights, ModuleHooks

# vLLM layers/quantization/input_quant_fp8.py:27.
SMALLEST_SCALE = 1 / (448 * 512)
# The same as a power of two, to which scales are rounded up.
_SMALLEST_POWER = 2.0**-17
# As vLLM has it (quantization/utils/nvfp4_emulation_utils.py:640), a scale that E4M3 rounds to 0 makes 0 of all.
_LOCAL = Format(E2M1, (1, 16), Scale("", dtype="F8_E4M3"), global_scale=GlobalScale(""))
CACHED = ActivationQuantization(E4M3, (None, None), static=True)


@dataclass(frozen=True)
class QuantizedInputs:
    """What becomes of the activations that go into one layer.

    Attributes:
        inputs: how they are quantized.
        scale: the stored scale of static ones, or what those of local groups are multiplied by; asked for when the
            layer first computes.
    """

    inputs: ActivationQuantization
    scale: Callable[[], float] | None = None


def round_activations(values: Tensor, inputs: ActivationQuantization, scale: float | None = None) -> Tensor:
    """What the codes of activations stand for, of their shape and dtype.

    Args:
        values: [..., in]; all but the last axis are tokens.
        inputs: how they are quantized.
        scale: the stored one, of static activations; of local ones what the scales of groups are multiplied by.
    """
    tokens = values.reshape(-1, values.shape[-1]).float()
    width = inputs.group[1]
    if width is not None and tokens.shape[1] % width:
        # What fills the last group up changes nothing.
        tokens = nn.functional.pad(tokens, (0, -tokens.shape[1] % width))
    floor = _SMALLEST_POWER if inputs.power_of_two else SMALLEST_SCALE
    form = Format(inputs.number, inputs.group, Scale("", power_of_two=inputs.power_of_two, floor=floor))
    if inputs.static:
        assert scale is not None
        each = tokens.new_full((1, 1), scale)
    elif inputs.has_global_scale:
        assert scale is not None
        each = group_scale(group_absmax(tokens, inputs.group), _LOCAL, tokens.new_full((1, 1), scale))
    else:
        each = group_scale(group_absmax(tokens, inputs.group), form)
    found = decode(encode(tokens, each, form), each, form)
    return found[:, : values.shape[-1]].reshape(values.shape).to(values.dtype)


class ClippedCount:
    """How many activations lie beyond the largest code of a stored scale, by what is asked with."""

    def __init__(self) -> None:
        self._counts: dict[str | int, list[int]] = {}

    def add(self, place: str | int, values: Tensor, limit: float) -> None:
        """Count the activations of a module, or of a layer by its number, that are larger than a limit."""
        self._add(place, int((values.abs() > limit).sum()), values.numel())

    def clear(self) -> None:
        """Count from zero again."""
        self._counts.clear()

    def _add(self, place: str | int, beyond: int, total: int) -> None:
        counts = self._counts.setdefault(place, [0, 0])
        counts[0] += beyond
        counts[1] += total

    def counts(self) -> list[list[Any]]:
        """What `add_counts` of another process takes: place, activations beyond, all activations."""
        return [[place, *counts] for place, counts in self._counts.items()]

    def add_counts(self, counts: Iterable[list[Any]]) -> None:
        """Add what another process has counted."""
        for each in counts:
            self._add(*each)

    def share(self, places: Callable[[str | int], bool]) -> float:
        """The largest share in any of some places; 0 where nothing was counted."""
        found = (beyond / total for place, (beyond, total) in self._counts.items() if total and places(place))
        return max(found, default=0.0)


class ActivationRounding(ModuleHooks[QuantizedInputs]):
    """Rounds what goes into a model's quantized layers, while it is on.

    Args:
        model: the model.
        layers: its quantized Linears, by module name.
        experts: its modules of stacked experts that are quantized.
        clipped: is told of activations that stored scales do not hold.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, QuantizedInputs],
        experts: Mapping[str, ExpertWeights[QuantizedInputs]],
        clipped: ClippedCount | None = None,
    ) -> None:
        super().__init__(model, layers, experts)
        self._clipped = clipped or ClippedCount()
        self._scales: dict[Callable[[], float], float] = {}

    def on_input(self, values: Tensor, into: QuantizedInputs, place: str) -> Tensor:
        """What the codes of activations stand for."""
        if into not in self._last:
            # One at a time: each takes as much memory as the activations.
            self._last.clear()
        return self._once(into, values, lambda: self._rounded(values, into, place))

    def _rounded(self, values: Tensor, into: QuantizedInputs, place: str) -> Tensor:
        scale = None
        if into.scale is not None:
            if into.scale not in self._scales:
                self._scales[into.scale] = into.scale()
            scale = self._scales[into.scale]
            self._clipped.add(place, values, into.inputs.largest(scale))
        return round_activations(values, into.inputs, scale)


class Fp8Cache(DynamicCache):  # type: ignore[misc]  # mypy does not read transformers
    """A cache of keys and values as FP8 holds them, of a single pass over whole texts: it keeps nothing.

    Args:
        config: of the model.
        scales: of keys and of values, given the layer's number.
        clipped: is told of keys and values that these do not hold.
    """

    def __init__(
        self, config: Any, scales: Callable[[int], tuple[float, float]], clipped: ClippedCount | None = None
    ) -> None:
        super().__init__(config=config.get_text_config())
        self._by_layer = scales
        self._clipped = clipped or ClippedCount()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, heads, length, dim] as a pass that reads them from the cache has them."""
        del args, kwargs
        key, value = self._by_layer(layer_idx)
        for states, scale in ((key_states, key), (value_states, value)):
            self._clipped.add(layer_idx, states, scale * CACHED.number.largest)
        return round_activations(key_states, CACHED, key), round_activations(value_states, CACHED, value)


class GrowingFp8Cache(Fp8Cache):
    """The same, that keeps them: for continuations, whose later tokens read it."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer so far, with these."""
        keys, values = super().update(key_states, value_states, layer_idx)
        found: tuple[Tensor, Tensor] = DynamicCache.update(self, keys, values, layer_idx, *args, **kwargs)
        return found


def refuse_latent_cache(config: Any) -> None:
    """Refuse what caches one latent vector for all heads, which no scales of keys and values belong to.

    Raises:
        UsageError: the model does.
    """
    if getattr(config.get_text_config(), "kv_lora_rank", None):
        raise UsageError(
            "an FP8 cache cannot be evaluated for multi-head latent attention: engines cache its latent vectors",
            "leave --kv-cache fp8 out",
        )
