"""Checks of the quantized weights of a directory: names, dtypes and shapes of codes, scales and zero points.

weights = find_weights(checkpoint, quantization, pairs, findings)
weights.codes["model.layers.0.mlp.up_proj.weight"].scale
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import SourceError
from ..files.checkpoint import Checkpoint
from ..files.tensors import TensorInfo
from ..formats.format import FLOATS, Format
from ..formats.quantization import Quantization
from ..formats.schemes import CHANNEL
from ..version import VLLM
from ..weights.find import CodesAndScale, stored_twice, unread_tensors
from ..weights.packed_columns import packed_columns
from ..weights.weight import Weight
from .headers import COLUMN_PARTS, Findings, Headers, described, either


class StoredWeights(NamedTuple):
    """The quantized weights of a directory.

    Attributes:
        codes: the quantized weights, by the name that each would have unquantized.
        stored: the same by the name of the tensor that holds their codes.
        scales: the names of their scales, and of what else is beside codes.
    """

    codes: dict[str, Weight]
    stored: dict[str, Weight]
    scales: set[str]


def find_weights(
    checkpoint: Checkpoint, quantization: Quantization, pairs: Sequence[CodesAndScale], findings: Findings
) -> StoredWeights:
    """Find the quantized weights and their scales, and check names, dtypes and shapes.

    Args:
        checkpoint: the opened directory.
        quantization: what its config says.
        pairs: its codes, each with the scale that is beside them.
        findings: gets what is off.

    Returns:
        All weights that have codes. One whose scale is missing or wrong has none.
    """
    finder = _Finder(checkpoint, quantization, findings)
    finder.add_all(pairs)
    return StoredWeights(finder.codes, finder.stored, finder.scales)


class _Finder:
    """Finds weights one by one."""

    def __init__(self, checkpoint: Checkpoint, quantization: Quantization, findings: Findings) -> None:
        self.checkpoint = checkpoint
        self.quantization = quantization
        self.findings = findings
        self.codes: dict[str, Weight] = {}
        self.stored: dict[str, Weight] = {}
        self.scales: set[str] = set()

    def add_all(self, pairs: Sequence[CodesAndScale]) -> None:
        """Find the quantized weights and their scales."""
        respelled = 0
        for pair in pairs:
            info, form, scale = pair.codes, pair.form, pair.scale
            if form is not None and form.columns is not None:
                self._add_columns(pair, form)
                continue
            first = self.quantization.groups[0][1] if self.quantization.groups else None
            number = (form or first or CHANNEL.format).number
            misnamed = f" called {pair.name}" if pair.packed and number.per_item == 1 else ""
            if info.dtype == number.dtype and number.per_item > 1 and not pair.packed:
                misnamed = f" called {pair.name}_packed"
            if info.name.endswith(".qweight"):
                misnamed = f" called {pair.name}_packed"
            if info.dtype != number.dtype or len(info.shape) < 2 or misnamed:
                self.findings.problems.append(
                    f"{self._place(info.name)} is {described(info)}, not a matrix of {number.dtype}{misnamed}"
                )
                continue
            if form is None:
                self.findings.problems.append(
                    f"{self._place(info.name)} is {number.dtype}, but no config group targets it"
                )
                weight = Weight(pair.module, "", info, (info.shape[-2], info.shape[-1]), parts=(info,))
                self.codes[pair.name] = self.stored[info.name] = weight
                continue
            shape = (*info.shape[:-1], info.shape[-1] * number.per_item)
            wanted = form.scale_of(pair.name)
            # What other names a tool gives it engines do not read, but for one.
            if scale is not None and scale.name != wanted:
                scale = scale if form.shared and scale.name.endswith("_scale_inv") else None
                respelled += scale is not None
            if scale is None:
                self.findings.problems.append(f"{self._place(info.name)} has no scale: {wanted} is missing")
            else:
                self.scales.add(scale.name)
                scale = self._sound(scale, form.scale_dtypes, form.scale_shapes(shape), info)
            above = self._global_scale(pair, form)
            zeros = self._zero_points(pair, form, (shape[-2], shape[-1]))
            self.scales.update(beside.name for beside in pair.beside if beside.name.endswith(".input_global_scale"))
            self.codes[pair.name] = self.stored[info.name] = Weight(
                pair.module,
                "",
                TensorInfo(pair.name, info.dtype, shape),
                (shape[-2], shape[-1]),
                format=form,
                parts=(info, *((scale, *above, *zeros) if scale else ())),
                input_scale=self._input_scale(pair, form),
            )
            self._check_known(info, form, pair.module, (shape[-2], shape[-1]))
        twice = stored_twice(self.checkpoint.tensors, pairs)
        self.findings.problems += [
            f"{self._place(info.name)}: {message}" for info, message in twice if info.name in self.stored
        ]
        if respelled:
            self.findings.notes.append(
                f"{respelled} scales are called weight_scale_inv although they are one per tensor; "
                f"{VLLM} reads that for Mistral 3 models only"
            )
        if not self.codes and self.quantization.groups:
            self.findings.notes.append("nothing is quantized")

    def _place(self, name: str) -> str:
        return f"{self.checkpoint.where[name].shard}: {name}"

    def _add_columns(self, pair: CodesAndScale, form: Format) -> None:
        """A weight whose codes lie in columns."""
        info = pair.codes
        self.scales.update(f"{pair.module}.{last}" for last in COLUMN_PARTS)
        try:
            shape, parts = packed_columns(pair.module, info, form, self.checkpoint.tensors.get)
        except SourceError as error:
            self.findings.problems.append(f"{self.checkpoint.where[info.name].shard}: {error.message}")
            return
        source = TensorInfo(pair.name, info.dtype, shape)
        self.codes[pair.name] = self.stored[info.name] = Weight(
            pair.module, "", source, shape, format=form, parts=parts
        )

    def _check_known(self, info: TensorInfo, form: Format, module: str, shape: tuple[int, int]) -> None:
        """What says the shape of a weight is there."""
        for wanted, _ in form.constant_tensors(module, shape):
            found = self.checkpoint.tensors.get(wanted.name)
            if found is None:
                self.findings.problems.append(f"{self._place(info.name)} has no shape: {wanted.name} is missing")
            else:
                self.scales.add(found.name)
                self._sound(found, (wanted.dtype,), (wanted.shape,), info)

    def _global_scale(self, pair: CodesAndScale, form: Format) -> tuple[TensorInfo, ...]:
        """The scale of a weight's scales, if its format has one and it is there with the right shape and dtype."""
        if form.global_scale is None:
            return ()
        info, found = pair.codes, pair.global_scale
        if found is None:
            name = form.shared_scale_name(pair.module)
            self.findings.problems.append(f"{self._place(info.name)} has no global scale: {name} is missing")
            return ()
        self.scales.add(found.name)
        sound = self._sound(found, ("F32",), ((1,), ()), info)
        return () if sound is None else (sound,)

    def _zero_points(self, pair: CodesAndScale, form: Format, shape: tuple[int, int]) -> tuple[TensorInfo, ...]:
        """The codes that stand for zero, if a weight's format has them and they are there as they must be."""
        info, found, wanted = pair.codes, pair.zero_points, form.zero_points(pair.module, shape)
        if wanted is None:
            return ()
        if found is None:
            self.findings.problems.append(f"{self._place(info.name)} has no zero points: {wanted.name} is missing")
            return ()
        self.scales.add(found.name)
        sound = self._sound(found, (wanted.dtype,), (wanted.shape,), info)
        return () if sound is None else (sound,)

    def _input_scale(self, pair: CodesAndScale, form: Format) -> TensorInfo | None:
        """The scale of a layer's activations, if it has one, it is there, and has the right shape and dtype."""
        if form.input_scale is None:
            return None
        info, name = pair.codes, f"{pair.module}.{form.input_scale}"
        found = self.checkpoint.tensors.get(name)
        if found is None:
            how = "static" if form.static else "scaled under it"
            self.findings.problems.append(f"{self._place(info.name)} has no {name}, but its activations are {how}")
            return None
        self.scales.add(name)
        return self._sound(found, FLOATS, ((), (1,)), info)

    def _sound(
        self, scale: TensorInfo, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], info: TensorInfo
    ) -> TensorInfo | None:
        """The scale, if its dtype and shape are right."""
        if self.findings.ours:
            # What a source had in float16 stays so.
            dtypes = dtypes[:1] if dtypes[0] != "BF16" else ("BF16", "F16")
        if scale.dtype in dtypes and scale.shape in shapes:
            return scale
        wanted = f"{either(dtypes)} {either([str(list(shape)) for shape in shapes])}"
        self.findings.problems.append(
            f"{self._place(scale.name)} is {described(scale)}, for {described(info)} it must be {wanted}"
        )
        return None


