"""How each layer of an output differs from the source's, and which layers are suspect. docs/figures.md has the
limits.

The decoded weights of two loaded models are compared, so names, stacked experts and fused layers are those of the
model's class, whatever the checkpoints call them: the error, and how much of it rounding explains.

    compare_weights("model.layers.0.mlp.up_proj", source, output, fmt)   # WeightChange(error=0.0264, ...)

A layer is suspect if it differs by more than rounding to its format explains, and by more than most other layers: a
change to all layers, such as GPTQ, makes none suspect.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..files.model_files import short_repr
from ..formats.format import Format, grid_of
from ..formats.reference import choose_unsearched_scales, group_absmax, group_global_scale, nearest
from ..weights.quant_error import ERROR_MOVED, FEW_WEIGHTS, MOVED, OTHER_WEIGHTS, ROUNDED, WRONG_SCALE

# Limit of a layer's error relative to its format's rounding error, and relative to the median layer's ratio of the two.
# weights/quant_error.py has the limits for methods that compensate errors.
ERROR = 1.5
# A layer is suspect if it adds JUMP times the median layer's distance and more than LEAST_JUMP, unless the floor grows
# there as suddenly.
JUMP = 8.0
LEAST_JUMP = 0.05
# Share of keys, values or activations that a static scale may clip: calibrations clip the largest few on purpose.
CLIPPED = 0.01
# Limits of the share of tokens routed to other experts: relative to the median layer's, and absolute.
ROUTED = 4.0
LEAST_ROUTED = 0.2


@dataclass(frozen=True)
class LayerFigures:
    """What an output's decoder layer does to the texts, compared with the source's.

    Attributes:
        name: name of the layer.
        distance: relative distance of the hidden states after the layer from the source's, mean over tokens.
        floor: the same distance of the source with rounding noise.
        routed_otherwise: share of tokens that are routed to other experts; None without experts.
        clipped: largest share of its activations, keys or values that a static scale clips.
    """

    name: str
    distance: float
    floor: float
    routed_otherwise: float | None = None
    clipped: float = 0.0


@dataclass(frozen=True)
class Suspect:
    """A part of an output that differs more than it should.

    Attributes:
        layer: name of the layer, module or file.
        why: the reason, with figures.
    """

    layer: str
    why: str


def suspects_by_weights(changes: Sequence[WeightChange], routers: Iterable[str], gptq: bool = False) -> list[Suspect]:
    """Find modules whose weights differ from the source's by more than rounding to their formats explains.

    Args:
        changes: changes of all weights, quantized or not.
        routers: names of quantized modules that every engine expects unquantized, such as routers. Those that `changes`
            lacks do not count.
        gptq: whether GPTQ rounded the weights.

    Returns:
        Name of each suspect module and the reason, as text: routers first, then the others by their error relative to
        what their format explains, the largest first.
    """
    quantized = [change for change in changes if change.quantized]
    unquantized = [change for change in changes if not change.quantized]
    median_ratio = statistics.median([_error_ratio(change) for change in quantized]) if quantized else 1.0

    # A method that compensates errors, as GPTQ does, moves weights in most layers.
    compensated = bool(quantized) and (
        gptq or median_ratio > MOVED or statistics.median([change.bad_groups for change in quantized]) > 0
    )
    limit = (ERROR_MOVED if compensated else ERROR) * max(1.0, median_ratio)

    ranked = []
    for change in quantized:
        ratio = _error_ratio(change)
        if ratio > limit or (compensated and change.error > OTHER_WEIGHTS):
            why = (
                f"relative error of its weights is {change.error:.3g}, its format explains {change.rounding_error:.3g}"
            )
        elif change.wrong_scales and compensated:
            why = f"in {_per_cent(change.wrong_scales)} of its groups weights or scales are not those of the source"
        elif change.bad_groups and not compensated:
            why = (
                f"in {_per_cent(change.bad_groups)} of its groups the weights are off by more than its format explains"
            )
        else:
            continue

        ranked.append((ratio, Suspect(change.name, why)))

    changed = [change for change in unquantized if change.bad_groups]
    # Smoothing changes most norms on purpose.
    if len(changed) <= len(unquantized) / 2:
        ranked += [
            (change.error / ROUNDED, Suspect(change.name, f"it is not quantized, but differs by {change.error:.2g}"))
            for change in changed
        ]

    quantized_names = {change.name for change in quantized}
    quantized_routers = [
        Suspect(name, "it is a router and must not be quantized") for name in routers if name in quantized_names
    ]

    return [*quantized_routers, *(suspect for _, suspect in sorted(ranked, key=lambda pair: -pair[0]))]


def _per_cent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _error_ratio(change: WeightChange) -> float:
    """Return a weight's error relative to the rounding error of its format."""
    return change.error / max(change.rounding_error, ROUNDED) if change.error else 1.0


