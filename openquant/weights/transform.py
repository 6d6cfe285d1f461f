"""Tuning: what a calibration changes about a weight before it is rounded.

A layer's inputs can be divided by factors where they are made, in a norm or in the rows of a projection, and its
columns multiplied by as much: the model computes the same, and rounding may lose less (calibration/mappings.py says
where).
Factors are powers of two, so that norms, biases and routers in bfloat16 change exactly, and that what they are can be
told from the source and the output.

    Tuning(columns=np.array([4, 1, 0.5], np.float32)).apply(values, 0)    # float32 [n, 3], columns multiplied
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
        importance: float32 [in], the mean square of what goes into each column once inputs are divided, by which a
            search for scales weighs errors; None where all count alike.
    """

    rows: Floats | None = None
    columns: Floats | None = None
    importance: Floats | None = None

    @property
    def folds(self) -> bool:
        """Whether the weight is another one with it, not only searched for differently."""
        return self.rows is not None or self.columns is not None

    def apply(self, values: Floats, low: int) -> None:
        """Change float32 rows [n, in] of the weight in place, the first of which is row `low`."""
        # What is too large then is refused where it is rounded.
        with np.errstate(over="ignore", invalid="ignore"):
            if self.columns is not None:
                values *= self.columns
            if self.rows is not None:
                values /= self.rows[low : low + len(values), None]


@dataclass(frozen=True, eq=False)
class WeightTransforms:
    """What a calibration changes about a model.

    Attributes:
        weights: by module, of matrices that stay unquantized too, such as routers.
        tensors: what norms and biases hold, by name, in the dtype and shape that they have.
        notes: for the user.
        title: what the card says of folds; empty where there are none.
    """

    weights: Mapping[str, WeightTransform] = field(default_factory=dict)
    tensors: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    title: str = ""

    @property
    def weighed(self) -> int:
        """Of how many weights the search for scales knows what goes into each column."""
        return sum(transform.importance is not None for transform in self.weights.values())

    @cached_property
    def sha256(self) -> str:
        """Of all that it changes, hexadecimal."""
        digest = hashlib.sha256()
        for module, transform in sorted(self.weights.items()):
            for name, part in zip(("rows", "columns", "importance"), _parts(transform), strict=True):
                if part is not None:
                    digest.update(f"{module}\0{name}\0{len(part)}\0".encode())
                    digest.update(part.tobytes())
        for tensor, data in sorted(self.tensors.items()):
            digest.update(f"{tensor}\0{len(data)}\0".encode())
            digest.update(data)
        return digest.hexdigest()


UNDECIDED = WeightTransforms(
    notes=("which inputs are divided, and by how much, is decided once the weights are read: not in a dry run",)
)
"""Of a plan that comes before a calibration."""


def _parts(transform: WeightTransform) -> tuple[Floats | None, ...]:
    return transform.rows, transform.columns, transform.importance
