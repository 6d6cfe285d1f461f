"""An output as engines serve it: weights decoded, activations rounded, and the KV cache in FP8 if its config says so.

served = ServedModel(StreamedModel(checkpoint), kv_cache="auto")
served.passes(ids)      # [weights alone, weights and activations], or the first alone if nothing else is rounded
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from ..errors import SourceError
from ..formats.numbers import cache_scales, says_fp8_cache
from ..formats.quantization import Quantization, quantization_places, read_quantization
from ..models import GENERIC
from ..plan.architecture import known_architecture
from ..registry.architecture import ROUTER
from ..registry.rules import ModuleRules
from ..streaming import transformers_internals
from ..streaming.hooks import DOWN, FIRST, ExpertWeights, holds_experts
from ..streaming.interleaved import ForwardPass
from ..streaming.lazy_tensors import LazyTensors
from ..streaming.model import StreamedModel, products_in_float32
from ..weights.find import decoded_view, with_tool_config
from .activation_rounding import (
    ActivationRounding,
    ClippedCount,
    Fp8Cache,
    GrowingFp8Cache,
    QuantizedInputs,
    refuse_latent_cache,
)


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
        return [weights, ForwardPass(self.model, partial(self._logits, ids), self.around)]

    @contextmanager
    def around(self) -> Iterator[None]:
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
        return layers, {
            owner: ExpertWeights(_first_of(parts, FIRST), _first_of(parts, DOWN)) for owner, parts in hooked.items()
        }

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


def _first_of(inputs: Mapping[str, QuantizedInputs], names: tuple[str, ...]) -> QuantizedInputs | None:
    return next((inputs[name] for name in names if name in inputs), None)


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
