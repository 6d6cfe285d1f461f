"""What a diagnosis finds: figures of each layer, what of them is out of the ordinary, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Largest over mean magnitude: 5 to 9 in trained layers of examples/tiny-qwen3, 5 to 7 of normal weights.
OUTLIER_RATIO = 20.0
# Largest over the first percentile of nonzero magnitudes. Above it more than one weight in a hundred is subnormal
# under one scale in FP8, whose codes have all bits of precision from 448 down to 2^-6. Trained layers of
# examples/tiny-qwen3 have 332 to 603, normal weights 290 to 440.
DYNAMIC_RANGE = 448 * 2.0**6
# Of all weights from their mean; 0.02 is common.
DEVIATION = 0.001

FLAGS = {
    "outliers": f"the largest weight is more than {OUTLIER_RATIO:g} times the mean magnitude",
    "range": f"the largest weight is more than {DYNAMIC_RANGE:g} times the first percentile of magnitudes",
    "small": f"the deviation is below {DEVIATION:g}",
    "zero": "all weights are zero",
    "large": "a weight is larger than engines load",
}
"""What each flag says."""


@dataclass(frozen=True)
class LayerDiagnosis:
    """Figures of one layer: largest, mean and deviation of all its weights, the others of `rows` rows of them.

    Attributes:
        module: the layer.
        shape: (out, in).
        rows: how many rows were measured.
        max: the largest magnitude.
        mean: the mean magnitude.
        std: standard deviation.
        outlier_ratio: largest over mean magnitude; 0 where all weights are zero.
        dynamic_range: largest over the first percentile of the nonzero magnitudes, which is found to one part in 128
            (in bfloat16 exactly); 0 where all weights are zero.
        flags: what of this is out of the ordinary, keys of FLAGS.
        errors: by scheme, Frobenius norm of the quantized weights' difference over that of the weights, 0.0264; None
            where the scheme cannot store the layer, as blocks that do not divide it.
        row_errors: likewise, of each row by itself, the root of the mean square over rows: a large weight, which makes
            the norm of all that large, does not hide what becomes of other rows.
        zero_shares: by scheme, the share of weights that become zero and are not.
        subnormal_shares: by scheme, the share of weights whose codes have lost bits of precision; INT8 has none.
    """

    module: str
    shape: tuple[int, int]
    rows: int
    max: float
    mean: float
    std: float
    outlier_ratio: float
    dynamic_range: float
    flags: tuple[str, ...]
    errors: Mapping[str, float | None]
    row_errors: Mapping[str, float | None]
    zero_shares: Mapping[str, float | None]
    subnormal_shares: Mapping[str, float | None]


@dataclass(frozen=True)
class Advice:
    """Layers that another scheme serves better, named alike.

    Attributes:
        layers: modules.
        scheme: what to store them in; None to leave them unquantized.
        error_before: the largest of their row errors in the scheme that was asked for; None where it cannot store one.
        error_after: in the other; 0 where they stay unquantized.
        bytes: by how much the output grows.
        option: what to type: "--scheme-for 'model.layers.{0,3}.mlp.down_proj=channel'".
    """

    layers: tuple[str, ...]
    scheme: str | None
    error_before: float | None
    error_after: float
    bytes: int
    option: str


@dataclass(frozen=True)
class Diagnosis:
    """What diagnose() found.

    Attributes:
        model: as it was asked for.
        revision: its commit on the Hub, or None.
        architecture: the registry's entry by which layers were found.
        scheme: the scheme that advice is about.
        rows_read: share of all rows of the layers that was measured, 1.0 with `full`.
        layers: every layer that the scheme would quantize, in the order of the checkpoint.
        advice: where another scheme halves the error, the worst first.
        options: all of it as words of one command for compress, `scheme` included; empty without advice.
        bytes_before: size of the output's tensors without the advice.
        bytes_after: with it.
        notes: what engines make of the output with the advice.
        not_finite: what tensors hold that stay unquantized and are not finite, by name:
            {"model.norm.weight": "NaN (3 values)"}.
    """

    model: str
    revision: str | None
    architecture: str
    scheme: str
    rows_read: float
    layers: tuple[LayerDiagnosis, ...]
    advice: tuple[Advice, ...] = ()
    options: tuple[str, ...] = ()
    bytes_before: int = 0
    bytes_after: int = 0
    notes: tuple[str, ...] = ()
    not_finite: Mapping[str, str] = field(default_factory=dict)

    @property
    def worst(self) -> list[LayerDiagnosis]:
        """The layers, the largest row error in the scheme first; before all others those it cannot store."""
        return sorted(self.layers, key=lambda layer: -_or_infinite(layer.row_errors[self.scheme]))

    def to_json(self) -> dict[str, Any]:
        """The fields by name, as `--json` prints them; a layer's `zero_share` and `subnormal_share` are those of the
        scheme.
        """
        layers = tuple(
            {
                **vars(layer),
                "zero_share": layer.zero_shares[self.scheme],
                "subnormal_share": layer.subnormal_shares[self.scheme],
            }
            for layer in self.layers
        )
        # Not by asdict, which copies every value: of a model of many small experts that takes as long as measuring it.
        return {**vars(self), "layers": layers, "advice": tuple(dict(vars(each)) for each in self.advice)}


def _or_infinite(error: float | None) -> float:
    return float("inf") if error is None else error
