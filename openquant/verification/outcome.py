"""The result of a verification."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..weights.quant_error import LayerError

_CONVERT_AGAIN = "download it again, or convert it again with --overwrite"
# By words of the problems that they are for.
_LOOK_AT_SOURCE = (
    "look at the source, which openquant compress --dry-run and diagnose check: if it is broken too, mend or download "
    "it first, and convert it again with --overwrite"
)
_WRITE_ANEW = "openquant compress -m DIR --scheme keep -o NEW writes the ignore list anew and keeps all codes"
_REMOVE = "remove the file that does not belong to the model"
_HINTS = {
    "as the source has it": _LOOK_AT_SOURCE,
    " in the source's ": _LOOK_AT_SOURCE,
    "the shards lack ": _LOOK_AT_SOURCE,
    "does not fit the tensors": _LOOK_AT_SOURCE,
    " does not list ": _WRITE_ANEW,
    " lists ": _WRITE_ANEW,
    " is there too: ": _REMOVE,
    " lies beside ": _REMOVE,
    " that model.safetensors.index.json does not name": _REMOVE,
    " is there: transformers ": _REMOVE,
}


@dataclass(frozen=True)
class Report:
    """The result of `verify`.

    Attributes:
        directory: the directory, as the caller gave it.
        source: the source, as the caller gave it; None without one.
        architecture: the model's class; None if the directory could not be opened.
        format: quant_method and what shares a scale: "fp8, one scale per 128x128 block".
        problems: one line for each problem; empty if nothing is wrong.
        notes: one line for each thing that is worth knowing or was not checked.
        shards: number of weight files.
        tensors: number of tensors in them.
        nbytes: size of those tensors in bytes.
        quantized: number of quantized weights.
        equal_tensors: number of tensors that equal the source's, byte for byte.
        equal_files: number of other files that equal the source's.
        errors: quantization error of each layer that was compared with the source, in the order of the checkpoint.
        compared_codes: number of codes that were recomputed from the source.
        equal_codes: number of these that equal the stored codes.
        recomputed: whether quantizing the source again must give the same codes and scales.
        seconds: wall time in seconds.
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
    def hints(self) -> list[str]:
        """What to do about the problems: one sentence for each kind that there is."""
        hints = {
            next((hint for words, hint in _HINTS.items() if words in problem), _CONVERT_AGAIN): None
            for problem in self.problems
        }
        return list(hints)

    @property
    def worst(self) -> list[LayerError]:
        """The ten layers with the largest relative error, the worst first."""
        return sorted(self.errors, key=lambda error: -error.relative)[:10]

    @property
    def equal_share(self) -> float | None:
        """The share of recomputed codes that equal the stored ones, 0 to 1; None if none was recomputed."""
        if not self.compared_codes:
            return None
        return self.equal_codes / self.compared_codes

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name, as `--json` prints them; "decoded" has the mean and the worst of `errors`."""
        fields = asdict(self)
        for name in ("errors", "compared_codes", "equal_codes", "recomputed"):
            del fields[name]
        relative = [error.relative for error in self.errors]
        mean = None
        if relative:
            mean = sum(relative) / len(relative)
        fields["decoded"] = {
            "layers": len(relative),
            "relative_mean": mean,
            "equal_codes": self.equal_share,
            "worst": [asdict(error) for error in self.worst],
        }
        return fields
