"""What a run did, as callers and `--json` get it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .plan.serving import ServingFigures


@dataclass(frozen=True)
class Result:
    """What a run did, or a dry run would do.

    Attributes:
        model: as it was asked for.
        revision: the source's commit on the Hub, or None.
        output: the output directory.
        scheme: the name of the scheme, such as "tensor"; "bf16" for a run that dequantizes.
        schemes: number of weights stored in each scheme: that one, and others that some layers have instead.
        kv_cache: "fp8" where the output has scales for keys and values in FP8, "auto" where it has none.
        folded: where inputs of layers are divided in the norms and projections before them, "SmoothQuant 0.5: inputs
            divided by powers of two in 16 norms and projections"; None where they are not.
        architecture: the registry's entry that the plan was made by.
        dry_run: whether nothing was written.
        source_bytes: size of the source's tensors.
        output_bytes: size of the output's tensors.
        download_bytes: size of the shards and other files that are fetched from the Hub.
        repository: the Hub repository that the output was published in; None if it was not.
        pushed_to: address of the commit or pull request that published the output; None if it was not.
        pushed_revision: the revision that holds it while a pull request is open, such as "refs/pr/1"; None for main.
        quantized_tensors: number of weights that are stored as codes.
        decoded_tensors: number of weights that are quantized in the source and stored unquantized.
        ignored_layers: what quantization_config lists as left out.
        shards: number of output shards.
        tensor_parallel: the tensor-parallel sizes, of 1 to 16 and the one asked for, that can serve the result.
        serving: what it takes to serve the source and the output, and what that assumes (docs/serving.md); None for a
            run that dequantizes.
        seconds: wall time.
        peak_rss_bytes: largest resident memory of the process so far.
        resumed: whether an earlier run's work was continued, or already complete.
        not_finite: what tensors hold that stay unquantized and are not finite, by name, as the source has them:
            {"model.norm.weight": "NaN (3 values)"}. Of an output that was complete already nothing was read.
        unread_shards: number of shards not looked at for that, as an earlier run has moved them to the Hub.
    """

    model: str
    revision: str | None
    output: str
    scheme: str
    schemes: dict[str, int]
    kv_cache: str
    folded: str | None
    architecture: str
    dry_run: bool
    source_bytes: int
    output_bytes: int
    download_bytes: int
    repository: str | None
    pushed_to: str | None
    pushed_revision: str | None
    quantized_tensors: int
    decoded_tensors: int
    ignored_layers: list[str]
    shards: int
    tensor_parallel: list[int]
    serving: ServingFigures | None
    seconds: float
    peak_rss_bytes: int
    resumed: bool
    not_finite: dict[str, str] = field(default_factory=dict)
    unread_shards: int = 0

    def to_json(self) -> dict[str, Any]:
        """The fields by name, as `--json` prints them."""
        return asdict(self)
