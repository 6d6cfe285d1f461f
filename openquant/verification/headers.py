"""Headers, the quantized weights and scales that a directory's headers show, and Findings, what checks report of them.

The checks are functions of both (checks.py has them in order). No tensor is read. A problem is what engines would load
wrongly. A note is what engines accept but openquant would write differently.

Here are also the checks of modules, by the ignore list: the output head, and fused layers.
Report is the result of a verification.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..files.checkpoint import Checkpoint
from ..files.shardfile import TensorInfo
from ..formats.format import INPUT_SCALE
from ..formats.quantization import IN_COLUMNS, Quantization
from ..formats.schemes import Scheme
from ..patterns import group_pairs
from ..registry.architecture import NOT_LINEAR, ROUTER, ModuleRules, is_table
from ..weights.quant_error import LayerError
from ..weights.weight import Weight

# Last parts of the names of tensors that AWQ and GPTQ store beside the codes.
COLUMN_PARTS = ("qzeros", "scales", "g_idx")


@dataclass
class Findings:
    """What the checks found, in their order.

    Attributes:
        ours: whether openquant made the directory, so that everything must be as openquant writes it.
        problems: one line for each problem.
        notes: one line for each thing that is worth knowing or was not checked.
        unlisted: names that are missing in the ignore list. Each is also a problem.
    """

    ours: bool
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unlisted: set[str] = field(default_factory=set)

    def add_difference(self, message: str) -> None:
        """Add something that openquant never writes, but other tools may: a problem if `ours`, else a note."""
        if self.ours:
            self.problems.append(message)
        else:
            self.notes.append(message)


@dataclass(frozen=True)
class Headers:
    """The headers of a quantized directory.

    Attributes:
        checkpoint: the opened directory.
        quantization: its quantization_config.
        scheme: the openquant scheme that the directory is stored in, or the nearest one; None if there is none.
        entry: the module rules of its architecture, which quantize the output head and the embedding if the directory
            does; None if the registry has no entry.
        head: whether the output head is quantized.
        embedding: whether the input embedding is quantized.
        codes: the quantized weights, by the name of the unquantized tensor.
        stored: the same weights, by the name of the tensor that holds the codes.
        scales: names of all tensors that belong to codes: scales, zero points, shapes.
    """

    checkpoint: Checkpoint
    quantization: Quantization
    scheme: Scheme | None
    entry: ModuleRules | None
    head: bool
    embedding: bool
    codes: dict[str, Weight]
    stored: dict[str, Weight]
    scales: set[str]

    def place(self, name: str) -> str:
        """See `Checkpoint.place`."""
        return self.checkpoint.place(name)

    def owner(self, name: str) -> str | None:
        """The name of the weight whose scale, zero points or shape a tensor is, judged by its name; None if it is none.

        The weight need not exist.
        """
        module, _, last = name.rpartition(".")
        # A parameter called "scales" may be something else.
        in_columns = self.quantization.method in IN_COLUMNS and last in COLUMN_PARTS
        if last in (INPUT_SCALE, "input_global_scale") or (in_columns and (last != "scales" or name in self.scales)):
            return f"{module}.weight"
        for suffix in ("_scale_inv", "_global_scale", "_scale", "_shape", "_zero_point"):
            owner = name.removesuffix(suffix)
            # The name of stacked experts has no ".weight", so it counts only if it has codes.
            if owner != name and (owner.endswith(".weight") or owner in self.codes):
                return owner
        return None

    def belongs_to_codes(self, name: str) -> bool:
        """Whether a tensor is the scale, zero points or shape of a quantized weight, or is called so."""
        return name in self.scales or self.owner(name) is not None

    def as_unquantized(self, info: TensorInfo) -> TensorInfo:
        """The tensor that codes stand for; any other tensor itself."""
        if info.name in self.stored:
            return self.stored[info.name].source
        return info

    def layers(self, entry: ModuleRules) -> dict[str, Weight]:
        """The matrices of the directory that the module rules allow to quantize, by module."""
        tensors = map(self.as_unquantized, self.checkpoint.tensors.values())
        return {
            info.module: Weight(
                info.module, entry.rule(info.module).name_template, info, (info.shape[0], info.shape[1])
            )
            for info in tensors
            if len(info.shape) == 2 and info.name.endswith(".weight") and entry.rule(info.module).compress
        }


def describe(info: TensorInfo) -> str:
    """Format a tensor's dtype and shape for a message: "F32 [1]".

    Args:
        info: name, dtype and shape of the tensor.
    """
    return f"{info.dtype} {list(info.shape)}"


def check_listed(headers: Headers, findings: Findings) -> None:
    """Check that no quantized module is in the ignore list.

    Args:
        headers: the quantized directory, as its config and the headers of its shards describe it.
        findings: problems, one line each, are added to it.
    """
    ignored = headers.quantization.ignored
    for weight in headers.codes.values():
        module = weight.module
        names: list[str] = [module]
        if headers.entry is not None:
            spellings = dict.fromkeys([module, headers.entry.vllm_name(module)])
            names = [name for spelling in spellings for name in headers.entry.model.names_of(spelling)]
        listed = ignored.find(names)
        if listed is not None:
            codes = weight.codes
            findings.problems.append(f"{headers.place(codes.name)} is {codes.dtype}, but {ignored.key} lists {listed}")


def check_unlisted(headers: Headers, entry: ModuleRules, findings: Findings) -> None:
    """Check that the ignore list has every unquantized layer, and that no layer is quantized which engines cannot load.

    Args:
        headers: the quantized directory, as its config and the headers of its shards describe it.
        entry: the registry's rules for the modules of its architecture.
        findings: problems and notes, one line each, are added to it, and missing names to its `unlisted`.
    """
    ignored = headers.quantization.ignored

    if headers.quantization.method in IN_COLUMNS and not ignored.entries:
        return  # vLLM then ignores the layers that have no codes (layers/quantization/auto_awq.py:370-389).

    for info in headers.checkpoint.tensors.values():
        weight = headers.stored.get(info.name)
        rule = entry.rule((weight or info).module)

        if weight is not None:
            # Layers that the registry keeps may have been quantized in the source.
            message = f"{headers.place(info.name)} is {info.dtype}, but it is kept: {rule.keep}"
            if rule.keep in NOT_LINEAR:
                findings.problems.append(message)
            elif rule.keep == ROUTER:
                # Some engines load some routers quantized.
                findings.add_difference(message)
            continue

        matrix = len(info.shape) == 2 and info.name.endswith(".weight")
        linear = rule.compress or (rule.keep is not None and rule.keep not in NOT_LINEAR)
        if not (rule.stack or (matrix and linear)) or headers.quantization.format_of(info.module) is None:
            continue

        engine_name = entry.vllm_name(info.module)
        if ignored.find(entry.model.names_of(engine_name)) is not None:
            continue

        # Whether engines build the others quantized differs from engine to engine.
        if rule.keep is None or findings.ours:
            findings.unlisted.add(engine_name)
            findings.problems.append(
                f"{headers.place(info.name)} is {info.dtype}, but {ignored.key} does not list {engine_name}"
            )


def check_head(headers: Headers, findings: Findings) -> None:
    """Check that a config group names a quantized output head or embedding, because vLLM counts neither as a Linear.

    Args:
        headers: the quantized directory, as its config and the headers of its shards describe it.
        findings: problems, one line each, are added to it.
    """
    if not headers.head and not headers.embedding:
        return
    for name, weight in headers.stored.items():
        if is_table(weight.module) and not headers.quantization.names(weight.module):
            findings.problems.append(
                f"{headers.place(name)} is {weight.codes.dtype}, but no config group names it: "
                "engines find it by name only"
            )


def check_fused(headers: Headers, entry: ModuleRules, findings: Findings) -> None:
    """Check that fused layers have the same format, and all experts of a layer too.

    Args:
        headers: the quantized directory, as its config and the headers of its shards describe it.
        entry: the registry's rules for the modules of its architecture, which name the fused layers.
        findings: problems, one line each, are added to it.
    """
    layers = headers.layers(entry)

    groups = group_pairs((experts, module) for module in layers if (experts := entry.experts(module)) is not None)
    for members in set(entry.fused_groups(layers).values()):
        # The group of all experts of a layer includes them.
        if entry.experts(members[0]) is None:
            groups[members[0]] = list(members)

    for name in sorted(groups):
        # Reversed, so that the first module of each kind stays in the dicts.
        module_by_quantized = {f"{module}.weight" in headers.codes: module for module in reversed(groups[name])}
        codes_by_format = {
            weight.format: weight.codes.name
            for module in reversed(groups[name])
            if (weight := headers.codes.get(f"{module}.weight")) and weight.format
        }

        if len(module_by_quantized) == 2:
            unquantized = f"{module_by_quantized[False]}.weight"
            codes = headers.codes[f"{module_by_quantized[True]}.weight"].codes
            findings.problems.append(
                f"{headers.place(codes.name)} is {codes.dtype} and {unquantized} is "
                f"{headers.checkpoint.tensors[unquantized].dtype}, but engines need both in one format"
            )
        elif len(codes_by_format) > 1:
            (fmt, name_1), (other_fmt, name_2), *_ = list(codes_by_format.items())[::-1]
            numbers_differ = fmt.number != other_fmt.number
            label_1, label_2 = (
                f"{kind.label} of {kind.number.title}" if numbers_differ else kind.label for kind in (fmt, other_fmt)
            )
            findings.problems.append(
                f"{headers.place(name_1)} has {label_1} and {name_2} {label_2}, but engines need both in one format"
            )


_CONVERT_AGAIN = "download it again, or convert it again with --overwrite if the source is whole"
# By words of the problems that they are for.
_WRITE_ANEW = "openquant compress -m DIR --scheme keep -o NEW writes the ignore list anew and keeps all codes"
_HINTS = {
    " does not list ": _WRITE_ANEW,
    " lists ": _WRITE_ANEW,
    ", as the source has it": "the source has it too: download or save that again, and convert it with --overwrite",
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
        description: the format in words: "FP8 with one scale per 128x128 block (block)".
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
    description: str = ""

    @property
    def hints(self) -> list[str]:
        """What to do about the problems: one sentence for each kind that there is."""
        compared = any("the source" in problem for problem in self.problems)
        if compared and not self.equal_tensors:
            return [
                f"no tensor equals one of {self.source}: give --source the model that {self.directory} was made from"
            ]

        hints = {
            problem: next((hint for words, hint in _HINTS.items() if words in problem), _CONVERT_AGAIN)
            for problem in self.problems
        }
        found = list(dict.fromkeys(hints.values()))
        if any(hint == _CONVERT_AGAIN and "the source" in problem for problem, hint in hints.items()):
            found.append(f"if {self.directory} was made from another model than {self.source}, name that")
        return found

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
        for name in ("errors", "compared_codes", "equal_codes", "recomputed", "description"):
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