def suspects_by_layers(layers: Sequence[LayerFigures]) -> list[Suspect]:
    """Find decoder layers in which hidden states, routing or static activation scales go wrong.

    Args:
        layers: figures of all decoder layers, in the order in which they run.

    Returns:
        Name of each suspect layer and the reason, as text, in the order of the layers; those by routing last.
    """
    suspects = []
    added = _added_distances([layer.distance for layer in layers])
    noise = _added_distances([layer.floor for layer in layers])

    # The first layer's inputs are small and exact, so it adds more than others in good models too.
    median_added, median_noise = (
        statistics.median(values[1:]) if len(layers) > 2 else math.inf for values in (added, noise)
    )

    for number, layer in enumerate(layers):
        # A layer in which the source's own noise grows as suddenly is not suspect.
        noise_growth = max(1.0, noise[number] / median_noise) if median_noise else 1.0
        before = layers[number - 1].distance if number else math.inf

        # If later layers reduce the distance, the median is small. Good layers still add less than all before them.
        if added[number] > max(LEAST_JUMP, JUMP * median_added * noise_growth, before):
            why = f"the distance from the source grows from {before:.3g} to {layer.distance:.3g} in it"
            suspects.append(Suspect(layer.name, why))

        if layer.clipped > CLIPPED:
            why = f"static scales clip {layer.clipped:.2g} of its activations"
            suspects.append(Suspect(layer.name, why))

    shares = [layer.routed_otherwise for layer in layers if layer.routed_otherwise is not None]
    median_share = statistics.median(shares) if len(shares) > 1 else 1.0
    for layer in layers:
        share = layer.routed_otherwise
        if share is not None and share > max(LEAST_ROUTED, ROUTED * median_share):
            suspects.append(Suspect(layer.name, f"{share:.2g} of its tokens are routed to other experts"))

    return suspects


def _added_distances(distances: Sequence[float]) -> list[float]:
    """Return the distance that each layer adds, if errors of layers are independent: then their squares add up."""
    squares = [0.0, *(distance**2 for distance in distances)]
    return [max(0.0, after - before) ** 0.5 for before, after in pairwise(squares)]


def suspects_by_config(source: Mapping[str, object], output: Mapping[str, object]) -> list[Suspect]:
    """Find settings of config.json that differ. A missing setting equals None.

    Args:
        source: the source's settings that change what a model computes, by dotted key:
            {"rope_parameters.rope_theta": 10000.0, ..}.
        output: the output's settings, by dotted key.

    Returns:
        A suspect for each key that differs, in the order of the keys: `layer` is "config.json", `why` names the key and
        both values.
    """
    names = sorted(name for name in {*source, *output} if source.get(name) != output.get(name))
    return [
        Suspect(
            "config.json", f"{name} is {short_repr(output.get(name))}, the source has {short_repr(source.get(name))}"
        )
        for name in names
    ]


# Elements that are converted to float32 at a time.
CHUNK = 1 << 21
# Elements that are tested for equality at a time.
PIECE = 1 << 24
# A group is bad if its error is more than this many times its rounding error (in norm).
MAX_GROUP_ERROR = 2.0
# Groups of fewer weights than FEW_WEIGHTS say something only if more than this share of them is wrong: in the first
# layer of SmolLM2-135M it was up to 0.015.
MOST_MOVED = 0.02
# Groups with less than this share of the mean energy in their row do not count as wrong: the errors that GPTQ
# propagates into them from other groups may be larger than they are.
SMALL_GROUP = 0.25


