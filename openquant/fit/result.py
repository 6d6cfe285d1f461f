"""The types of the table of `openquant fit`: every scheme of a model, and what is left of GPUs that hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..formats.names import SchemeName


@dataclass(frozen=True)
class Target:
    """GPUs that a table is for.

    Attributes:
        name: name of the GPU; None if only its memory was given.
        memory_bytes: memory of each; None for the CPU.
        hardware: what engines have kernels for, one of HARDWARE in formats/hardware.py; None without a name.
        count: how many of them there are.
    """

    name: str | None
    memory_bytes: int | None
    hardware: str | None
    count: int


@dataclass(frozen=True)
class Held:
    """What GPUs of one kind hold of a model.

    Attributes:
        gpus: the number of GPUs: as many as there are, or if those are too few, the fewest of 1, 2, 4 and 8 that hold
            the weights and the context; None if none does.
        longest: tokens of the longest sequence that fits and that the model allows; None if that is not known.
        sequences: how many sequences of the context's length fit at once; None if that is not known.
        left: tokens of the longest sequence on as many GPUs as there are, even if that is less than the context; 0 if
            the weights alone do not fit; None if it is not known, or so many GPUs cannot share the model.
    """

    gpus: int | None
    longest: int | None
    sequences: int | None
    left: int | None


@dataclass(frozen=True)
class SchemeFit:
    """A row of the table.

    Attributes:
        scheme: name of the scheme; None for the source as it is.
        bits: bits of a quantized weight with its scales, on average over the model; None for the source.
        bytes: size of all tensors.
        engines: engines that load it, and have kernels for it on the GPU if one is named.
        arithmetic: the numbers that the first of these engines multiplies there in layers that are no experts; None
            without a named GPU, or if there are no such layers.
        expert_arithmetic: likewise in routed experts.
        needs: packages or CPU features that the engine needs for it.
        kl: KL divergence from the source that was measured on another model, in nats; None if it was not.
        holds: what each target of the table holds.
    """

    scheme: str | None
    bits: float | None
    bytes: int
    engines: tuple[str, ...]
    arithmetic: str | None
    expert_arithmetic: str | None
    needs: tuple[str, ...]
    kl: float | None
    holds: tuple[Held, ...]


@dataclass(frozen=True)
class Calibrated:
    """A scheme with a calibration that lost less than the best scheme alone.

    Attributes:
        options: options of compress: "--scheme nvfp4 --gptq".
        kl: KL divergence that was measured, in nats.
    """

    options: str
    kl: float


@dataclass(frozen=True)
class FitTable:
    """The result of fit_table().

    Attributes:
        model: the model as it was named.
        revision: its commit on the Hub; None for a local model.
        architecture: name of the architecture whose registry entry was used.
        context: tokens of each sequence.
        longest_context: the longest sequence that config.json allows; None if it does not say.
        kv_cache: "fp8", or "auto" for a KV cache in bfloat16.
        cache_in_config: whether `kv_cache` is "fp8" because config.json asks for that, and not by an option.
        engines: the engines that were asked for: "vllm", "sglang" or "both"; None for any.
        unknown: why the size of the KV cache is not known; None if it is.
        targets: the GPUs that the rows' `holds` are about; none for the CPU alone.
        measured_on: the model on which `kl` was measured.
        schemes: the rows, the best first: those that fit, and of these the least KL.
        refused: schemes that this model or GPU cannot have, with the reason.
        quantized_source: whether weights of the source are quantized already. KL divergences are then from that source.
        source_fits: whether the source fits the GPU as it is; None without the memory of a GPU.
        quantize_lm_head: whether the output head is quantized too. Its loss is in no `kl`.
        best: the scheme to take on the named GPU: the first that fits, with a known KL; None if there is none, or if a
            quantized source fits as it is.
        command: the command that makes it.
        head_schemes: by scheme, the --scheme-for of its row: "lm_head=int8-weights". A quantized output head has eight
            bits in schemes of fewer, if engines have a kernel for that.
        calibrated: what fits and lost least with a calibration; None if nothing lost less than the best scheme alone.
        mixture: the command for a mixture of schemes, if that fits and fills the GPU better than the best scheme.
        instead: if nothing fits, the command for the best scheme that does with an FP8 KV cache or a quantized output
            head too; None if there is none.
    """

    model: str
    revision: str | None
    architecture: str
    context: int
    longest_context: int | None
    kv_cache: str
    cache_in_config: bool
    engines: str | None
    unknown: str | None
    targets: tuple[Target, ...]
    measured_on: str
    schemes: tuple[SchemeFit, ...]
    refused: Mapping[str, str]
    quantized_source: bool
    source_fits: bool | None
    quantize_lm_head: bool
    best: SchemeName | None
    command: str | None
    head_schemes: Mapping[str, str]
    calibrated: Calibrated | None
    mixture: str | None
    instead: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name, as `--json` prints them."""
        return asdict(self) | {"refused": dict(self.refused), "head_schemes": dict(self.head_schemes)}


@dataclass(frozen=True)
class Point:
    """Size and KL divergence of a mixture or a single scheme.

    Attributes:
        name: the scheme, "5.5bits", "fits 4090", or "--fit 4090".
        scheme: the scheme that all layers have, as far as they can; None for a mixture.
        bytes: size of all tensors of the output.
        bits: bits of a weight that may be quantized, with its scales, on average.
        predicted: the sum of the scores of its units, in nats.
        kl: KL divergence from the source, mean over positions, in nats.
        interval: its 95 % interval over documents; None if there are too few, or it was not measured.
        measured: whether `kl` was measured. Else it is `predicted` times the ratio of the two for what was measured.
        shares: by scheme, or "unquantized", its share of the weights that may be quantized.
        fits: whether it fits the GPUs; None if none are named.
        written: whether it is the output of this run.
        command: the command that makes it.
    """

    name: str
    scheme: str | None
    bytes: int
    bits: float
    predicted: float
    kl: float
    interval: list[float] | None
    measured: bool
    shares: Mapping[str, float]
    fits: bool | None
    written: bool
    command: str


@dataclass(frozen=True)
class SearchResult:
    """The result of search_mixtures(); and what compress() chose from with `fit`.

    Attributes:
        model: the model as it was named.
        revision: its commit on the Hub; None for a local model.
        architecture: name of the architecture whose registry entry was used.
        source_bytes: size of all tensors of the source.
        texts: texts that mixtures were measured on: the number of documents, their tokens, and where they are from.
        texts_sha256: SHA-256 of their tokens.
        engines: "vllm", "sglang" or "both".
        gpu: the GPUs as they were named; None if none were.
        context: tokens of the sequence that they are to hold.
        limit: bytes of weights that fit them; None if none were named.
        points: mixtures of all sizes and the single schemes, the smallest first.
    """

    model: str
    revision: str | None
    architecture: str
    source_bytes: int
    texts: str
    texts_sha256: str
    engines: str
    gpu: str | None
    context: int
    limit: int | None
    points: tuple[Point, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name, as `--json` prints them."""
        return asdict(self)
