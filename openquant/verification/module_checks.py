"""Checks of which modules of a quantized directory are quantized: the ignore list, the output head, fused layers."""

from __future__ import annotations

from ..formats.quantization import IN_COLUMNS
from ..registry.architecture import NOT_LINEAR, ROUTER
from ..registry.rules import ModuleRules, is_head
from .headers import Findings, Headers


def check_listed(headers: Headers, findings: Findings) -> None:
    """Check that no quantized module is in the ignore list.

    Args:
        headers: what is there.
        findings: gets what is off.
    """
    ignored = headers.quantization.ignored
    for weight in headers.codes.values():
        module = weight.module
        names: list[str] = [module]
        if headers.entry is not None:
            known = dict.fromkeys([module, headers.entry.looked_up(module)])
            names = [name for one in known for name in headers.entry.model.names_of(one)]
        listed = ignored.find(names)
        if listed is not None:
            codes = weight.codes
            findings.problems.append(f"{headers.place(codes.name)} is {codes.dtype}, but {ignored.key} lists {listed}")


def check_unlisted(headers: Headers, entry: ModuleRules, findings: Findings) -> None:
    """Check that every unquantized module which an engine would build quantized is in the ignore list, and that none is
    quantized which engines build unquantized.

    Args:
        headers: what is there.
        entry: the registry's.
        findings: gets what is off.
    """
    ignored, unlisted = headers.quantization.ignored, []
    if headers.quantization.method in IN_COLUMNS and not ignored.entries:
        return  # vLLM goes by what there is (layers/quantization/auto_awq.py:370-389)
    for info in headers.checkpoint.tensors.values():
        weight = headers.stored.get(info.name)
        rule = entry.rule(weight.module if weight else info.module)
        if weight is not None:
            # Other layers than the registry's are quantized where the source had them so.
            message = f"{headers.place(info.name)} is {info.dtype}, but it is kept: {rule.keep}"
            if rule.keep in NOT_LINEAR:
                findings.problems.append(message)
            elif rule.keep == ROUTER:
                # Some engines build some routers with quantization.
                findings.differs(message)
            continue
        matrix = len(info.shape) == 2 and info.name.endswith(".weight")
        linear = rule.compress or (rule.keep is not None and rule.keep not in NOT_LINEAR)
        if not (rule.stack or (matrix and linear)) or headers.quantization.format_of(info.module) is None:
            continue
        wanted = entry.looked_up(info.module)
        if ignored.find(entry.model.names_of(wanted)) is not None:
            continue
        if rule.keep is None or findings.ours:
            findings.unlisted.add(wanted)
            findings.problems.append(
                f"{headers.place(info.name)} is {info.dtype}, but {ignored.key} does not list {wanted}"
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
    """Check that the config names a quantized output head, which is no Linear to vLLM.

    Args:
        headers: what is there.
        findings: gets what is off.
    """
    for name, weight in headers.stored.items() if headers.head else ():
        if is_head(weight.module) and not headers.quantization.names(weight.module):
            findings.problems.append(
                f"{headers.place(name)} is {weight.codes.dtype}, but no config group names it: "
                "engines find it by name only"
            )


def check_fused(headers: Headers, entry: ModuleRules, findings: Findings) -> None:
    """Check that what an engine merges is stored in one format, and so are all experts of a layer.

    Args:
        headers: what is there.
        entry: the registry's.
        findings: gets what is off.
    """
    layers = headers.layers(entry)
    groups: dict[str, list[str]] = {}
    for module in layers:
        experts = entry.experts(module)
        if experts is not None:
            groups.setdefault(experts, []).append(module)
    for members in set(entry.fused_groups(layers).values()):
        # Experts are held together already.
        if entry.experts(members[0]) is None:
            groups[members[0]] = list(members)
    for name in sorted(groups):
        one = {f"{module}.weight" in headers.codes: module for module in reversed(groups[name])}
        forms = {
            weight.format: weight.codes.name
            for module in reversed(groups[name])
            if (weight := headers.codes.get(f"{module}.weight")) and weight.format
        }
        if len(one) == 2:
            other, codes = f"{one[False]}.weight", headers.codes[f"{one[True]}.weight"].codes
            findings.problems.append(
                f"{headers.place(codes.name)} is {codes.dtype} and {other} is "
                f"{headers.checkpoint.tensors[other].dtype}, but engines take both in one format"
            )
        elif len(forms) > 1:
            (form, first), (another, second), *_ = list(forms.items())[::-1]
            of = [f" of {kind.number.title}" if form.number != another.number else "" for kind in (form, another)]
            findings.problems.append(
                f"{headers.place(first)} has {form.label}{of[0]} and {second} {another.label}{of[1]}, "
                "but engines take both in one format"
            )