@dataclass(frozen=True)
class WeightChange:
    """How one weight of an output differs from the source's.

    Attributes:
        name: name of the module, such as "model.layers.0.mlp.up_proj"; of a stacked expert
            "model.layers.0.mlp.experts.down_proj[3]".
        quantized: whether the output stores it quantized.
        error: relative error, ||output - source|| / ||source|| in Frobenius norms.
        rounding_error: relative error of the source's weight rounded to nearest in the output's format; 0 if the weight
            is not quantized.
        bad_groups: share of the scale groups whose error is more than MAX_GROUP_ERROR times their rounding error. If
            the weight is not quantized: 1 if it differs by more than bfloat16 explains, else 0.
        wrong_scales: share of the scale groups whose weights are larger or smaller than the source's by WRONG_SCALE,
            measured as <source, output> / <source, source>; groups of small weights do not count, and few groups of
            fewer than FEW_WEIGHTS weights.
    """

    name: str
    quantized: bool
    error: float
    rounding_error: float
    bad_groups: float
    wrong_scales: float = 0.0


def compare_weights(
    name: str,
    source: Tensor,
    output: Tensor,
    fmt: Format | None,
    transposed: bool = False,
    between: Callable[[], None] = lambda: None,
) -> WeightChange:
    """Compare one weight of an output with the source's.

    Args:
        name: name of the module.
        source: the source's weight [out, in], any floating dtype; any shape if `fmt` is None.
        output: the output's decoded weight, of the same shape, any floating dtype.
        fmt: format in which the output stores it; None if it is not quantized.
        transposed: whether both are stored as [in, out].
        between: called after each piece that is tested for equality, and after each of an unquantized weight that is
            compared, to free the pages of mapped files.

    Returns:
        The relative error ||output - source|| / ||source||, 1 if that is not finite; the rounding error of the format;
        and the shares (of 1) of scale groups with a large error or a wrong scale. All are 0 if both weights are equal.
    """
    if _equal(source, output, between):
        return WeightChange(name, fmt is not None, 0.0, 0.0, 0.0)

    if fmt is None:
        flat_source, flat_output = source.flatten(), output.flatten()
        signal = noise = 0.0
        for start in range(0, len(flat_source), CHUNK):
            piece = flat_source[start : start + CHUNK].double()
            signal += float(piece.square().sum())
            noise += float((flat_output[start : start + CHUNK].double() - piece).square().sum())
            between()

        error = _relative(noise, signal)
        return WeightChange(name, False, error, 0.0, float(error > ROUNDED))

    if transposed:
        source, output = source.T, output.T

    columns = [torch.cat(column) for column in zip(*_group_energies(source, output, fmt), strict=True)]
    if fmt.shared:
        columns = [column.sum(0, keepdim=True) for column in columns]

    errors, rounding_errors, signals, products = columns
    rounding, signal = float(rounding_errors.sum()), float(signals.sum())
    mean_rounding = rounding / signal if signal else 0.0
    bad = errors > MAX_GROUP_ERROR**2 * torch.maximum(rounding_errors, mean_rounding * signals)
    return WeightChange(
        name,
        True,
        _relative(float(errors.sum()), signal),
        _relative(rounding, signal),
        float(bad.double().mean()),
        _wrong_scales(signals, products, source.numel(), grid_of(fmt.group, (source.shape[0], source.shape[1]))[1]),
    )