def check_strays(headers: Headers, findings: Findings) -> None:
    """Check that no scale belongs to nothing, and that there is nothing which engines refuse to load.

    Args:
        headers: what is there.
        findings: gets what is off.
    """
    unread, left = 0, unread_tensors(headers.checkpoint.tensors, headers.codes.values())
    for info in headers.checkpoint.tensors.values():
        owner = headers.owner(info.name)
        if owner is None or info.name in headers.scales or info.name in left:
            continue
        weight = headers.checkpoint.tensors.get(owner)
        if weight is None and owner not in headers.codes:
            findings.problems.append(f"{headers.place(info.name)} has no weight: {owner} is missing")
        elif weight is not None and owner not in headers.codes:
            findings.problems.append(f"{headers.place(info.name)} is the scale of {owner}, which is {weight.dtype}")
        elif info.name.endswith(".input_scale"):
            unread += 1
        elif (form := headers.codes[owner].format) is not None:
            findings.problems.append(
                f"{headers.place(info.name)} is not the scale of {owner}: the config asks for {form.scale_of(owner)}"
            )
    for name in left:
        findings.problems.append(f"{headers.place(name)} is nothing that engines load")
    if unread:
        findings.notes.append(f"{unread} input_scale tensors are there, but the config says activations are dynamic")
