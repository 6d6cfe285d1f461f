"""The checks at the end of a run, and of a directory before a push. No tensor is read."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from ..errors import OutputError, SourceError, UsageError
from ..files.checkpoint import Checkpoint, open_checkpoint, readable
from ..files.model_files import INDEX_FILE, is_shard
from ..formats.quantization import quantization_places, read_quantization
from ..models import GENERIC
from ..plan.architecture import known_architecture
from ..plan.config import output_config
from ..plan.plan import Plan
from .checks import check_headers
from .configs import config_differences


def check_finished(root: Path, plan: Plan) -> None:
    """Reopen the output of a plan, and check headers, index and config. This is the last step of a run.

    Scales and codes were checked as each shard was finished (convert/checks.py).

    Args:
        root: the output directory.
        plan: the plan that was carried out.

    Raises:
        RuntimeError: the output is not what was planned, or engines would refuse it. That is a bug of openquant.
        SourceError: the output cannot be opened.
    """
    checkpoint = open_checkpoint(root)
    problems, planned_count = [], 0
    for shard in plan.layout.shards:
        for info in plan.layout.outputs(shard.name):
            planned_count += 1
            if checkpoint.tensors.get(info.name) != info or checkpoint.where[info.name].shard != shard.name:
                problems.append(f"{info.name} is not what was planned")
    if len(checkpoint.tensors) != planned_count:
        problems.append(f"it holds {len(checkpoint.tensors)} tensors, {planned_count} were planned")
    for difference in config_differences(checkpoint.config, output_config(plan)):
        problems.append(f"config.json: {difference.text('the plan has')}")
    if plan.quantization_config and not problems:
        # The generic entry says nothing of engines.
        model = None if plan.model.name == GENERIC.name else plan.model
        _, findings = check_headers(checkpoint, read_quantization(checkpoint.config), model, plan.files, ours=True)
        problems = findings.problems
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise RuntimeError(f"{root} was written wrongly: {'; '.join(problems[:3])}{more}")


def require_sound(root: Path, files: Set[str]) -> None:
    """Check a finished directory without its plan: headers, sizes, index and config.

    Args:
        root: the directory, quantized or not.
        files: paths, relative to the directory, of all files that the run wrote. The shards among them must be those
            that the directory has, by its index. In a quantized directory all of them must exist.

    Raises:
        OutputError: the directory is damaged, or cannot be read.
    """
    try:
        with readable():
            problems = _find_damage(open_checkpoint(root), files)
    except (SourceError, UsageError) as error:
        problems = [error.message]
    if problems:
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise OutputError(
            f"{root} is damaged: {problems[0]}{more}",
            "run the command that made it again with --overwrite, or copy it again from where it is whole",
        )


def _find_damage(checkpoint: Checkpoint, files: Set[str]) -> list[str]:
    """One line for each problem that shows without reading tensors."""
    if quantization_places(checkpoint.config):
        model = known_architecture(checkpoint)
        _, findings = check_headers(checkpoint, read_quantization(checkpoint.config), model, files, ours=True)
        problems = findings.problems
    else:
        problems = [
            f"{checkpoint.where[info.name].shard}: {info.name} is {info.dtype}, but config.json has no "
            "quantization_config"
            for info in checkpoint.tensors.values()
            if info.dtype.startswith("F8_")
        ]
    shards = {name for name in files if is_shard(name)}
    problems += [f"{name} holds tensors, and no run wrote it" for name in sorted(checkpoint.shards.keys() - shards)]
    problems += [
        f"{INDEX_FILE} does not name {name}" for name in sorted(shards - {*checkpoint.shards} | {*checkpoint.unindexed})
    ]
    return problems
