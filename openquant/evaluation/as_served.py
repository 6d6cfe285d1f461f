"""An output as engines serve it: weights decoded, activations rounded, and the KV cache in FP8 if its config says so.

    served = ServedModel(StreamedModel(checkpoint), kv_cache="auto")
    served.passes(ids)      # [weights alone, weights and activations], or the first alone if nothing else is rounded

The inputs of quantized layers are rounded, and keys and values of an FP8 KV cache. Values are quantized and at once
dequantized to the model's dtype, and the forward pass computes with the result.

    inputs = QuantizedInputs(ActivationQuantization(E4M3, (1, None)))
    rounding = ActivationRounding(model, {"model.layers.0.mlp.up_proj": inputs}, {})
    with rounding.on():
        model(ids, use_cache=True, past_key_values=Fp8Cache(model.config, lambda layer: (1.0, 1.0)))

Greedy continuations of prompts by two models, side by side, and the token from which they differ.

Source and outputs answer one after the other, each loaded as a whole (`compare_answers`).

Of a checkpoint's generation settings only the end tokens are used: there is no sampling.

    ends = end_tokens(checkpoint.root, checkpoint.config)
    source_answers, output_answers = (continue_prompts(model, prompts, ends) for model in (source, output))
    side_by_side(prompts, source_answers, output_answers, tokenizer)[0]["differs_at"]     # 12
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig

from ..data.domains import Prompt, read_prompts
from ..data.tokenizer import Tokenizer
from ..errors import SourceError, UsageError
from ..files.checkpoint import readable
from ..files.model_files import parse_json, read_small
from ..formats.format import ActivationQuantization, Format, GlobalScale, Scale
from ..formats.numbers import E2M1, E4M3, cache_scales, says_fp8_cache
from ..formats.quantization import Quantization, quantization_places, read_quantization
from ..formats.reference import decode, encode, group_absmax, group_scale, round_values
from ..machine import available_memory
from ..models import GENERIC
from ..plan.architecture import known_architecture
from ..registry.architecture import ModuleRules
from ..streaming import transformers_internals
from ..streaming.interleaved import DOWN, FIRST, ExpertWeights, ForwardPass, ModuleHooks, TextCache, holds_experts
from ..streaming.memory import config_levels
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
        weights = ForwardPass(self.model, partial(self.model.logits, ids))
        if not self.rounds:
            return [weights]
        return [weights, ForwardPass(self.model, lambda: self.model.logits(ids, self.text_cache()), self.round_inputs)]

    @contextmanager
    def round_inputs(self) -> Iterator[None]:
        """Round the inputs of quantized layers while the context is entered."""
        with products_in_float32(self.model.device), nullcontext() if self._rounding is None else self._rounding.on():
            yield

    def text_cache(self) -> Fp8Cache | None:
        """Make an FP8 KV cache for one pass over a whole text; None if the cache is not in FP8."""
        if not self.fp8_cache:
            return None
        return Fp8Cache(self.model.model.config, self._scales_of_layer, self.clipped)

    def cache(self) -> GrowingFp8Cache | None:
        """Make an empty FP8 KV cache for one continuation; None if the cache is not in FP8."""
        if not self.fp8_cache:
            return None
        return GrowingFp8Cache(self.model.model.config, self._scales_of_layer)

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
        tensors = LazyTensors(checkpoint, {}, self.model.shard_provider.path).select([name])
        return float(tensors[name][...].float().max())


def inputs_of_experts(stacks: Mapping[str, Mapping[str, QuantizedInputs]]) -> dict[str, ExpertWeights[QuantizedInputs]]:
    """Return how inputs of stacked experts are rounded at their two hook points, by module name.

    Args:
        stacks: by module name, how the inputs of each of its parameters are quantized, by the parameter's name.
    """

    def first_of(inputs: Mapping[str, QuantizedInputs], names: tuple[str, ...]) -> QuantizedInputs | None:
        return next((inputs[name] for name in names if name in inputs), None)

    return {owner: ExpertWeights(first_of(parts, FIRST), first_of(parts, DOWN)) for owner, parts in stacks.items()}


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

    if inputs.has_global_scale:
        assert scale is not None
        scales = group_scale(group_absmax(tokens, inputs.group), _LOCAL, tokens.new_full((1, 1), scale))
        rounded = decode(encode(tokens, scales, fmt), scales, fmt)
    elif inputs.static:
        assert scale is not None
        rounded = round_values(tokens, tokens.new_full((1, 1), scale), fmt)
    else:
        rounded = round_values(tokens, group_scale(group_absmax(tokens, inputs.group), fmt), fmt)
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

    def add(self, place: str | int, values: Tensor, limit: float) -> None:
        """Count the values beyond a limit.

        Args:
            place: name of the module, or number of the layer for keys and values.
            values: activations of any shape.
            limit: largest absolute value that is not clipped.
        """
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


# Most tokens of an answer.
TOKENS = 64


def end_tokens(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Read the ids of the tokens that end an answer, from generation_config.json or else config.json.

    Args:
        directory: the checkpoint's directory.
        config: its config.json, parsed.

    Returns:
        The token ids; empty if neither file has any.

    Raises:
        SourceError: generation_config.json cannot be read.
    """
    values: list[object] = []
    if (directory / "generation_config.json").exists():
        with readable():
            data = read_small(directory / "generation_config.json", "generation_config.json")
        settings = parse_json(data, "generation_config.json")
        values.append(settings.get("eos_token_id") if isinstance(settings, dict) else None)
    values += [level.get("eos_token_id") for level in config_levels(config)]

    for value in values:
        ids = value if isinstance(value, list) else [value]
        valid = [token for token in ids if isinstance(token, int) and not isinstance(token, bool) and token >= 0]
        if valid:
            return tuple(valid)

    return ()


