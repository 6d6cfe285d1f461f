"""An output as engines serve it: weights decoded, activations rounded, and the KV cache in FP8 if its config says so.

    served = ServedModel(StreamedModel(checkpoint), kv_cache="auto")
    served.passes(ids)      # [weights alone, weights and activations], or the first alone if nothing else is rounded

The inputs of quantized layers are rounded, and keys and values of an FP8 KV cache. Values are quantized and at once
dequantized to the model's dtype, and the forward pass computes with the result.

    inputs = QuantizedInputs(ActivationQuantization(E4M3, (1, None)))
    rounding = ActivationRounding(model, {"model.layers.0.mlp.up_proj": inputs}, {})
    with rounding.on():
        model(ids, use_cache=True, past_key_values=Fp8Cache(model.config, lambda layer: (1.0, 1.0)))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache

from ..errors import SourceError, UsageError
from ..formats.format import ActivationQuantization, Format, GlobalScale, Scale
from ..formats.numbers import E2M1, E4M3, cache_scales, says_fp8_cache
from ..formats.quantization import Quantization, quantization_places, read_quantization
from ..formats.reference import decode, encode, group_absmax, group_scale
from ..models import GENERIC
from ..plan.architecture import known_architecture
from ..registry.architecture import ROUTER, ModuleRules
from ..streaming import transformers_internals
from ..streaming.hooks import DOWN, FIRST, ExpertWeights, ModuleHooks, TextCache, holds_experts
from ..streaming.interleaved import ForwardPass
from ..streaming.meta_model import LazyTensors
from ..streaming.model import StreamedModel, products_in_float32
from ..weights.find import decoded_view, with_tool_config


class ServedModel:
    """An output's model, run with the activations and KV cache rounded as engines round them.

    Args:
        model: the output's model.
        kv_cache: "fp8" to round the KV cache to FP8, "auto" for what the output's config says.

    Attributes:
        clipped: counts of activations, keys and values that static scales clip.
        quantized_routers: routers that are quantized, which engines build unquantized.
        notes: differences from what engines compute.

    Raises:
        UsageError: activations or the KV cache are quantized in a way that is not supported here.
    """

    def __init__(self, model: StreamedModel, kv_cache: str = "auto") -> None:
        checkpoint = model.checkpoint
        self.model = model
        self.clipped = ClippedCount()
        self.notes: list[str] = []
        config = with_tool_config(checkpoint.config, checkpoint.root)
        quantization = read_quantization(config) if quantization_places(config) else None
        rules = ModuleRules(known_architecture(checkpoint) or GENERIC)

        layers, experts = self._quantized_inputs(quantization, rules)
        self._rounding = ActivationRounding(model.model, layers, experts, self.clipped) if layers or experts else None

        # Names of the scale tensors of keys and values by layer, None for a cache in bfloat16; and scales already read.
        self._cache_scale_names: Mapping[int, tuple[str | None, str | None]] | None = None
        self._cache_scales: dict[int, tuple[float, float]] = {}

        if kv_cache == "fp8" or (quantization is not None and says_fp8_cache(quantization.settings)):
            refuse_latent_cache(model.model.config)
            self._cache_scale_names = cache_scales(checkpoint.tensors)
            pairs = self._cache_scale_names.values()
            names = [name for pair in pairs for name in dict.fromkeys(pair) if name is not None]
            for name, unit in model.nearest_units(names).items():
                model.scales.setdefault(unit, []).append(name)
        self.quantized_routers = [
            module for module, weight in model.quantized.items() if rules.rule(weight.module).keep == ROUTER
        ]

    @property
    def rounds(self) -> bool:
        """Whether activations or the KV cache are rounded."""
        return self._rounding is not None or self.fp8_cache

    @property
    def fp8_cache(self) -> bool:
        """Whether the KV cache is in FP8."""
        return self._cache_scale_names is not None

    def passes(self, ids: Tensor) -> list[ForwardPass[Tensor]]:
        """Make the forward passes of a text.

        Args:
            ids: token ids, int64 [length], on the model's device.

        Returns:
            One pass with decoded weights alone and, if engines round more, one with that too. Each gives the logits
            [length, vocabulary]. The second raises SourceError if a scale is missing or invalid.
        """
        weights = ForwardPass(self.model, partial(logits, self.model, ids))
        if not self.rounds:
            return [weights]
        return [weights, ForwardPass(self.model, partial(self._logits, ids), self.round_inputs)]

    @contextmanager
    def round_inputs(self) -> Iterator[None]:
        """Round the inputs of quantized layers while the context is entered."""
        with products_in_float32(self.model.device), nullcontext() if self._rounding is None else self._rounding.on():
            yield

    def _logits(self, ids: Tensor) -> Tensor:
        return logits(self.model, ids, self.text_cache())

    def text_cache(self) -> Fp8Cache | None:
        """Make an FP8 KV cache for one pass over a whole text; None if the cache is not in FP8."""
        return Fp8Cache(self.model.model.config, self._scales_of_layer, self.clipped) if self.fp8_cache else None

    def cache(self) -> GrowingFp8Cache | None:
        """Make an empty FP8 KV cache for one continuation; None if the cache is not in FP8."""
        return GrowingFp8Cache(self.model.model.config, self._scales_of_layer) if self.fp8_cache else None

    def _scales_of_layer(self, layer: int) -> tuple[float, float]:
        """Return the scales of a layer's keys and values; 1 if the checkpoint has none, as in engines."""
        if layer not in self._cache_scales:
            assert self._cache_scale_names is not None
            names = self._cache_scale_names.get(layer, (None, None))
            key, value = (1.0 if name is None else self._read_scale(name) for name in names)
            self._cache_scales[layer] = key, value
        return self._cache_scales[layer]

    def _quantized_inputs(
        self, quantization: Quantization | None, rules: ModuleRules
    ) -> tuple[dict[str, QuantizedInputs], dict[str, ExpertWeights[QuantizedInputs]]]:
        """Return how inputs are rounded, by module name: of Linears, and of modules of stacked experts."""
        layers: dict[str, QuantizedInputs] = {}
        stacks: dict[str, dict[str, QuantizedInputs]] = {}
        weights = decoded_view(self.model.checkpoint)[1] if quantization is not None else {}
        by_module = {weight.module: weight for weight in weights.values()}
        fused = rules.fused_groups(by_module)
        modules = dict(self.model.model.named_modules())

        for name, weight in self.model.quantized.items():
            assert quantization is not None
            inputs = quantization.inputs_of(weight.module)
            if inputs is None:
                continue

            parts = self.model.made_of.get(f"{name}.weight") or self.model.made_of[name]
            layer = QuantizedInputs(inputs)
            if inputs.static or inputs.has_global_scale:
                stored = [weights[part] for part in parts if part in weights] or [weight]
                # Layers that an engine fuses have one scale, the largest (vLLM layers/quantization/fp8.py:405, of
                # experts :739).
                merged = (by_module[module] for part in stored for module in fused.get(part.module, (part.module,)))
                scale_names = [
                    fused_weight.input_scale.name for fused_weight in merged if fused_weight.input_scale is not None
                ]
                local = None if weight.format is None else weight.format.input_global_scale
                inverse = local is not None and not local.divides
                layer = QuantizedInputs(
                    inputs, partial(self._static_scale, weight.module, tuple(dict.fromkeys(scale_names)), inverse)
                )
                self.model.scales.setdefault(self.model.unit_of(name), []).extend(scale_names)
            if name in modules:
                layers[name] = layer
                continue

            owner, _, last = name.rpartition(".")
            stacks.setdefault(owner, {})[last] = layer

        # Hooks know only transformers' usual modules of stacked experts.
        hooked = {owner: parts for owner, parts in stacks.items() if holds_experts(modules[owner])}
        if hooked.keys() != stacks.keys():
            kind = type(modules[next(iter(stacks.keys() - hooked.keys()))]).__name__
            self.notes.append(f"activations inside {kind} are not rounded, which engines do")

        return layers, inputs_of_experts(hooked)

    def _static_scale(self, module: str, names: tuple[str, ...], inverse: bool) -> float:
        """Read the static activation scale of a module: the largest of the named tensors, or its inverse."""
        if not names:
            raise SourceError(
                f"{module} has no static activation scale, though config.json says that it has",
                "the checkpoint is damaged or incomplete: download or save it again",
            )
        scale = max(map(self._read_scale, names))
        return 1 / scale if inverse else scale

    def _read_scale(self, name: str) -> float:
        """Read a scale tensor; the largest of its elements if it has several."""
        checkpoint = self.model.checkpoint
        info = checkpoint.tensors[name]
        if math.prod(info.shape) == 0 or info.nbytes > 1 << 20:
            raise SourceError(f"{name} is {info.dtype} {list(info.shape)}, not a scale", "download or save it again")
        tensors = LazyTensors(checkpoint, {}, self.model.shard_provider.path).select([name])
        scale = float(tensors[name][...].float().max())
        if not (math.isfinite(scale) and scale > 0):
            raise SourceError(f"{name} holds {scale:g}, which is not a valid scale", "download or save it again")
        return scale


