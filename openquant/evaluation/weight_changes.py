"""How the weights that an output computes with differ from its source's, and how much of that its formats explain.

Two models' parameters are held against one another as they are loaded, so that names, stacks and merged layers are
those of the model, whatever a checkpoint calls them.

    compare_weights("model.layers.0.mlp.up_proj", source, output, form)    # Change(error=0.0264, explained=0.0264, ...)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..formats.format import Format, Group, grid_of
from ..formats.reference import choose_scales, decode, encode, group_absmax, group_global_scale
from ..formats.schemes import SCHEMES

# Weights that are held in float32 at a time.
CHUNK = 1 << 21
# Those that are looked at in one go for whether they are equal.
PIECE = 1 << 24
# A group is off where its error is so many times what rounding explains.
OFF = 2.0
# A group's scale is wrong where its weights are larger or smaller than the source's by this factor, half way to two.
WRONG_SCALE = 2.0**0.5
# Groups of less than this share of the mean energy in their row are not judged so: what GPTQ propagates into them from
# other groups may be larger than they are.
SMALL = 0.25
# What storing float32 or float16 in bfloat16 may change.
ROUNDED = 2.0**-8
# Numbers that torch's kernels encode; others are a byte or a pair of a byte's halves, and go through numpy.
_FAST = {scheme.format.number for scheme in SCHEMES.values()}


@dataclass(frozen=True)
class WeightChange:
    """How one weight differs.

    Attributes:
        name: of the module: "model.layers.0.mlp.up_proj"; of an expert in a stack "...mlp.experts.down_proj[3]".
        quantized: whether the output stores it as codes.
        error: Frobenius norm of the difference over that of the source's weight.
        explained: the same of the source's weight stored in the output's format.
        off: share of the groups that have a scale whose error is more than OFF times what the format explains.
        wrong_scales: share of the groups whose weights are WRONG_SCALE times the source's or more, or as much smaller,
            as <source, output> / <source, source> has it; small groups not counted.
    """

    name: str
    quantized: bool
    error: float
    explained: float
    off: float
    wrong_scales: float = 0.0


def compare_weights(
    name: str,
    source: Tensor,
    output: Tensor,
    form: Format | None,
    transposed: bool = False,
    between: Callable[[], None] = lambda: None,
) -> WeightChange:
    """How one weight of the output differs.

    Args:
        name: what it is called.
        source: the source's, [out, in] of any floating dtype, or of a weight that is not quantized any shape.
        output: the output's, of the same shape, decoded.
        form: what it is stored as; None for plain elements.
        transposed: whether the two are [in, out].
        between: called after each piece of a weight that may be mapped from files, to let their pages go.
    """
    if _equal(source, output, between):
        return WeightChange(name, form is not None, 0.0, 0.0, 0.0)
    if form is None:
        wide, other = source.flatten(), output.flatten()
        signal = noise = 0.0
        for low in range(0, len(wide), CHUNK):
            weight = wide[low : low + CHUNK].double()
            signal += float(weight.square().sum())
            noise += float((other[low : low + CHUNK].double() - weight).square().sum())
            between()
        error = _root(noise, signal)
        return WeightChange(name, False, error, 0.0, float(error > ROUNDED))
    if transposed:
        source, output = source.T, output.T
    columns = [torch.cat(column) for column in zip(*_grids(source, output, form), strict=True)]
    if form.shared:
        columns = [column.sum(0, keepdim=True) for column in columns]
    found, explained, signals, products = columns
    total, signal = float(explained.sum()), float(signals.sum())
    usual = total / signal if signal else 0.0
    off = found > OFF**2 * torch.maximum(explained, usual * signals)
    return WeightChange(
        name,
        True,
        _root(float(found.sum()), signal),
        _root(total, signal),
        float(off.double().mean()),
        _wrong_scales(signals, products, grid_of(form.group, (source.shape[0], source.shape[1]))[1]),
    )


def _wrong_scales(signals: Tensor, products: Tensor, along: int) -> float:
    """Share of groups whose scale is wrong.

    Args:
        signals: <source, source> of each group, row by row.
        products: <source, output> likewise.
        along: groups in a row.
    """
    usual = signals.reshape(-1, along).mean(1, keepdim=True)
    large = (signals.reshape(-1, along) > SMALL * usual).flatten()
    sound = (products < WRONG_SCALE * signals) & (products > signals / WRONG_SCALE)
    return float((large & ~sound).double().mean())


def _equal(source: Tensor, output: Tensor, between: Callable[[], None]) -> bool:
    """Whether all elements are the same."""
    mine, other = source.flatten(), output.flatten()
    for low in range(0, max(len(mine), len(other)), PIECE):
        if not torch.equal(mine[low : low + PIECE], other[low : low + PIECE]):
            return False
        between()
    return True


def _root(noise: float, signal: float) -> float:
    error = math.sqrt(noise / signal) if signal else float(noise > 0)
    return error if math.isfinite(error) else 1.0


def _grids(source: Tensor, output: Tensor, form: Format) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """By group, of some rows at a time: energies of the error, of what the format explains, and of the weight, and the
    product of the weight with the output's.
    """
    height, width = form.group
    largest = group_absmax(source, (None, None)) if form.shares_scale else None
    divisor = None if largest is None else group_global_scale(largest, form)
    step = max(1, CHUNK // source.shape[1])
    step = max(height, step // height * height) if height else step
    for low in range(0, len(source), step):
        weight, other = source[low : low + step].float(), output[low : low + step].float()
        group: Group = (height if height else len(weight), width if width else weight.shape[1])
        weight, other = _padded(weight, group), _padded(other, group)
        alone = replace(form, group=group)
        scale, zero = choose_scales(weight, alone, largest if form.shared else None, divisor)
        stored = _stored(weight, scale, zero, alone)
        error, lost = other - weight, stored - weight
        yield (
            _sums(error * error, group),
            _sums(lost * lost, group),
            _sums(weight * weight, group),
            _sums(weight * other, group),
        )


def _stored(weight: Tensor, scale: Tensor, zero: Tensor | None, form: Format) -> Tensor:
    """What a format makes of weights, given their scales and zero points."""
    rows, cols = form.group
    assert rows is not None and cols is not None
    if form.number in _FAST:
        return decode(encode(weight, scale, form, zero), scale, form, zero)
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[: weight.shape[0], : weight.shape[1]]
    codes = form.number.encode((weight / spread).contiguous().cpu().numpy())
    return torch.from_numpy(form.number.decode(codes)).to(weight.device) * spread


def _padded(weight: Tensor, group: Group) -> Tensor:
    rows, cols = group
    assert rows is not None and cols is not None
    down, along = -weight.shape[0] % rows, -weight.shape[1] % cols
    return nn.functional.pad(weight, (0, along, 0, down)) if down or along else weight


def _sums(values: Tensor, group: Group) -> Tensor:
    """Sum of each group, float64, as one axis."""
    rows, cols = group
    assert rows is not None and cols is not None
    grid = values.reshape(values.shape[0] // rows, rows, values.shape[1] // cols, cols)
    # At most CHUNK of them: float64 would take several times as long, and tell no more.
    return grid.sum((1, 3)).double().flatten().cpu()
