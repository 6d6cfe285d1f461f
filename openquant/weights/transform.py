"""Weight transforms: what a calibration changes about weights before they are quantized.

SmoothQuant and AWQ divide the inputs of a layer by factors where they are made (the smooth_layer: a norm, or the rows
of a projection) and multiply the layer's columns by them. The model computes the same, and quantization may lose less.
calibration/mappings.py says which layers. Factors are powers of two, so that norms, biases and routers in bfloat16 stay
exact, and `verify` can read the factors off the source and the output.

    WeightTransform(columns=np.array([4, 1, 0.5], np.float32)).apply(values, 0)    # float32 [n, 3]
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..formats.numbers import Floats


@dataclass(frozen=True, eq=False)
class WeightTransform:
    """What is changed about one weight [out, in].

    Attributes:
        rows: float32 [out], each row is divided by it; None for ones.
        columns: float32 [in], each column is multiplied by it; None for ones.
        importance: float32 [in], mean square of the smoothed inputs, by which a search for scales weights errors; None
            if all columns count the same.
    """

    rows: Floats | None = None
    columns: Floats | None = None
    importance: Floats | None = None

    @property
    def smooths(self) -> bool:
        """Whether it changes the weight itself, not only the search for its scales."""
        return self.rows is not None or self.columns is not None

    def apply(self, values: Floats, low: int) -> None:
        """Multiply columns and divide rows of a piece of the weight, in place.

        Args:
            values: float32 [n, in], rows of the weight.
            low: index of the first of these rows.
        """
        # Values that overflow are refused when they are quantized.
        with np.errstate(over="ignore", invalid="ignore"):
            if self.columns is not None:
                values *= self.columns
            if self.rows is not None:
                values /= self.rows[low : low + len(values), None]


@dataclass(frozen=True, eq=False)
class WeightTransforms:
    """What a calibration changes about a model.

    Attributes:
        weights: transform of each changed matrix, by module; routers and other unquantized matrices included.
        tensors: new bytes of norms and biases, by tensor name; dtype and shape stay.
        notes: lines for the user.
        title: what the model card says of the smoothing; empty without any.
    """

    weights: Mapping[str, WeightTransform] = field(default_factory=dict)
    tensors: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    title: str = ""

    @property
    def weighed(self) -> int:
        """Number of weights whose search for scales weights errors by the inputs."""
        return sum(transform.importance is not None for transform in self.weights.values())

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of all changes, hexadecimal."""
        digest = hashlib.sha256()
        for module, transform in sorted(self.weights.items()):
            vectors = {"rows": transform.rows, "columns": transform.columns, "importance": transform.importance}
            for name, vector in vectors.items():
                if vector is not None:
                    digest.update(f"{module}\0{name}\0{len(vector)}\0".encode())
                    digest.update(vector.tobytes())
        for tensor, data in sorted(self.tensors.items()):
            digest.update(f"{tensor}\0{len(data)}\0".encode())
            digest.update(data)
        return digest.hexdigest()


UNDECIDED = WeightTransforms(notes=("smoothing factors are chosen when the weights are read, not in a dry run",))
"""The transforms of a plan that comes before its calibration."""
