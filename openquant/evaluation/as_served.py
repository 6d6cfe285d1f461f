"""An output as engines serve it: its weights decoded, its activations rounded, its cache in FP8 where it says so.

served = Served(StreamedModel(checkpoint), kv_cache="auto")
served.passes(ids)      # [weights alone, weights and activations], or the first alone where nothing else is rounded
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from ..errors import SourceError
from ..files.checkpoint import Checkpoint
from ..files.tensors import TensorInfo
from ..formats.kv_cache import cache_scales, says_fp8_cache
from ..formats.quantization import Quantization, quantization_places, read_quantization
from ..models import GENERIC, MODELS
from ..registry.architecture import NEVER_QUANTIZED
from ..registry.rules import ModuleRules
from ..streaming import transformers_internals
from ..streaming.hooks import DOWN, FIRST, ExpertWeights, holds_experts
from ..streaming.interleaved import ForwardPass
from ..streaming.lazy_tensors import LazyTensors
from ..streaming.matmul import products_in_float32
from ..streaming.model import StreamedModel
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
    """An output's model, and what engines do with what it computes.

    Args:
        name: of the output, for messages.
        checkpoint: the output.
        model: the same, to run.
        kv_cache: "fp8", or "auto" for what its config says.

    Attributes:
        clipped: activations that stored scales do not hold.
        kept: modules that are quantized, although engines build them in the model's own dtype.
        notes: what is not computed as engines compute it.
        scales: names of tensors that are read while a unit is computed, by unit.

    Raises:
        UsageError: activations or the cache are quantized in a way that is not known here.
    """

    def __init__(
        self,
        name: str,
        checkpoint: Checkpoint,
        model: StreamedModel,
        kv_cache: str = "auto",
    ) -> None:
        self.name, self.checkpoint, self.model = name, checkpoint, model
        self.clipped = ClippedCount()
        self.notes: list[str] = []
        self.scales: dict[str, list[str]] = {}
        config = with_tool_config(checkpoint.config, checkpoint.root)
        quantization = read_quantization(config) if quantization_places(config) else None
        entry = ModuleRules(MODELS.get(checkpoint.architecture, GENERIC))
        layers, experts = self._layers(quantization, entry)
        self._rounding = ActivationRounding(model.model, layers, experts, self.clipped) if layers or experts else None
        # Of keys and values, by layer, and what those are that were read already.
        self._cached: Mapping[int, tuple[str | None, str | None]] | None = None
        self._cache_scales: dict[int, tuple[float, float]] = {}
        if kv_cache == "fp8" or (quantization is not None and says_fp8_cache(quantization.settings)):
            refuse_latent_cache(model.model.config)
            self._cached = cache_scales(checkpoint.tensors)
            names = [name for both in self._cached.values() for name in dict.fromkeys(both) if name is not None]
            for name, unit in model.nearest_units(names).items():
                self.scales.setdefault(unit, []).append(name)
        self.kept = [
            module for module, weight in model.quantized.items() if entry.rule(weight.module).keep in NEVER_QUANTIZED
        ]

    @property
    def rounds(self) -> bool:
        """Whether anything but weights is rounded."""
        return self._rounding is not None or self.cached

    @property
    def cached(self) -> bool:
        """Whether keys and values are kept in FP8."""
        return self._cached is not None

    def passes(self, ids: Tensor) -> list[ForwardPass[Tensor]]:
        """Passes that give a text's logits [length, vocabulary]: with weights alone, then with all that is rounded."""
        weights = ForwardPass(self.model, partial(logits, self.model, ids))
        if not self.rounds:
            return [weights]
        return [weights, ForwardPass(self.model, partial(self._logits, ids), self.around)]

    @contextmanager
    def around(self) -> Iterator[None]:
        """Round activations meanwhile."""
        with products_in_float32(self.model.device), nullcontext() if self._rounding is None else self._rounding.on():
            yield

    def _logits(self, ids: Tensor) -> Tensor:
        if not self.cached:
            return logits(self.model, ids)
        return logits(self.model, ids, Fp8Cache(self.model.model.config, self._of_cache, self.clipped))

    def cache(self) -> GrowingFp8Cache | None:
        """What a continuation keeps keys and values in, in FP8; None where they stay as they are."""
        return GrowingFp8Cache(self.model.model.config, self._of_cache) if self.cached else None

    def _of_cache(self, layer: int) -> tuple[float, float]:
        """The scales of a layer's keys and values; 1 where there is none, as in engines."""
        if layer not in self._cache_scales:
            assert self._cached is not None
            key, value = (1.0 if name is None else self._value(name) for name in self._cached.get(layer, (None, None)))
            self._cache_scales[layer] = key, value
        return self._cache_scales[layer]

    def _layers(
        self, quantization: Quantization | None, entry: ModuleRules
    ) -> tuple[dict[str, QuantizedInputs], dict[str, ExpertWeights[QuantizedInputs]]]:
        """What is rounded: quantized Linears, and stacks of experts."""
        layers: dict[str, QuantizedInputs] = {}
        stacks: dict[str, dict[str, QuantizedInputs]] = {}
        weights = decoded_view(self.checkpoint)[1] if quantization is not None else {}
        by_module = {weight.module: weight for weight in weights.values()}
        fused = entry.fused_groups(by_module)
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
                # All that go into one layer of an engine, which has one scale, the largest (vLLM
                # layers/quantization/fp8.py:405, of experts :739).
                merged = (by_module[module] for each in stored for module in fused.get(each.module, (each.module,)))
                held = [each.input_scale.name for each in merged if each.input_scale is not None]
                local = None if weight.format is None else weight.format.input_global_scale
                inverse = local is not None and not local.divides
                layer = QuantizedInputs(
                    inputs, partial(self._stored, weight.module, tuple(dict.fromkeys(held)), inverse)
                )
                self.scales.setdefault(self.model.unit_of(name), []).extend(held)
            if name in modules:
                layers[name] = layer
                continue
            owner, _, last = name.rpartition(".")
            stacks.setdefault(owner, {})[last] = layer
        # Others compute in a way of their own.
        known = {owner: found for owner, found in stacks.items() if holds_experts(modules[owner])}
        if known.keys() != stacks.keys():
            kind = type(modules[next(iter(stacks.keys() - known.keys()))]).__name__
            self.notes.append(f"activations inside {kind} are not rounded, which engines do")
        return layers, {owner: ExpertWeights(_either(at, FIRST), _either(at, DOWN)) for owner, at in known.items()}

    def _stored(self, module: str, names: tuple[str, ...], inverse: bool) -> float:
        """The stored scale of activations: the largest of the named ones, or one over that."""
        if not names:
            raise SourceError(
                f"{module} has no stored scale of its activations, though config.json says that it has",
                "the checkpoint is damaged or incomplete: download or save it again",
            )
        found = max(map(self._value, names))
        return 1 / found if inverse else found

    def _value(self, name: str) -> float:
        """A tensor that is one number, or the largest of a few."""
        info: TensorInfo = self.checkpoint.tensors[name]
        if math.prod(info.shape) == 0 or info.nbytes > 1 << 20:
            raise SourceError(f"{name} is {info.dtype} {list(info.shape)}, not a scale", "download or save it again")
        found = float(
            LazyTensors(self.checkpoint, {}, self.model.shard_provider.path).select([name])[name][...].float().max()
        )
        if not (math.isfinite(found) and found > 0):
            raise SourceError(f"{name} holds {found:g}, which is not a valid scale", "download or save it again")
        return found


def _either(found: Mapping[str, QuantizedInputs], names: tuple[str, ...]) -> QuantizedInputs | None:
    return next((found[name] for name in names if name in found), None)


def logits(model: StreamedModel, ids: Tensor, cache: Any = None) -> Tensor:
    """A text's logits [length, vocabulary], in a pass."""
    options: dict[str, Any] = {"use_cache": cache is not None}
    if cache is not None:
        options[transformers_internals.cache_argument(model.model)] = cache
    found: Tensor = model.model(input_ids=ids[None], **options).logits[0]
    return found