def inputs_of_experts(
    stacks: Mapping[str, Mapping[str, QuantizedInputs]],
) -> dict[str, ExpertWeights[QuantizedInputs]]:
    """Return how inputs of stacked experts are rounded at their two hook points, by module name.

    Args:
        stacks: by module name, how the inputs of each of its parameters are quantized, by the parameter's name.
    """

    def first_of(inputs: Mapping[str, QuantizedInputs], names: tuple[str, ...]) -> QuantizedInputs | None:
        return next((inputs[name] for name in names if name in inputs), None)

    return {owner: ExpertWeights(first_of(parts, FIRST), first_of(parts, DOWN)) for owner, parts in stacks.items()}


def logits(model: StreamedModel, ids: Tensor, cache: Any = None) -> Tensor:
    """Compute the logits of a text; to be called inside of a ForwardPass.

    Args:
        model: the model.
        ids: token ids, int64 [length], on the model's device.
        cache: KV cache of transformers, such as Fp8Cache; None for none.

    Returns:
        The logits [length, vocabulary] in the model's dtype, of the next token at each position.
    """
    options: dict[str, Any] = {"use_cache": cache is not None}
    if cache is not None:
        options[transformers_internals.cache_argument(model.model)] = cache
    text_logits: Tensor = model.model(input_ids=ids[None], **options).logits[0]
    return text_logits


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


