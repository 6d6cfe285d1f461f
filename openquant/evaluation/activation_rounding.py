"""Rounds activations as engines do: the inputs of quantized layers, and keys and values in an FP8 KV cache.

Values are quantized and at once dequantized to the model's dtype, and the forward pass computes with the result.

    inputs = QuantizedInputs(ActivationQuantization(E4M3, (1, None)))
    rounding = ActivationRounding(model, {"model.layers.0.mlp.up_proj": inputs}, {})
    with rounding.on():
        model(ids, use_cache=True, past_key_values=Fp8Cache(model.config, lambda layer: (1.0, 1.0)))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache

from ..errors import UsageError
from ..formats.format import ActivationQuantization, Format, GlobalScale, Scale
from ..formats.numbers import E2M1, E4M3
from ..formats.reference import decode, encode, group_absmax, group_scale
from ..streaming.hooks import ExpertWeights, ModuleHooks, TextCache

# Lower limit of dynamic scales: vLLM layers/quantization/input_quant_fp8.py:27.
SMALLEST_SCALE = 1 / (448 * 512)
# The same limit for power-of-two scales, rounded up.
_SMALLEST_POWER = 2.0**-17
# Format of NVFP4 activations. As in vLLM (quantization/utils/nvfp4_emulation_utils.py:640), a group whose scale E4M3
# rounds to 0 becomes 0.
_LOCAL = Format(E2M1, (1, 16), Scale("", dtype="F8_E4M3"), global_scale=GlobalScale(""))
# How keys and values are stored in an FP8 KV cache.
CACHED = ActivationQuantization(E4M3, (None, None), static=True)


@dataclass(frozen=True)
class QuantizedInputs:
    """How the inputs of one layer are quantized, and where their stored scale is.

    Attributes:
        inputs: how the inputs are quantized.
        scale: reads the static scale, or for NVFP4 the input global scale; called when the layer first runs. None for
            dynamic scales.
    """

    inputs: ActivationQuantization
    scale: Callable[[], float] | None = None


def round_activations(values: Tensor, inputs: ActivationQuantization, scale: float | None = None) -> Tensor:
    """Quantize and dequantize activations.

    Args:
        values: activations [..., in], any floating dtype; all axes but the last are tokens.
        inputs: how they are quantized: number format, group that shares a scale, static or dynamic.
        scale: the static scale (activation = code value * scale), or for NVFP4 the factor by which group scales are
            multiplied before they are rounded to E4M3. Both need one. None for dynamic scales.

    Returns:
        The dequantized activations, with the shape and dtype of `values`. What a static scale cannot hold is clipped.
    """
    tokens = values.reshape(-1, values.shape[-1]).float()
    width = inputs.group[1]
    if width is not None and tokens.shape[1] % width:
        # Zeros do not change the absmax of the last group.
        tokens = nn.functional.pad(tokens, (0, -tokens.shape[1] % width))

    floor = _SMALLEST_POWER if inputs.power_of_two else SMALLEST_SCALE
    fmt = Format(inputs.number, inputs.group, Scale("", power_of_two=inputs.power_of_two, floor=floor))

    if inputs.static:
        assert scale is not None
        scales = tokens.new_full((1, 1), scale)
    elif inputs.has_global_scale:
        assert scale is not None
        scales = group_scale(group_absmax(tokens, inputs.group), _LOCAL, tokens.new_full((1, 1), scale))
    else:
        scales = group_scale(group_absmax(tokens, inputs.group), fmt)

    rounded = decode(encode(tokens, scales, fmt), scales, fmt)
    return rounded[:, : values.shape[-1]].reshape(values.shape).to(values.dtype)


class ClippedCount:
    """Counts values that a static scale clips, by place: a module's name, or a layer's number for its KV cache."""

    def __init__(self) -> None:
        self._counts: dict[str | int, list[int]] = {}
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing while the context is entered."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def add(self, place: str | int, values: Tensor, limit: float) -> None:
        """Count the values beyond a limit.

        Args:
            place: name of the module, or number of the layer for keys and values.
            values: activations of any shape.
            limit: largest absolute value that is not clipped.
        """
        if not self._is_paused:
            self._add(place, int((values.abs() > limit).sum()), values.numel())

    def clear(self) -> None:
        """Reset all counts to zero."""
        self._counts.clear()

    def _add(self, place: str | int, clipped: int, total: int) -> None:
        counts = self._counts.setdefault(place, [0, 0])
        counts[0] += clipped
        counts[1] += total

    def counts(self) -> list[list[Any]]:
        """Return rows for `add_counts` of another process: place, clipped values, all values."""
        return [[place, *counts] for place, counts in self._counts.items()]

    def add_counts(self, counts: Iterable[list[Any]]) -> None:
        """Add the rows that `counts` of another process returned."""
        for row in counts:
            self._add(*row)

    def share(self, places: Callable[[str | int], bool]) -> float:
        """Return the largest share of clipped values in any place that `places` selects; 0 if there is none."""
        shares = (clipped / total for place, (clipped, total) in self._counts.items() if total and places(place))
        return max(shares, default=0.0)


class ActivationRounding(ModuleHooks[QuantizedInputs]):
    """Rounds the inputs of a model's quantized layers, while `on()` is entered.

    Args:
        model: the model; hooks are registered on its modules.
        layers: how inputs of Linears are quantized, by module name.
        experts: how inputs of stacked experts are quantized, by module name.
        clipped: counts the activations that static scales clip; None if nobody asks for them.
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
        """Round the activations that go into a layer, and count those that a static scale clips.

        Args:
            values: the activations, [..., in].
            into: how they are quantized.
            place: name of the module, for the count.

        Returns:
            The rounded activations, with the shape and dtype of `values`.

        Raises:
            SourceError: the stored scale is missing or invalid.
        """
        if into not in self._last:
            # Only one rounded copy is kept: each takes as much memory as the activations.
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


