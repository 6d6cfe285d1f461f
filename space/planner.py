"""The planner in a web page: a plan and the table of schemes of a repository, from headers that JavaScript fetched.

worker.js runs it in Pyodide, which has neither torch, safetensors, huggingface_hub nor numpy. A plan reads no weights
and computes no codes, so nothing of them is called. Modules that the planner imports name numpy's types, for which
without_numpy.py stands.

    open_repository({"repo": "org/name", "commit": "89ab..", "files": {..}, "heads": {..}}, Path("/model"), read)
    planned({"gpu": "4090", "context": "8k", "scheme": "", "options": {}})
"""

from __future__ import annotations

import gc
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openquant.errors import OpenQuantError, PlanError, UsageError
from openquant.fields import flags_of, options_of
from openquant.files.checkpoint import (
    Checkpoint,
    RemoteFile,
    open_checkpoint,
    refuse_without_weights,
)
from openquant.files.model_files import SINGLE_FILE
from openquant.fit.budget import read_budget, refuse_options, weights_on_gpus
from openquant.fit.table import table_of
from openquant.formats.hardware import GPUS, SCHEME_NAMES
from openquant.options import CalibrationTexts, CompareSchemes, Recipe
from openquant.plan import summary
from openquant.plan.plan import Plan, make_plan
from openquant.plan.serving import serving_to_json
from openquant.recipes import check_recipe
from openquant.version import __version__
from openquant.web.view import fit_html, plan_html, problem_html, style

# Options of `compress` that the page offers: those that read no file.
OFFERED = (
    "gptq",
    "awq",
    "quantize_lm_head",
    "quantize_embeddings",
    "group_size",
    "asymmetric",
    "no_search",
    "ignore",
    "tp",
)
# Those of them that run texts through the model, for which a job needs torch.
_CALIBRATED = ("gptq", "awq")
# Processor seconds for a gigabyte of the source (benchmarks/README.md): --scheme tensor or block; nvfp4 and mxfp4; int2
# to int7. With --gptq 1.2 GB took 429 processor seconds; AWQ takes as long.
_FLOATS, _FP4, _INTEGERS, _PASSES = 0.8, 6.2, 10.0, 360.0
# What the page offers in place of a scheme: `--fit` with the GPU that is named.
MIXTURE = "mixture"
_OF_MIXTURE = "<p>Which layer gets which scheme is measured when the job runs. This is the plan of {scheme} alone.</p>"
# Those of them that the table of schemes has too.
_OF_TABLE = ("quantize_lm_head", "quantize_embeddings", "ignore")

# A machine of 2 CPUs converts 3.4 GB to int4 in 34 processor seconds, three times as long if it is busy
# (benchmarks/README.md): 70 MB of source a second. The Hub's speed is assumed.
CONVERTED, DOWNLOADED, UPLOADED = 70e6, 50e6, 25e6
# Seconds until a machine has started and uv has installed openquant. The second alone took 9.
STARTED = 60
# Source shards that are on disk at a time while the next ones arrive (hub/source.py), and outputs (hub/publish.py).
SHARDS_IN, SHARDS_OUT = 5, 3
# Bytes of disk for the packages, which are 290 MB, or 1.6 GB with torch for CPUs; uv keeps archives beside them.
PACKAGES, PACKAGES_WITH_TORCH = 1e9, 4e9
# Seconds that installing torch takes longer.
TORCH = 60
# CPUs of the cheapest machine.
CPUS = 2


