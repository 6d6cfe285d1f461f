"""The types of a diagnosis: statistics of each layer, flags for unusual ones, and advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Largest over mean magnitude. It is 5 to 9 in trained layers of examples/tiny-qwen3, 5 to 7 for weights that are
# normally distributed.
OUTLIER_RATIO = 20.0
# Largest over the first percentile of nonzero magnitudes. E4M3 codes have full precision from 448 down to 2^-6. Above
# this ratio, more than one weight in a hundred is subnormal in FP8 with one scale. It is 332 to 603 in trained layers
# of examples/tiny-qwen3, 290 to 440 for weights that are normally distributed.
DYNAMIC_RANGE = 448 * 2.0**6
# Standard deviation of all weights; 0.02 is common.
SMALL_STD = 0.001

FLAGS = {
    "outliers": f"the largest weight is more than {OUTLIER_RATIO:g} times the mean magnitude",
    "range": f"the largest weight is more than {DYNAMIC_RANGE:g} times the first percentile of magnitudes",
    "small": f"the standard deviation is below {SMALL_STD:g}",
    "zero": "all weights are zero",
    "large": "a weight is larger than engines load",
}
"""The meaning of each flag, as the report prints it."""


@dataclass(frozen=True)
class LayerDiagnosis:
    """Statistics of one layer. max, mean and std are of all weights; the others are estimated from `rows` rows.

    Attributes:
        module: module name of the layer.
        shape: (out, in).
        rows: number of rows measured.
        max: largest magnitude.
        mean: mean magnitude.
        std: standard deviation.
        outlier_ratio: largest over mean magnitude; 0 if all weights are zero.
        dynamic_range: largest over the first percentile of the nonzero magnitudes, to within 1 / 128 (exactly in
            bfloat16); 0 if all weights are zero.
        flags: keys of FLAGS, for what is unusual.
        errors: relative quantization error by scheme, ||Q - W|| / ||W|| in the Frobenius norm, such as 0.0264; None if
            the scheme cannot store the layer, as with blocks that do not divide its shape.
        row_errors: likewise, the root mean square over rows of each row's relative error. A large weight, which
            dominates ||W||, does not hide the errors of other rows here.
        zero_shares: by scheme, the share of weights that are nonzero and become zero.
        subnormal_shares: by scheme, the share of weights with subnormal codes, which have fewer bits of precision; 0
            for INT8.
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
    """Layers of the same kind, such as down_proj of several decoder layers, that another scheme stores better.

    Attributes:
        layers: module names.
        scheme: name of the other scheme; None to leave them unquantized.
        error_before: largest of their row errors in the requested scheme; None if it cannot store one of them.
        error_after: the same in the other scheme; 0 if they stay unquantized.
        bytes: by how much the output grows.
        option: option of compress to type: "--scheme-for 'model.layers.{0,3}.mlp.down_proj=channel'".
    """

    layers: tuple[str, ...]
    scheme: str | None
    error_before: float | None
    error_after: float
    bytes: int
    option: str


@dataclass(frozen=True)
class Diagnosis:
    """The result of diagnose().

    Attributes:
        model: the model as it was named.
        revision: its commit on the Hub; None for a local model.
        architecture: name of the architecture whose registry entry was used.
        scheme: name of the requested scheme.
        rows_read: share of all rows that was measured; 1.0 with `full`.
        layers: every layer that the scheme would quantize, in the order of the checkpoint.
        advice: where another scheme halves the error, largest error first.
        options: all advice as arguments of one compress command, with the scheme; empty without advice.
        bytes_before: bytes of the output's tensors without the advice.
        bytes_after: bytes with it.
        notes: what engines do with the output of the advice, or why there are no options.
        not_finite: NaN and infinities in tensors that stay unquantized, by tensor name:
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
        """The layers by falling row error in the requested scheme; first those that it cannot store."""
        return sorted(self.layers, key=lambda layer: -_or_infinite(layer.row_errors[self.scheme]))

    def to_json(self) -> dict[str, Any]:
        """Return the fields as `--json` prints them, with `zero_share` and `subnormal_share` for `scheme`."""
        layers = tuple(
            {
                **vars(layer),
                "zero_share": layer.zero_shares[self.scheme],
                "subnormal_share": layer.subnormal_shares[self.scheme],
            }
            for layer in self.layers
        )
        # Not with asdict: it copies every value, which for many small experts takes as long as measuring them.
        return {**vars(self), "layers": layers, "advice": tuple(dict(vars(advice)) for advice in self.advice)}


def _or_infinite(error: float | None) -> float:
    return float("inf") if error is None else error