def continue_prompts(
    streamed: StreamedModel,
    prompts: Sequence[Prompt],
    ends: Sequence[int],
    tokens: int = TOKENS,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    cache: Callable[[], Any] = lambda: None,
    progress: Callable[[], None] = lambda: None,
) -> list[tuple[int, ...]]:
    """Continue each prompt greedily. All weights of the model are loaded meanwhile.

    Prompts are computed one at a time, as padding would change how sums are rounded.

    Args:
        streamed: the model.
        prompts: the prompts, each with its text and its token ids.
        ends: ids of the tokens that end an answer; none if only `tokens` ends it.
        tokens: most tokens of an answer.
        around: makes the context in which the model runs, such as `ServedModel.round_inputs`, which rounds activations.
        cache: makes the KV cache of a prompt; if it returns None, transformers makes its own.
        progress: called after each prompt.

    Returns:
        The token ids of each prompt's continuation, without the prompt and with the end token if there is one.

    Raises:
        SourceError: a weight is missing or cannot be read.
    """
    generation_config: Any = GenerationConfig
    config = generation_config(
        max_new_tokens=tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        eos_token_id=list(ends) or None,
        # Required, but never used: there is one prompt at a time.
        pad_token_id=ends[0] if ends else 0,
    )

    continuations = []

    with streamed.resident() as resident:
        model: Any = resident
        # generate() would take settings that we leave open from the model's own.
        own_config, model.generation_config = model.generation_config, generation_config()
        try:
            for prompt in prompts:
                ids = torch.tensor([prompt.ids], device=streamed.device)
                kv_cache = cache()
                options = {} if kv_cache is None else {transformers_internals.cache_argument(resident): kv_cache}
                with around():
                    generated = model.generate(
                        ids, attention_mask=torch.ones_like(ids), generation_config=config, **options
                    )
                continuations.append(tuple(generated[0, len(prompt.ids) :].tolist()))
                progress()
        finally:
            model.generation_config = own_config

    return continuations


def side_by_side(
    prompts: Sequence[Prompt], source: Sequence[Sequence[int]], output: Sequence[Sequence[int]], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Put two models' continuations side by side, in the form of eval.json's `texts`.

    Args:
        prompts: the prompts, each with its text and its token ids.
        source: token ids of the source's continuation of each prompt.
        output: token ids of the output's continuation of each prompt.
        tokenizer: decodes both.

    Returns:
        For each prompt: `prompt`, `source` and `output` as text, and `differs_at`, the index of the first token that
        differs, None if all are equal. If one continuation begins with all of the other, it is the other's length.
    """
    return [
        {
            "prompt": prompt.text,
            "source": tokenizer.decode(source_ids),
            "output": tokenizer.decode(output_ids),
            "differs_at": _differs_at(source_ids, output_ids),
        }
        for prompt, source_ids, output_ids in zip(prompts, source, output, strict=True)
    ]


def _differs_at(source: Sequence[int], output: Sequence[int]) -> int | None:
    pairs = zip(source, output, strict=False)
    index = next((at for at, (before, after) in enumerate(pairs) if before != after), None)
    # One may have ended before the other.
    return min(len(source), len(output)) if index is None and len(source) != len(output) else index


# The largest model, in bytes, that answers built-in prompts: each token takes a reading of all weights.
LARGEST_BY_DEFAULT = 2 << 30
# Number of built-in prompts that are answered.
BUILT_IN = 4


def prompts_to_answer(
    file: str | os.PathLike[str] | None, tokenizer: Tokenizer, nbytes: int, room: int | None = None
) -> tuple[Prompt, ...]:
    """Read the prompts that the models are to answer.

    Args:
        file: a file of prompts; None for a few built-in ones. A file is read in any case, so that a mistake in it is
            an error before hours of work.
        tokenizer: the source's tokenizer.
        nbytes: size of the largest model's weights in bytes.
        room: bytes that the weights may take; None if only the machine's memory limits them.

    Returns:
        The prompts, each with its text and its token ids; none if a model does not fit into memory, or is large and the
        user gave no file.

    Raises:
        SourceError: the prompts cannot be read, are too long, or do not fit the tokenizer or its chat template.
    """
    free = available_memory() // 2
    if room is not None:
        free = min(free, room)
    fits = nbytes <= free and (file is not None or nbytes <= LARGEST_BY_DEFAULT)
    if file is None and not fits:
        return ()
    prompts = read_prompts(file, tokenizer)[: None if file is not None else BUILT_IN]
    return prompts if fits else ()


def compare_answers(
    source: StreamedModel,
    outputs: Sequence[ServedModel],
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    progress: Callable[[], None] = lambda: None,
) -> list[list[dict[str, Any]]]:
    """Have the source and then each output answer prompts greedily.

    Args:
        source: the source's model.
        outputs: the outputs as engines serve them: with rounded activations and KV cache.
        tokenizer: the source's tokenizer.
        prompts: the prompts, each with its text and its token ids.
        progress: called after each prompt of each model.

    Returns:
        For each output a list with a dictionary for each prompt, as eval.json has them in `texts`: `prompt`, `source`
        and `output` as text, and `differs_at`, the index of the first token that differs, None if all are equal.

    Raises:
        SourceError: a weight or generation_config.json cannot be read.
    """
    ends = end_tokens(source.checkpoint.root, source.checkpoint.config)

    around = partial(products_in_float32, source.device)
    source_answers = continue_prompts(source, prompts, ends, TOKENS, around, progress=progress)
    output_answers = (
        continue_prompts(output.model, prompts, ends, TOKENS, output.round_inputs, output.cache, progress)
        for output in outputs
    )
    return [side_by_side(prompts, source_answers, answers, tokenizer) for answers in output_answers]
