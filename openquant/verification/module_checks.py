"""Checks which modules of a quantized directory are quantized: the ignore list, the output head, fused layers."""

from __future__ import annotations

from ..formats.quantization import IN_COLUMNS
from ..registry.architecture import NOT_LINEAR, ROUTER
from ..registry.rules import ModuleRules, is_table
from .headers import Findings, Headers


def check_listed(headers: Headers, findings: Findings) -> None:
    """Check that no quantized module is in the ignore list.

    Args:
        headers: the quantized directory, as its config and the headers of its shards describe it.
        findings: problems, one line each, are added to it.

    Raises:
        UsageError: matching names with regular expressions of the ignore list takes too long.
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

    Raises:
        UsageError: matching names with regular expressions of the config takes too long.
    """
    ignored, unlisted = headers.quantization.ignored, []
    if headers.quantization.method in IN_COLUMNS and not ignored.entries:
        return  # vLLM then ignores the layers that have no codes (layers/quantization/auto_awq.py:370-389).
    for info in headers.checkpoint.tensors.values():
        weight = headers.stored.get(info.name)
        rule = entry.rule(weight.module if weight else info.module)
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
        if rule.keep is None or findings.ours:
            findings.unlisted.add(engine_name)
            findings.problems.append(
                f"{headers.place(info.name)} is {info.dtype}, but {ignored.key} does not list {engine_name}"
            )
        else:
            unlisted.append(info.module)
    if unlisted:
        more = f" and {len(unlisted) - 1} more modules that are" if len(unlisted) > 1 else ", which is"
        them = "them" if len(unlisted) > 1 else "it"
        findings.notes.append(
            f"{ignored.key} does not list {unlisted[0]}{more} unquantized: right only if the engine never builds "
            f"{them} as {headers.quantization.groups[0][1].number.title}"
        )


def check_head(headers: Headers, findings: Findings) -> None:
    """Check that a config group names a quantized output head or embedding, because vLLM counts neither as a Linear.

    Args:
        headers: the quantized directory, as its config and the headers of its shards describe it.
        findings: problems, one line each, are added to it.

    Raises:
        UsageError: matching names with regular expressions of the config takes too long.
    """
    for name, weight in headers.stored.items() if headers.head or headers.embedding else ():
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
    groups: dict[str, list[str]] = {}
    for module in layers:
        experts = entry.experts(module)
        if experts is not None:
            groups.setdefault(experts, []).append(module)
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
