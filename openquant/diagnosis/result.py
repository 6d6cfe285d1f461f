"""The types of a diagnosis: errors of each layer's weights, and what was measured to lose less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..formats.schemes import SCHEMES

# A layer is conspicuous if its error is more than so many times that of normally distributed weights. Layers of real
# models have 0.9 to 1.7 times as much (SmolLM2-135M, examples/tiny-qwen3).
CONSPICUOUS = 2.0


@dataclass(frozen=True)
class LayerDiagnosis:
    """Errors of the weights of one layer, estimated from `rows` rows.

    Attributes:
        module: module name of the layer.
        shape: (out, in).
        rows: number of rows measured.
        errors: relative quantization error by scheme, ||Q - W|| / ||W|| in the Frobenius norm, such as 0.0264; None if
            the scheme cannot store the layer, as with blocks that do not divide its shape, or a weight that is larger
            than engines load.
        row_errors: likewise, the root mean square over rows of each row's relative error. A large weight, which
            dominates ||W||, does not hide the errors of other rows here.
    """

    module: str
    shape: tuple[int, int]
    rows: int
    errors: Mapping[str, float | None]
    row_errors: Mapping[str, float | None]

    @property
    def is_zero(self) -> bool:
        """Whether no scheme changes a weight, as is the case if all are zero."""
        return set(self.errors.values()) - {None} == {0.0}


@dataclass(frozen=True)
class Choice:
    """A way to compress the model, and what it loses on another model, which openquant/diagnosis/measured.py names.

    Attributes:
        options: what to type after `compress MODEL`: "--scheme int4 --awq --gptq".
        kl: KL divergence from the source that was measured on that model, in nats.
        gain: the share of the requested scheme's KL that it takes away: 0.71.
        readings: how many times calibration texts run through the model.
        activations: what engines round activations to: "FP8", or "16 bits".
        bytes: size of the output's tensors for this model.
    """

    options: str
    kl: float
    gain: float
    readings: int
    activations: str
    bytes: int


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
        normal: row errors of normally distributed weights, by scheme.
        bytes: size of the output's tensors.
        kl: the requested scheme's KL divergence on the model of `choices`, in nats; None if it was not measured there.
        choices: what loses less there at about the same size, the least first.
        not_finite: NaN and infinities in tensors that stay unquantized, by tensor name:
            {"model.norm.weight": "NaN (3 values)"}.
    """

    model: str
    revision: str | None
    architecture: str
    scheme: str
    rows_read: float
    layers: tuple[LayerDiagnosis, ...]
    normal: Mapping[str, float]
    bytes: int
    kl: float | None = None
    choices: tuple[Choice, ...] = ()
    not_finite: Mapping[str, str] = field(default_factory=dict)

    @property
    def worst(self) -> list[LayerDiagnosis]:
        """The layers by falling row error in the requested scheme; first those that it cannot store."""
        return sorted(self.layers, key=lambda layer: -_or_infinite(layer.row_errors[self.scheme]))

    @property
    def conspicuous(self) -> list[LayerDiagnosis]:
        """The layers that cannot be stored, or whose row error is over twice that of normally distributed weights."""
        return [layer for layer in self.worst if self._is_conspicuous(layer, self.scheme)]

    @property
    def remedies(self) -> list[str]:
        """Schemes of the same numeric format in which none of these layers is conspicuous: ["channel"]."""
        number, layers = SCHEMES[self.scheme].format.number, self.conspicuous
        return [
            name
            for name, scheme in SCHEMES.items()
            if scheme.format.number == number and not any(self._is_conspicuous(layer, name) for layer in layers)
        ]

    def _is_conspicuous(self, layer: LayerDiagnosis, scheme: str) -> bool:
        return _or_infinite(layer.row_errors[scheme]) > CONSPICUOUS * self.normal[scheme]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as `--json` prints them, with the names of conspicuous layers."""
        # Not with asdict: it copies every value, which for many small experts takes as long as measuring them.
        return {
            **vars(self),
            "layers": tuple(vars(layer) for layer in self.layers),
            "choices": tuple(asdict(choice) for choice in self.choices),
            "conspicuous": [layer.module for layer in self.conspicuous],
        }


def _or_infinite(error: float | None) -> float:
    return float("inf") if error is None else error
