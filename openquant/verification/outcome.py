"""What a verification found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..weights.quant_error import LayerError


@dataclass(frozen=True)
class Report:
    """What verify() found.

    Attributes:
        directory: as it was asked for.
        source: the source as it was asked for; None without one.
        architecture: the model's class; None if the directory could not be opened.
        format: quant_method and what shares a scale: "fp8, one scale per 128x128 block".
        problems: what is off, one line each; empty if nothing is.
        notes: what is worth knowing, and what was not checked.
        shards: number of weight files.
        tensors: number of tensors in them.
        nbytes: size of those tensors.
        quantized: number of weights stored as codes.
        equal_tensors: number of tensors found equal to the source's, byte for byte.
        equal_files: number of other files found equal to the source's.
        errors: of each layer that was decoded, in the order of the checkpoint.
        compared_codes: number of codes in them, each of which was made again from the source.
        equal_codes: how many of these are the same.
        recomputed: whether quantizing the source again must give the same codes and scales.
        seconds: wall time.
    """

    directory: str
    source: str | None
    architecture: str | None
    format: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    shards: int = 0
    tensors: int = 0
    nbytes: int = 0
    quantized: int = 0
    equal_tensors: int = 0
    equal_files: int = 0
    errors: tuple[LayerError, ...] = ()
    compared_codes: int = 0
    equal_codes: int = 0
    recomputed: bool = False
    seconds: float = 0.0

    @property
    def worst(self) -> list[LayerError]:
        """The ten layers that are relatively farthest from the source, the worst first."""
        return sorted(self.errors, key=lambda error: -error.relative)[:10]

    @property
    def equal_share(self) -> float | None:
        """The share of codes that making them again gives; None if none was made."""
        return self.equal_codes / self.compared_codes if self.compared_codes else None

    def to_json(self) -> dict[str, Any]:
        """The fields by name, as `--json` prints them; "decoded" has the mean and the worst of `errors`."""
        found = asdict(self)
        for name in ("errors", "compared_codes", "equal_codes", "recomputed"):
            del found[name]
        relative = [error.relative for error in self.errors]
        found["decoded"] = {
            "layers": len(relative),
            "relative_mean": sum(relative) / len(relative) if relative else None,
            "equal_codes": self.equal_share,
            "worst": [asdict(error) for error in self.worst],
        }
        return found