class Fp8Cache(TextCache):
    """KV cache that rounds keys and values to FP8, for a single pass over a whole text: it stores nothing.

    Args:
        config: the model's config, of transformers.
        scales: returns the scales of keys and of values, given the layer's number.
        clipped: counts the keys and values that these scales clip; None if nobody asks for them.
    """

    def __init__(
        self, config: Any, scales: Callable[[int], tuple[float, float]], clipped: ClippedCount | None = None
    ) -> None:
        super().__init__(config)
        self._by_layer = scales
        self._clipped = clipped or ClippedCount()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values [batch, heads, length, dim] as FP8 holds them, in their own dtype."""
        del args, kwargs
        key, value = self._by_layer(layer_idx)
        for states, scale in ((key_states, key), (value_states, value)):
            self._clipped.add(layer_idx, states, scale * CACHED.number.largest)
        return round_activations(key_states, CACHED, key), round_activations(value_states, CACHED, value)


class GrowingFp8Cache(DynamicCache):  # type: ignore[misc]  # mypy does not read transformers
    """KV cache in FP8 that stores keys and values, for continuations.

    Args:
        config: the model's config, of transformers.
        scales: returns the scales of keys and of values, given the layer's number.
    """

    def __init__(self, config: Any, scales: Callable[[int], tuple[float, float]]) -> None:
        super().__init__(config=config.get_text_config())
        self._rounding = Fp8Cache(config, scales)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values; return all of the layer so far, [batch, heads, length so far, dim]."""
        keys, values = self._rounding.update(key_states, value_states, layer_idx)
        all_states: tuple[Tensor, Tensor] = super().update(keys, values, layer_idx, *args, **kwargs)
        return all_states


def refuse_latent_cache(config: Any) -> None:
    """Refuse multi-head latent attention: its cache holds one latent vector for all heads, no keys and values.

    Args:
        config: the model's config, a transformers PretrainedConfig.

    Raises:
        UsageError: the model has multi-head latent attention.
    """
    if getattr(config.get_text_config(), "kv_lora_rank", None):
        raise UsageError(
            "an FP8 cache cannot be evaluated for multi-head latent attention: engines cache its latent vectors",
            "leave --kv-cache fp8 out",
        )