class ShareCount:
    """Counts the part of a whole at each of several places. Counts of several processes add up.

    Attributes:
        counts: part and whole by place.
    """

    def __init__(self) -> None:
        self.counts: dict[Any, tuple[int, int]] = {}

    def count(self, place: Any, part: int, whole: int) -> None:
        """Add to the counts of a place."""
        before = self.counts.get(place, (0, 0))
        self.counts[place] = before[0] + part, before[1] + whole

    def merge(self, counts: Mapping[Any, tuple[int, int]]) -> None:
        """Add the `counts` of another process."""
        for place, (part, whole) in counts.items():
            self.count(place, part, whole)

    def largest(self, is_counted: Callable[[Any], bool]) -> float | None:
        """Return the largest share of any place that `is_counted` selects; None if there is none."""
        shares = (part / whole for place, (part, whole) in self.counts.items() if whole and is_counted(place))
        return max(shares, default=None)


class ClippedCount(ShareCount):
    """Counts values that a static scale clips, by place: a module's name, or a layer's number for its KV cache."""

    def __init__(self) -> None:
        super().__init__()
        self._is_paused = False

    @contextmanager
    def pause(self) -> Iterator[None]:
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
            self.count(place, int((values.abs() > limit).sum()), values.numel())


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
        return self._once(into, values, lambda: self._round(values, into, place))

    def _round(self, values: Tensor, into: QuantizedInputs, place: str) -> Tensor:
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