@dataclass
class _Shard:
    """A shard on the Hub, whose header is here.

    Attributes:
        name: the file name.
        size: size in bytes.
        digest: SHA-256 or git object id, hexadecimal.
        head: its first bytes: the whole header.
        more: reads bytes after them: called with name, offset and length.
    """

    name: str
    size: int
    digest: str
    head: bytes
    more: Callable[[str, int, int], bytes]

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on."""
        end = offset + length
        return self.head[offset:end] if end <= len(self.head) else self.more(self.name, offset, length)


@dataclass(frozen=True)
class _Opened:
    repo: str
    commit: str
    checkpoint: Checkpoint


_opened: list[_Opened] = []


def choices() -> str:
    """Return what the page offers, as JSON: GPUs, schemes, options with their help, the version and a style sheet."""
    options = options_of(Recipe)
    offered = [
        {
            "name": name,
            "flag": flags_of(name, options[name])[0],
            "help": options[name].help,
            "value": options[name].value,
            "choices": options[name].choices,
            "repeated": options[name].repeated,
        }
        for name in OFFERED
    ]
    schemes = [{"name": name, "about": named.stored} for name, named in SCHEME_NAMES.items()]
    return json.dumps(
        {
            "gpus": [gpu.name for gpu in GPUS],
            "schemes": schemes,
            "options": offered,
            "version": __version__,
            "style": style(),
        }
    )


def needed_shards(names: list[str], index: bytes | None) -> str:
    """Return the names of the shards to fetch headers of, as JSON; [] if the index is not one.

    Args:
        names: paths of all files of the repository.
        index: content of its index; None if it has none.

    Raises:
        SourceError: the repository has no safetensors weights.
    """
    if index is None:
        if SINGLE_FILE not in names and "config.json" in names:
            refuse_without_weights("the repository", [name for name in names if "/" not in name])
        return json.dumps([SINGLE_FILE] if SINGLE_FILE in names else [])
    try:
        shards = sorted(set(json.loads(bytes(index))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "[]"
    return json.dumps([shard for shard in shards if shard in names])


def open_repository(
    found: Mapping[str, Any], root: Path, heads: Mapping[str, bytes], more: Callable[[str, int, int], bytes]
) -> None:
    """Open a repository, which `planned` then plans.

    Args:
        found: "repo" (org/name), "commit", and "files": size in bytes and digest of each file by its path.
        root: a directory with config.json, the index and the configs of other tools.
        heads: first bytes of each shard, with the whole header, by file name.
        more: returns bytes of a shard: called with name, offset and length.

    Raises:
        SourceError: something is missing, damaged or contradictory.
    """
    files = found["files"]
    remote: dict[str, RemoteFile] = {}
    for name, head in heads.items():
        size, digest = files[name]
        remote[name] = _Shard(name, size, digest, head, more)
    absent = {name: size for name, (size, _) in files.items() if name not in remote and not (root / name).exists()}
    _opened[:] = []
    _opened.append(_Opened(found["repo"], found["commit"], open_checkpoint(root, remote, absent)))


def planned(asked: Mapping[str, Any]) -> str:
    """Make the plan and the table of schemes of the opened repository.

    Args:
        asked: "gpu" ("" for common sizes), "context" ("8k"), "scheme" ("" for the best of the table, MIXTURE for
            --fit), "options" (values of OFFERED by name), "target" (the repository to push to; "" for the model's name
            with the scheme's suffix).

    Returns:
        JSON: the table and the plan as HTML, and what a conversion needs: the words of the command, the target,
        whether it runs the model, and forecasts of seconds and of bytes on disk. `plan` has figures as `compress
        --json` prints them. The plan of a mixture is that of the best scheme: which layers get which is not known yet.

    Raises:
        OpenQuantError: the model does not suit the request.
    """
    opened = _opened[0]
    options = {name: value for name, value in asked["options"].items() if name in OFFERED and value not in ("", False)}
    if "ignore" in options:
        options["ignore"] = tuple(word for word in options["ignore"].split() if word)
    identity = f"{opened.repo}@{opened.commit}"
    gc.disable()
    try:
        compared = {name: options[name] for name in _OF_TABLE if name in options}
        compared |= {"gpu": asked["gpu"] or None, "context": asked["context"] or "8k"}
        request = CompareSchemes(model=opened.repo, **compared)
        table = table_of(request, opened.checkpoint, identity, opened.commit)
        mixture = asked["scheme"] == MIXTURE
        if mixture:
            _check_mixture(asked["gpu"], options)
        scheme = table.uncalibrated or "int4" if mixture else asked["scheme"] or table.uncalibrated or "int4"
        recipe = Recipe(scheme=scheme, **options)
        chosen, options_of_plan = check_recipe(recipe, CalibrationTexts())
        if chosen is None:
            raise UsageError(f"--scheme {scheme} is for the command line", "choose another scheme")
        plan = make_plan(opened.checkpoint, chosen, options_of_plan, identity)
        if mixture:
            _check_room(asked["gpu"], request.context, plan)
        return json.dumps(
            {
                "table": fit_html(table, scheme),
                "html": (_OF_MIXTURE.format(scheme=scheme) if mixture else "") + plan_html(plan, identity),
                "scheme": scheme,
                "plan": _figures(plan, opened),
                **_conversion(plan, opened, asked, scheme, options),
            }
        )
    finally:
        gc.enable()
        gc.collect()


def _figures(plan: Plan, opened: _Opened) -> dict[str, Any]:
    served = summary.serving(plan)
    return {
        "model": opened.repo,
        "revision": opened.commit,
        "architecture": plan.model.name,
        "scheme": summary.scheme_name(plan),
        "schemes": summary.scheme_names(plan),
        "source_bytes": summary.source_bytes(plan),
        "output_bytes": summary.output_bytes(plan),
        "quantized_tensors": summary.quantized_tensors(plan),
        "decoded_tensors": summary.decoded_tensors(plan),
        "shards": len(plan.layout.shards),
        "tensor_parallel": summary.parallel_sizes(plan),
        "serving": serving_to_json(*served) if served else None,
        "digest": plan.digest,
    }


def _check_mixture(gpu: str, options: Mapping[str, Any]) -> None:
    if not gpu:
        raise UsageError("a mixture needs a GPU to fit", "name one such as 4090 or 2x24GB, or choose a scheme")
    refuse_options(Recipe(**options))


def _check_room(gpu: str, context: int, plan: Plan) -> None:
    """Refuse what a job would refuse only when it runs."""
    limit = weights_on_gpus(read_budget(gpu), plan, context, fp8_cache=False)
    before = summary.source_bytes(plan)
    if limit >= before:
        raise PlanError(
            f"{gpu} leaves {limit / 1e9:.3g} GB for weights, and the unquantized ones take {before / 1e9:.3g} GB",
            "serve the model as it is, name a smaller GPU, or choose a scheme",
        )


def _conversion(
    plan: Plan, opened: _Opened, asked: Mapping[str, Any], scheme: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    mixture = asked["scheme"] == MIXTURE
    chosen = [f"--fit={asked['gpu']}", f"--context={asked['context'] or '8k'}"] if mixture else ["--scheme", scheme]
    suffix = "-MIXED" if mixture else summary.suffix(plan)
    target = asked["target"] or opened.repo.rpartition("/")[2] + suffix
    words = ["compress", "-m", opened.repo, "--revision", opened.commit, *chosen]
    known = options_of(Recipe)
    for name, value in options.items():
        flag = flags_of(name, known[name])[0]
        for one in value if known[name].repeated else [value]:
            # Joined, a value cannot be taken for an option.
            words.append(flag if known[name].value is None else f"{flag}={one}")
    words += ["--stream", "--push-only", f"--push-to-hub={target}"]
    before, after = summary.source_bytes(plan), summary.output_bytes(plan)
    largest = sorted(plan.source.shards.values(), reverse=True)[:SHARDS_IN]
    outputs = sorted((shard.nbytes for shard in plan.layout.shards), reverse=True)[:SHARDS_OUT]
    seconds = STARTED + max(before / CONVERTED, before / DOWNLOADED, after / UPLOADED)
    disk = sum(largest) + sum(outputs)
    runs_model = mixture or any(name in options for name in _CALIBRATED)
    if runs_model:
        seconds += TORCH + _processor_seconds(before, "" if mixture else scheme) / CPUS
        # Rounded layers wait on the disk until they are in the output.
        disk += after if "gptq" in options else 0
    return {
        "words": words,
        "command": shlex.join(["openquant", *words]),
        "target": target,
        "runs_model": runs_model,
        "seconds": round(seconds),
        "disk": round(disk + (PACKAGES_WITH_TORCH if runs_model else PACKAGES)),
    }


def problem(error: BaseException) -> str:
    """Return an error as HTML; that of a bug of ours says no more than its kind."""
    if not isinstance(error, OpenQuantError):
        error = UsageError(
            f"the planner failed with {type(error).__name__}", "try openquant compress --dry-run, and report it"
        )
    return problem_html(error)


def _processor_seconds(source_bytes: int, scheme: str) -> float:
    """Estimate the processor time of a conversion that runs the model; scheme: "" for a mixture."""
    cost = _FLOATS
    if "fp4" in scheme:
        cost = _FP4
    elif not scheme or (scheme.startswith("int") and scheme[3] != "8"):
        cost = _INTEGERS
    return (cost + _PASSES) * source_bytes / 1e9