def _wrong_scales(signals: Tensor, products: Tensor, weights: int, groups_per_row: int) -> float:
    """Return the share of groups whose scale is wrong.

    Args:
        signals: <source, source> of each group, float64 [groups], row by row.
        products: <source, output> of each group, float64 [groups], row by row.
        weights: number of weights in all groups.
        groups_per_row: number of groups in a row.
    """
    mean_energy = signals.reshape(-1, groups_per_row).mean(1, keepdim=True)
    large = (signals.reshape(-1, groups_per_row) > SMALL_GROUP * mean_energy).flatten()
    right = (products < WRONG_SCALE * signals) & (products > signals / WRONG_SCALE)
    share = float((large & ~right).double().mean())
    return share if share > MOST_MOVED or weights >= FEW_WEIGHTS * len(signals) else 0.0


def _equal(source: Tensor, output: Tensor, between: Callable[[], None]) -> bool:
    flat_source, flat_output = source.flatten(), output.flatten()
    for start in range(0, max(len(flat_source), len(flat_output)), PIECE):
        first, second = flat_source[start : start + PIECE], flat_output[start : start + PIECE]
        if not torch.equal(first, second) and not _equal_beside_nan(first, second):
            return False
        between()
    return True


def _equal_beside_nan(source: Tensor, output: Tensor) -> bool:
    """Whether both have NaN at the same places, and are equal elsewhere."""
    missing = source.isnan()
    if not missing.any() or source.shape != output.shape:
        return False
    return torch.equal(missing, output.isnan()) and torch.equal(source[~missing], output[~missing])


def _relative(noise: float, signal: float) -> float:
    """Return the relative error, given the energies of the error and of the weight."""
    error = math.sqrt(noise / signal) if signal else float(noise > 0)
    return error if math.isfinite(error) else 1.0


def _group_energies(source: Tensor, output: Tensor, fmt: Format) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Compute sums of squares of each scale group, some rows of groups at a time.

    Yields:
        Four float64 [groups]: energy of the error, of the rounding error and of the source's weight, and
        <source, output>.
    """
    height, width = fmt.group
    largest = group_absmax(source, (None, None)) if fmt.shares_scale else None
    divisor = None if largest is None else group_global_scale(largest, fmt)
    step = max(1, CHUNK // source.shape[1])
    step = max(height, step // height * height) if height else step

    for start in range(0, len(source), step):
        weight, output_weight = source[start : start + step].float(), output[start : start + step].float()
        group = (height or len(weight), width or weight.shape[1])
        weight, output_weight = _pad(weight, group), _pad(output_weight, group)

        piece_fmt = replace(fmt, group=group)
        scale, zero_point = choose_unsearched_scales(weight, piece_fmt, largest if fmt.shared else None, divisor)
        rounded = _round_trip(weight, scale, zero_point, piece_fmt, group)

        error, rounding_error = output_weight - weight, rounded - weight

        yield (
            _group_sums(error * error, group),
            _group_sums(rounding_error * rounding_error, group),
            _group_sums(weight * weight, group),
            _group_sums(weight * output_weight, group),
        )


def _round_trip(
    weight: Tensor, scale: Tensor, zero_point: Tensor | None, fmt: Format, group: tuple[int, int]
) -> Tensor:
    """Return what codes stand for to which float32 weights [out, in] are rounded; all groups are whole."""

    def spread(of_groups: Tensor) -> Tensor:
        return of_groups.repeat_interleave(group[0], 0).repeat_interleave(group[1], 1)

    shift = 0 if zero_point is None else spread(zero_point)
    return (nearest(weight / spread(scale) + shift, fmt.number) - shift) * spread(scale)


def _pad(weight: Tensor, group: tuple[int, int]) -> Tensor:
    """Pad with zeros to whole groups."""
    rows, cols = group
    down, along = -weight.shape[0] % rows, -weight.shape[1] % cols
    return nn.functional.pad(weight, (0, along, 0, down)) if down or along else weight


def _group_sums(values: Tensor, group: tuple[int, int]) -> Tensor:
    """Sum each group of [out, in]; returns float64 [groups] on the CPU, row by row."""
    rows, cols = group
    grid = values.reshape(values.shape[0] // rows, rows, values.shape[1] // cols, cols)
    # A sum of at most CHUNK values is exact enough in float32; float64 takes several times as long.
    return grid.sum((1, 3)).double().flatten().cpu()
