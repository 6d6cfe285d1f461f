"""Checks config.json, the index and the list of files of a quantized directory."""

from __future__ import annotations

from collections.abc import Iterable

from ..files.checkpoint import Checkpoint, read_json
from ..files.model_files import INDEX_FILE
from ..formats.kv_cache import DENSE, with_fp8_cache, without_fp8_cache
from ..formats.quantization import Quantization, quantization_places
from ..formats.schemes import KEPT_SCHEMES, Scheme, as_written, without_targets
from ..formats.settings import check_config_values
from .configs import config_differences
from .headers import Findings


def check_settings(checkpoint: Checkpoint, quantization: Quantization, findings: Findings) -> Scheme | None:
    """Check the quantization_config.

    In an output of openquant it must be what openquant writes. In others, all settings must be ones that engines read.

    Args:
        checkpoint: the opened directory.
        quantization: its quantization_config.
        findings: says whether openquant made the directory; problems and notes, one line each, are added to it.

    Returns:
        The openquant scheme that the directory is stored in. If the settings are not what openquant writes for it: the
        nearest scheme for an output of openquant, None for others. None if there is none.
    """
    scheme = quantization.scheme
    places = quantization_places(checkpoint.config)
    if any(place[key] != places[0][0][places[0][1]] for place, key in places[1:]):
        findings.problems.append("config.json has several quantization configs, which differ")
    settings = quantization.settings
    if scheme is not None and as_written(scheme, settings):
        return scheme
    if scheme is None and {**settings, "ignore": []} == with_fp8_cache(DENSE):
        return scheme
    if not findings.ours:
        problems, unknown = check_config_values(settings)
        findings.problems += [f"config.json: quantization_config.{problem}" for problem in problems]
        if unknown:
            findings.notes.append(f"config.json: no engine is known to read quantization_config.{', '.join(unknown)}")
        return None
    if scheme is None:
        findings.problems.append("config.json: openquant does not write such a quantization_config")
    else:
        actual = without_fp8_cache(without_targets(settings))
        groups = actual.get("config_groups") if scheme.group else None
        # Each config group is compared with that of the scheme it is most like.
        nearest = [
            min((scheme, *KEPT_SCHEMES), key=lambda candidate: len(list(config_differences(group, candidate.group))))
            for group in (groups.values() if isinstance(groups, dict) else ())
        ]
        expected = without_targets(scheme.config(None, dict.fromkeys(nearest, ())))
        for difference in config_differences(actual, expected, ("quantization_config",)):
            findings.problems.append(f"config.json: {difference.text('openquant writes')}")
    return scheme


def check_index(checkpoint: Checkpoint, findings: Findings) -> None:
    """Check that the total_size in model.safetensors.index.json is the size of all tensors in bytes.

    Args:
        checkpoint: the opened directory.
        findings: a difference is added to its problems if openquant made the directory, else to its notes.

    Raises:
        SourceError: the index cannot be read.
    """
    if not checkpoint.indexed:
        return
    index = read_json(checkpoint.root / INDEX_FILE, INDEX_FILE)
    metadata = index.get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    if stated is not None and stated != total:
        findings.add_difference(f"{INDEX_FILE}: total_size is {stated}, the tensors take {total} bytes")


def check_files(checkpoint: Checkpoint, files: Iterable[str], findings: Findings) -> None:
    """Check that all files that the run wrote are there.

    Args:
        checkpoint: the opened directory.
        files: paths of the files, relative to the directory; empty if not known.
        findings: a line for each missing file is added to its problems.
    """
    for name in sorted(files):
        if not (checkpoint.root / name).is_file():
            findings.problems.append(f"{name} is missing: the run that made this directory wrote it")
