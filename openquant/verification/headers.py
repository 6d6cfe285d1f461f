"""What the config and the headers of a quantized directory say, held against each other and against the registry.

No tensor is read. What engines would load wrongly is a problem; what another tool may do otherwise than this one, and
engines accept, is a note.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import PlanError, SourceError, UsageError
from ..files.checkpoint import Checkpoint, read_json
from ..files.names import INDEX_FILE
from ..files.tensors import TensorInfo
from ..formats.format import FLOATS, INPUT_SCALE, Format
from ..formats.kv_cache import DENSE, SCALES, cache_scales, says_fp8_cache, with_fp8_cache, without_fp8_cache
from ..formats.quantization import IN_COLUMNS, Quantization, quantization_places
from ..formats.schemes import CHANNEL, MIXED, as_written, without_targets
from ..formats.settings import unread
from ..plan.architecture import with_layer_counts
from ..plan.kv_cache import cache_layers
from ..plan.tensor_parallel import text_config
from ..registry.architecture import NOT_LINEAR, ROUTER, Architecture
from ..registry.rules import ModuleRules, is_head
from ..version import VLLM
from ..weights.find import CodesAndScale, pairs, stored_twice, unread_tensors
from ..weights.packed_columns import packed_columns
from ..weights.weight import Weight
from .configs import config_differences

# Whether scales of a cache are found as they come, and what shares one, where the scales that are stored are checked.
_OF_TENSORS = (False, "tensor")
# Beside codes in columns, the last parts of names.
_IN_COLUMNS = ("qzeros", "scales", "g_idx")


class Headers:
    """The headers of a directory, to be checked.

    Args:
        checkpoint: the opened directory.
        quantization: what its config says.
        model: the registry's entry for it; None if it has none.
        written: the files that the run which made it wrote, if that is known.
        ours: whether this program made it: then all is as it writes it.

    Attributes:
        problems: what is off, one line each.
        notes: what is worth knowing, and what was not checked.
        scheme: which of ours it is stored in, the nearest where it is not quite; None for other ways to store it.
        head: whether the output head is quantized.
        entry: the registry's, with the output head among what is quantized if it is; None without one.
        codes: the quantized weights, by the name that each would have unquantized.
        stored: the same by the name of the tensor that holds their codes.
        scales: the names of their scales, and of what else is beside codes.
        unlisted: the names that had to be listed as unquantized and are not.
        cached: whether the config says that keys and values are cached in FP8.
        cache: the scales of these.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        quantization: Quantization,
        model: Architecture | None,
        written: set[str],
        ours: bool,
    ) -> None:
        self.checkpoint = checkpoint
        self.quantization = quantization
        self.written = written
        self.ours = ours
        self.scheme = quantization.scheme
        # A head that is quantized is one more layer.
        self._pairs = list(pairs(checkpoint.tensors, quantization))
        self.head = quantization.method != "fp8" and any(is_head(pair.module) for pair in self._pairs)
        if model and self.head and model.head_refused is None:
            model = model.with_head()
        self.entry = ModuleRules(with_layer_counts(model, checkpoint)) if model else None
        self.problems: list[str] = list(quantization.problems)
        self.notes: list[str] = []
        self._check_settings()
        self.codes: dict[str, Weight] = {}
        self.stored: dict[str, Weight] = {}
        self.scales: set[str] = set()
        self.unlisted: set[str] = set()
        self.cached = False
        self.cache: list[TensorInfo] = []

    def _check_settings(self) -> None:
        """The quantization_config: in our directories what this program writes, in others' what engines read."""
        places = quantization_places(self.checkpoint.config)
        if any(place[key] != places[0][0][places[0][1]] for place, key in places[1:]):
            self.problems.append("config.json holds several quantization configs, which are not the same")
        settings = self.quantization.settings
        if self.scheme is not None and as_written(self.scheme, settings):
            return
        if self.scheme is None and {**settings, "ignore": []} == with_fp8_cache(DENSE):
            return
        if not self.ours:
            # Other tools write one list of unquantized modules, or other settings.
            self.scheme = None
            problems, unknown = unread(settings)
            self.problems += [f"config.json: quantization_config.{problem}" for problem in problems]
            if unknown:
                self.notes.append(f"config.json: nothing is known to read quantization_config.{', '.join(unknown)}")
        elif self.scheme is None:
            self.problems.append("config.json: its quantization_config is none that this program writes")
        else:
            found = without_fp8_cache(without_targets(settings))
            groups = found.get("config_groups") if self.scheme.group else None
            # Of the groups that it may have, those that are most like them.
            kinds = [
                min((self.scheme, *MIXED), key=lambda kind: len(list(config_differences(group, kind.group))))
                for group in (groups.values() if isinstance(groups, dict) else ())
            ]
            written = without_targets(self.scheme.config(None, dict.fromkeys(kinds, ())))
            for difference in config_differences(found, written, ("quantization_config",)):
                self.problems.append(f"config.json: {difference.text('this program writes')}")

    def check(self) -> None:
        """Fill problems and notes."""
        self._sort_tensors()
        self._check_strays()
        self._check_cache()
        if self.entry is None:
            self.notes.append(
                f"{self.checkpoint.architecture} is not a known architecture: not checked are which unquantized layers "
                "must be listed, and which must share their status or scale"
            )
        self._check_listed()
        if self.entry is not None:
            self._check_unlisted(self.entry)
            self._check_together(self.entry)
        self._check_head()
        self._check_index()
        self._check_written()

    def place(self, name: str) -> str:
        """A tensor for a message: its file and its name."""
        return f"{self.checkpoint.where[name].shard}: {name}"

    def differs(self, message: str) -> None:
        """Something that this tool never does, and another may."""
        (self.problems if self.ours else self.notes).append(message)

    def _sort_tensors(self) -> None:
        """Find the quantized weights and their scales."""
        respelled = 0
        for pair in self._pairs:
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
                self.problems.append(
                    f"{self.place(info.name)} is {described(info)}, not a matrix of {number.dtype}{misnamed}"
                )
                continue
            if form is None:
                self.problems.append(f"{self.place(info.name)} is {number.dtype}, but no config group targets it")
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
                self.problems.append(f"{self.place(info.name)} has no scale: {wanted} is missing")
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
        twice = stored_twice(self.checkpoint.tensors, self._pairs)
        self.problems += [f"{self.place(info.name)}: {message}" for info, message in twice if info.name in self.stored]
        if respelled:
            self.notes.append(
                f"{respelled} scales are called weight_scale_inv although they are one per tensor; "
                f"{VLLM} reads that for Mistral 3 models only"
            )
        if not self.codes and self.quantization.groups:
            self.notes.append("nothing is quantized")

    def _add_columns(self, pair: CodesAndScale, form: Format) -> None:
        """A weight whose codes lie in columns."""
        info = pair.codes
        self.scales.update(f"{pair.module}.{last}" for last in _IN_COLUMNS)
        try:
            shape, parts = packed_columns(pair.module, info, form, self.checkpoint.tensors.get)
        except SourceError as error:
            self.problems.append(f"{self.checkpoint.where[info.name].shard}: {error.message}")
            return
        source = TensorInfo(pair.name, info.dtype, shape)
        self.codes[pair.name] = self.stored[info.name] = Weight(
            pair.module, "", source, shape, format=form, parts=parts
        )

    def _check_known(self, info: TensorInfo, form: Format, module: str, shape: tuple[int, int]) -> None:
        """What says the shape of a weight is there."""
        for wanted, _ in form.known(module, shape):
            found = self.checkpoint.tensors.get(wanted.name)
            if found is None:
                self.problems.append(f"{self.place(info.name)} has no shape: {wanted.name} is missing")
            else:
                self.scales.add(found.name)
                self._sound(found, (wanted.dtype,), (wanted.shape,), info)

    def _global_scale(self, pair: CodesAndScale, form: Format) -> tuple[TensorInfo, ...]:
        """The scale of a weight's scales, if its format has one and it is there with the right shape and dtype."""
        if form.global_scale is None:
            return ()
        info, found = pair.codes, pair.global_scale
        if found is None:
            name = form.tied_scale(pair.module)
            self.problems.append(f"{self.place(info.name)} has no global scale: {name} is missing")
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
            self.problems.append(f"{self.place(info.name)} has no zero points: {wanted.name} is missing")
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
            self.problems.append(f"{self.place(info.name)} has no {name}, but its activations are {how}")
            return None
        self.scales.add(name)
        return self._sound(found, FLOATS, ((), (1,)), info)

    def _sound(
        self, scale: TensorInfo, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], info: TensorInfo
    ) -> TensorInfo | None:
        """The scale, if its dtype and shape are right."""
        if self.ours:
            # What a source had in float16 stays so.
            dtypes = dtypes[:1] if dtypes[0] != "BF16" else ("BF16", "F16")
        if scale.dtype in dtypes and scale.shape in shapes:
            return scale
        wanted = f"{_either(dtypes)} {_either([str(list(shape)) for shape in shapes])}"
        self.problems.append(
            f"{self.place(scale.name)} is {described(scale)}, for {described(info)} it must be {wanted}"
        )
        return None

    def _check_strays(self) -> None:
        """Scales that belong to no quantized weight."""
        unread, left = 0, unread_tensors(self.checkpoint.tensors, self.codes.values())
        for info in self.checkpoint.tensors.values():
            owner = self.owner(info.name)
            if owner is None or info.name in self.scales or info.name in left:
                continue
            weight = self.checkpoint.tensors.get(owner)
            if weight is None and owner not in self.codes:
                self.problems.append(f"{self.place(info.name)} has no weight: {owner} is missing")
            elif weight is not None and owner not in self.codes:
                self.problems.append(f"{self.place(info.name)} is the scale of {owner}, which is {weight.dtype}")
            elif info.name.endswith(".input_scale"):
                unread += 1
            elif (form := self.codes[owner].format) is not None:
                self.problems.append(
                    f"{self.place(info.name)} is not the scale of {owner}: the config asks for {form.scale_of(owner)}"
                )
        for name in left:
            self.problems.append(f"{self.place(name)} is nothing that engines load")
        if unread:
            self.notes.append(f"{unread} input_scale tensors are there, but the config says activations are dynamic")

    def _check_cache(self) -> None:
        """The scales of keys and values, of all layers that have a cache of their own, where it is in FP8."""
        try:
            self.cached = says_fp8_cache(self.quantization.settings)
        except UsageError as error:
            self.problems.append(error.message)
        tensors = self.checkpoint.tensors
        known = cache_scales(tensors)
        self.cache = [tensors[name] for name in dict.fromkeys(n for both in known.values() for n in both if n)]
        if not self.cached:
            return
        scheme = self.quantization.settings.get("kv_cache_scheme")
        if (
            not self.ours
            and isinstance(scheme, dict)
            and (scheme.get("dynamic"), scheme.get("strategy")) != _OF_TENSORS
        ):
            self.notes.append(
                "scales of keys and values are found as they come, or those of heads: they are not checked"
            )
            return
        for info in self.cache:
            if info.dtype not in FLOATS or info.shape not in ((), (1,)):
                self.problems.append(f"{self.place(info.name)} is {described(info)}, scales of a cache are one number")
        try:
            layers = self._cache_layers()
        except PlanError as error:
            self.notes.append(f"not checked are the scales of keys and values: {error.message}")
            return
        for number, path in layers.items():
            for last, found in zip(SCALES, known.pop(number, (None, None)), strict=True):
                name = f"{path}.{last}"
                if found is None:
                    self.problems.append(
                        f"{name} is missing: keys and values are cached in FP8, as config.json says, "
                        "by engines under a scale of 1 then, by transformers under anything"
                    )
                elif found != name and self.ours:
                    self.problems.append(f"{self.place(found)} must be called {name}")
        for name in dict.fromkeys(n for both in known.values() for n in both if n):
            self.problems.append(f"{self.place(name)} is the scale of a layer that has no cache of its own")

    def _cache_layers(self) -> dict[int, str]:
        """The attention of each layer that has a cache of its own, by number.

        Raises:
            PlanError: that is not known.
        """
        names = (self.stored[name].module if name in self.stored else name for name in self.checkpoint.tensors)
        modules = [name.removesuffix(".weight") for name in names]
        if self.entry is None:
            raise PlanError(f"{self.checkpoint.architecture} is not a known architecture", "")
        return cache_layers(modules, self.entry, text_config(self.checkpoint, self.entry.model))

    def owner(self, name: str) -> str | None:
        """The weight that a tensor is the scale or zero points of, or says the shape of; None if it is neither."""
        module, _, last = name.rpartition(".")
        # What is called scales may be another parameter.
        in_columns = self.quantization.method in IN_COLUMNS and last in _IN_COLUMNS
        if last in (INPUT_SCALE, "input_global_scale") or (in_columns and (last != "scales" or name in self.scales)):
            return f"{module}.weight"
        for suffix in ("_scale_inv", "_global_scale", "_scale", "_shape", "_zero_point"):
            owner = name.removesuffix(suffix)
            # A stack of experts has no more to its name than a parameter that a model may have beside a scale of it.
            if owner != name and (owner.endswith(".weight") or owner in self.codes):
                return owner
        return None

    def _check_listed(self) -> None:
        """No quantized module may be listed."""
        ignored = self.quantization.ignored
        for weight in self.codes.values():
            module = weight.module
            names: list[str] = [module]
            if self.entry is not None:
                known = dict.fromkeys([module, self.entry.looked_up(module)])
                names = [name for one in known for name in self.entry.model.names_of(one)]
            listed = ignored.find(names)
            if listed is not None:
                codes = weight.codes
                self.problems.append(f"{self.place(codes.name)} is {codes.dtype}, but {ignored.key} lists {listed}")

    def _check_unlisted(self, entry: ModuleRules) -> None:
        """Every unquantized module that an engine would build quantized must be listed; and what may not be so."""
        ignored, unlisted = self.quantization.ignored, []
        if self.quantization.method in IN_COLUMNS and not ignored.entries:
            return  # vLLM goes by what there is (layers/quantization/auto_awq.py:370-389)
        for info in self.checkpoint.tensors.values():
            weight = self.stored.get(info.name)
            rule = entry.rule(weight.module if weight else info.module)
            if weight is not None:
                # Other layers than the registry's are quantized where the source had them so.
                message = f"{self.place(info.name)} is {info.dtype}, but it is kept: {rule.keep}"
                if rule.keep in NOT_LINEAR:
                    self.problems.append(message)
                elif rule.keep == ROUTER:
                    # Some engines build some routers with quantization.
                    self.differs(message)
                continue
            matrix = len(info.shape) == 2 and info.name.endswith(".weight")
            linear = rule.compress or (rule.keep is not None and rule.keep not in NOT_LINEAR)
            if not (rule.stack or (matrix and linear)) or self.quantization.format_of(info.module) is None:
                continue
            wanted = entry.looked_up(info.module)
            if ignored.find(entry.model.names_of(wanted)) is not None:
                continue
            if rule.keep is None or self.ours:
                self.unlisted.add(wanted)
                self.problems.append(
                    f"{self.place(info.name)} is {info.dtype}, but {ignored.key} does not list {wanted}"
                )
            else:
                unlisted.append(info.module)
        if unlisted:
            more = f" and {len(unlisted) - 1} more modules that are" if len(unlisted) > 1 else ", which is"
            them = "them" if len(unlisted) > 1 else "it"
            self.notes.append(
                f"{ignored.key} does not list {unlisted[0]}{more} unquantized: right only if the engine never builds "
                f"{them} as {self.quantization.groups[0][1].number.title}"
            )

    def layers(self, entry: ModuleRules) -> dict[str, Weight]:
        """The stored matrices that the registry lets quantize."""
        tensors = (
            self.stored[info.name].source if info.name in self.stored else info
            for info in self.checkpoint.tensors.values()
        )
        return {
            info.module: Weight(info.module, entry.rule(info.module).alike, info, (info.shape[0], info.shape[1]))
            for info in tensors
            if len(info.shape) == 2 and info.name.endswith(".weight") and entry.rule(info.module).compress
        }

    def _check_head(self) -> None:
        """An output head is no Linear to vLLM."""
        for name, weight in self.stored.items():
            if self.head and is_head(weight.module) and not self.quantization.names(weight.module):
                self.problems.append(
                    f"{self.place(name)} is {weight.codes.dtype}, but no config group names it: "
                    "engines find it by name only"
                )

    def _check_together(self, entry: ModuleRules) -> None:
        """What an engine merges must be quantized together, and so must all experts of a layer."""
        layers = self.layers(entry)
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
            one = {f"{module}.weight" in self.codes: module for module in reversed(groups[name])}
            forms = {
                weight.format: weight.codes.name
                for module in reversed(groups[name])
                if (weight := self.codes.get(f"{module}.weight")) and weight.format
            }
            if len(one) == 2:
                other, codes = f"{one[False]}.weight", self.codes[f"{one[True]}.weight"].codes
                self.problems.append(
                    f"{self.place(codes.name)} is {codes.dtype} and {other} is "
                    f"{self.checkpoint.tensors[other].dtype}, but engines take both in one format"
                )
            elif len(forms) > 1:
                (form, first), (another, second), *_ = list(forms.items())[::-1]
                of = [f" of {kind.number.title}" if form.number != another.number else "" for kind in (form, another)]
                self.problems.append(
                    f"{self.place(first)} has {form.label}{of[0]} and {second} {another.label}{of[1]}, "
                    "but engines take both in one format"
                )

    def _check_index(self) -> None:
        """The size that the index tells."""
        if not self.checkpoint.indexed:
            return
        index = read_json(self.checkpoint.root / INDEX_FILE, INDEX_FILE)
        metadata = index.get("metadata")
        told = metadata.get("total_size") if isinstance(metadata, dict) else None
        total = sum(info.nbytes for info in self.checkpoint.tensors.values())
        if told is not None and told != total:
            self.differs(f"{INDEX_FILE}: total_size is {told}, the tensors take {total} bytes")

    def _check_written(self) -> None:
        """The files that the run which made the directory wrote down."""
        for name in sorted(self.written):
            if not (self.checkpoint.root / name).is_file():
                self.problems.append(f"{name} is missing: the run that made this directory wrote it")


def described(info: TensorInfo) -> str:
    """A tensor's dtype and shape for a message."""
    return f"{info.dtype} {list(info.shape)}"


def _either(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
