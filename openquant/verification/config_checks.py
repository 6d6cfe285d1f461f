"""Checks of config.json, the index and the list of files in a quantized directory."""

from __future__ import annotations

from collections.abc import Iterable

from ..files.checkpoint import Checkpoint, read_json
from ..files.names import INDEX_FILE
from ..formats.kv_cache import DENSE, with_fp8_cache, without_fp8_cache
from ..formats.quantization import Quantization, quantization_places
from ..formats.schemes import MIXED, Scheme, as_written, without_targets
from ..formats.settings import check_config_values
from .configs import config_differences
from .headers import Findings


def check_settings(checkpoint: Checkpoint, quantization: Quantization, findings: Findings) -> Scheme | None:
    """Check the quantization_config: in our directories it is what this program writes, in others' what engines read.

    Args:
        checkpoint: the opened directory.
        quantization: what its config says.
        findings: gets what is off.

    Returns:
        The scheme of ours that the directory is stored in, the nearest where it is not quite; None for other ways.
    """
    scheme = quantization.scheme
    places = quantization_places(checkpoint.config)
    if any(place[key] != places[0][0][places[0][1]] for place, key in places[1:]):
        findings.problems.append("config.json holds several quantization configs, which are not the same")
    settings = quantization.settings
    if scheme is not None and as_written(scheme, settings):
        return scheme
    if scheme is None and {**settings, "ignore": []} == with_fp8_cache(DENSE):
        return scheme
    if not findings.ours:
        # Other tools write one list of unquantized modules, or other settings.
        problems, unknown = check_config_values(settings)
        findings.problems += [f"config.json: quantization_config.{problem}" for problem in problems]
        if unknown:
            findings.notes.append(f"config.json: nothing is known to read quantization_config.{', '.join(unknown)}")
        return None
    if scheme is None:
        findings.problems.append("config.json: its quantization_config is none that this program writes")
    else:
        found = without_fp8_cache(without_targets(settings))
        groups = found.get("config_groups") if scheme.group else None
        # Of the groups that it may have, those that are most like them.
        kinds = [
            min((scheme, *MIXED), key=lambda kind: len(list(config_differences(group, kind.group))))
            for group in (groups.values() if isinstance(groups, dict) else ())
        ]
        written = without_targets(scheme.config(None, dict.fromkeys(kinds, ())))
        for difference in config_differences(found, written, ("quantization_config",)):
            findings.problems.append(f"config.json: {difference.text('this program writes')}")
    return scheme


def check_index(checkpoint: Checkpoint, findings: Findings) -> None:
    """Check the total size that the index tells.

    Args:
        checkpoint: the opened directory.
        findings: gets what is off.
    """
    if not checkpoint.indexed:
        return
    index = read_json(checkpoint.root / INDEX_FILE, INDEX_FILE)
    metadata = index.get("metadata")
    told = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    if told is not None and told != total:
        findings.differs(f"{INDEX_FILE}: total_size is {told}, the tensors take {total} bytes")


def check_files(checkpoint: Checkpoint, files: Iterable[str], findings: Findings) -> None:
    """Check that the files are there which the run that made the directory wrote down.

    Args:
        checkpoint: the opened directory.
        files: their names; empty if that is not known.
        findings: gets what is missing.
    """
    for name in sorted(files):
        if not (checkpoint.root / name).is_file():
            findings.problems.append(f"{name} is missing: the run that made this directory wrote it")
