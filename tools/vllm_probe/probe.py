"""Report how vLLM builds models and for which layers it asks for a quantization method. Run by a Python with vLLM.

    python probe.py OUTPUT DIRECTORY...

A directory has a config.json with a quantization_config of {"quant_method": "asked", "ignored_layers": [...]}, and may
have a shapes.json with the shape of each tensor of a checkpoint. OUTPUT/<number>.json has for each directory

    layers    by path: its class and bases ("kinds"), whether it asks for a quantization method ("asked") and under
              which name ("prefix"), whether ignored_layers leaves it unquantized ("skipped"), whether tensor
              parallelism divides it ("divided"), its number of experts, the rows of each of its parts ("sizes"), what
              is loaded into its weights ("holds": by parameter, [tensor, first row, rows]), and whether an ignore list
              leaves it unquantized that has those tensors' modules ("own"), or these and the prefix ("named")
    unread    tensors of the checkpoint that are not loaded
    packed    packed_modules_mapping
    mapper    modules of the checkpoint that the engine renames in ignore lists, and their new names
    version   version of vLLM

or OUTPUT/<number>.error has the traceback. Rows of tensors are traced while the class loads them, so the answer does
not depend on what the class declares; large tensors have no memory. No code of a repository is run, and nothing is
downloaded.
"""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# The imports bind this thread to one CPU, so remember all of them.
os.environ |= {"ENGINE_CPUS": " ".join(map(str, os.sched_getaffinity(0)))}

import torch  # Before vLLM, whose CPU build finds OpenMP through it.
import vllm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.transformers.multimodal import MultiModalProcessingInfo
from vllm.utils.torch_utils import set_default_torch_dtype

CPUS = {int(number) for number in os.environ["ENGINE_CPUS"].split()}
# Limits in bytes of the memory beyond that of the imports, and of a file: a config may ask for any size.
MEMORY, FILE = 8 << 30, 1 << 26
# More than the rows of any tensor.
ROWS = 1 << 32
# Largest number of elements of a tensor that has memory.
LARGEST = 1 << 16
COPIES = (torch.ops.aten.clone, torch.ops.aten._to_copy, torch.ops.aten._unsafe_view, torch.ops.aten._reshape_copy)


class ExpertsMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """Creates the weights of experts even if this build of vLLM has no unquantized kernel for them."""

    def __init__(self, moe: Any) -> None:
        super(UnquantizedFusedMoEMethod, self).__init__(moe)
        self.supports_pre_processed_weights = False

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size: int, *_: Any, **__: Any) -> tuple[int, int]:
        """Return the sizes unchanged."""
        return hidden_size, intermediate_size


@register_quantization_config("asked")
class RecordingConfig(QuantizationConfig):  # type: ignore[misc]
    """A quantization config that quantizes nothing and records which layers ask for a method."""

    def __init__(self, ignored: list[str]) -> None:
        super().__init__()
        self.ignored = ignored
        self.mapper: Any = None
        # Prefixes by the id of the layer, which the model keeps alive.
        self.asked: dict[int, str] = {}

    @classmethod
    def get_name(cls) -> str:
        """Return the quant_method of config.json."""
        return "asked"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return the dtypes that tests use."""
        return [torch.float32, torch.bfloat16, torch.half]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return that any device will do."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no file names: the config is in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RecordingConfig:
        """Make one from a quantization_config."""
        return cls(config.get("ignored_layers", []))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the modules of the ignore list by vLLM's mapper, as Fp8Config does."""
        self.mapper = hf_to_vllm_mapper
        self.ignored = hf_to_vllm_mapper.apply_list(self.ignored)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Record a layer and return the unquantized method; None for attention, which then has no KV-cache scales."""
        self.asked[id(layer)] = prefix
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        if isinstance(layer, RoutedExperts):
            return ExpertsMethod(layer.moe_config)
        return UnquantizedEmbeddingMethod() if isinstance(layer, VocabParallelEmbedding) else None

    def listed(self, prefix: str, names: list[str], *more: str) -> bool:
        """Return whether an ignore list of the checkpoint's names, and of `more` names of the engine, has a layer."""
        renamed = self.mapper.apply_list(names) if self.mapper is not None else names
        return self.skipped_by(prefix, [*renamed, *more]) is True

    def skipped_by(self, prefix: str, ignored: list[str]) -> bool | None:
        """Return whether an ignore list in the engine's names has a layer, as Fp8Config decides; None where vLLM fails.

        It fails if only some parts of a fused layer are listed.
        """
        try:
            return bool(is_layer_skipped(prefix, ignored, self.packed_modules_mapping))
        except ValueError:
            return None


Rows = Callable[[torch.Tensor], torch.Tensor]


class RowTracer(TorchDispatchMode):  # type: ignore
    """Traces rows of a checkpoint's tensors to the parameters into which they are loaded. Large tensors have no memory.

    For each storage with such rows there is a function from positions in it to codes, tensor number * ROWS + row; the
    row ROWS - 1 stands for values that were computed, not copied. Small tensors are real, since classes read some.

    Args:
        shapes: shape of each tensor, by name.
    """

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes, self.names = shapes, list(shapes)
        # By the address of a storage. An address may be used again once its tensor is gone, so all are kept.
        self.rows: dict[int, Rows] = {}
        self.writes: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.kept: list[torch.Tensor] = []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors to load. A row of a stack is an expert."""
        for number, (name, shape) in enumerate(self.shapes.items()):
            tensor = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            self.register(tensor, partial(self.of_rows, number, max(1, math.prod(shape[1:]))))
            yield name, tensor

    def register(self, tensor: torch.Tensor, rows: Rows) -> None:
        """Set the function that gives the codes of a tensor's storage."""
        self.kept.append(tensor)
        self.rows[storage(tensor)] = rows

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and trace its rows."""
        kwargs, name = kwargs or {}, function.overloadpacket
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if name is torch.ops.aten.copy_:
            target, source = args[:2]
            if storage(source) in self.rows:
                self.kept.append(target)
                self.writes.setdefault(storage(target), []).append((target, source.expand(target.shape)))
            return target if target.is_meta or source.is_meta else function(*args, **kwargs)
        result = self.run(function, given, args, kwargs)
        traced = [tensor for tensor in given if storage(tensor) in self.rows]
        for output in tree_leaves(result) if traced else ():
            if not isinstance(output, torch.Tensor) or any(storage(output) == storage(tensor) for tensor in given):
                continue
            if name in COPIES:
                self.register(output, partial(self.of_view, traced[0], output.stride()))
            elif name is torch.ops.aten.cat:
                dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
                self.register(output, partial(self.of_cat, args[0], dim % output.ndim, output))
            else:
                self.register(output, partial(self.computed, traced[0]))
        return result

    def run(self, function: Any, given: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """Run an operation. Its result has no memory if it is large or an input has none.

        Args:
            function: the overload of a torch operator.
            given: all tensors among its arguments.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        arguments = {argument.name for argument in function._schema.arguments}
        to_meta = {"device": torch.device("meta")} if "device" in arguments else {}
        if any(one.is_meta for one in given):
            real = [one for one in given if not one.is_meta]
            if real and function._schema.name.endswith("_"):
                return args[0]
            args, kwargs = tree_map(without_memory, (args, kwargs))
            return function(*args, **{**kwargs, **to_meta})
        # An operation that creates a tensor.
        if "pin_memory" in arguments and function.overloadpacket is not torch.ops.aten._to_copy:
            try:
                large = function(*tree_map(without_memory, args), **{**tree_map(without_memory, kwargs), **to_meta})
            except (NotImplementedError, RuntimeError):
                return function(*args, **kwargs)
            if large.numel() > LARGEST:
                return large
        return function(*args, **kwargs)

    def codes(self, view: torch.Tensor, index: list[torch.Tensor]) -> torch.Tensor:
        """Return the codes at an index of a tensor; -1 where nothing was loaded.

        Args:
            view: the tensor.
            index: for each of its axes int64 indices, of shapes that broadcast.
        """
        at = torch.tensor(int(view.storage_offset()))
        for one, stride in zip(index, view.stride(), strict=True):
            at = at + one * stride
        rows = self.rows.get(storage(view))
        return rows(at) if rows is not None else torch.full_like(at, -1)

    def of_rows(self, number: int, size: int, at: torch.Tensor) -> torch.Tensor:
        """Return the codes at positions of a tensor of the checkpoint.

        Args:
            number: number of the tensor.
            size: elements per index of its first axis: of a row, or of an expert in a stack.
            at: positions in elements, int64 of any shape.

        Returns:
            int64 of the shape of `at`: number * ROWS + row.
        """
        return number * ROWS + at // size

    def of_view(self, view: torch.Tensor, strides: tuple[int, ...], at: torch.Tensor) -> torch.Tensor:
        """Return the codes at positions `at` of a copy of a view; the copy has `strides`, in elements."""
        return self.codes(view, unravelled(at, tuple(view.shape), strides))

    def of_cat(self, pieces: list[torch.Tensor], dim: int, whole: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Return the codes at positions `at` of `whole`, the concatenation of several tensors along axis `dim`."""
        index = unravelled(at, tuple(whole.shape), whole.stride())
        codes, start = torch.full_like(at, -1), 0
        for piece in pieces:
            inside = (index[dim] >= start) & (index[dim] < start + piece.shape[dim])
            place = [one[inside] - (start if axis == dim else 0) for axis, one in enumerate(index)]
            codes[inside] = self.codes(piece, place)
            start += piece.shape[dim]
        return codes

    def computed(self, view: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Return the codes at positions `at` of a tensor that was computed from `view`: row ROWS - 1 of its tensor."""
        first = self.codes(view, [torch.zeros((), dtype=torch.int64)] * view.ndim)
        return torch.where(first < 0, first, first // ROWS * ROWS + ROWS - 1).expand(at.shape)

    def loaded(self, parameter: torch.Tensor) -> list[list[Any]]:
        """Return the runs of rows that were loaded into a parameter: [tensor name, first row, rows] in order.

        The rows of a run are of one tensor and follow one another there, but in a parameter of three axes they may be
        any. Empty if nothing was loaded.
        """
        whole = parameter.detach()
        given = [(whole, whole)] if storage(whole) in self.rows else self.writes.get(storage(whole), [])
        size = max(1, math.prod(whole.shape[1 if whole.ndim < 3 else 2 :]))
        places, codes = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        for target, source in given:
            if target.storage_offset() % size or not target.numel():
                continue
            # The first element of a row identifies it.
            ranges = [
                torch.arange(count if step >= size else 1)
                for count, step in zip(target.shape, target.stride(), strict=True)
            ]
            index = [one.flatten() for one in torch.meshgrid(*ranges, indexing="ij")] if ranges else []
            at = sum((one * step for one, step in zip(index, target.stride(), strict=True)), torch.zeros(1).long())
            places.append((target.storage_offset() + at) // size)
            codes.append(self.codes(source, index).expand(at.shape))
        place, order = torch.cat(places).sort(stable=True)
        code = torch.cat(codes)[order]
        # If a row was written twice, the last write counts.
        last = torch.ones_like(place, dtype=torch.bool)
        last[:-1] = place[1:] != place[:-1]
        code = code[last & (code >= 0)]
        if not len(code):
            return []
        starts = torch.ones_like(code, dtype=torch.bool)
        starts[1:] = (code[1:] // ROWS != code[:-1] // ROWS) if whole.ndim > 2 else (code[1:] != code[:-1] + 1)
        first = starts.nonzero()[:, 0]
        lengths = torch.diff(first, append=torch.tensor([len(code)]))
        runs = zip(code[first].tolist(), lengths.tolist(), strict=True)
        return [[self.names[one // ROWS], one % ROWS, length] for one, length in runs]


def without_memory(one: Any) -> Any:
    """Return a tensor of the same shape on the meta device; other values unchanged."""
    if not isinstance(one, torch.Tensor) or one.is_meta:
        return one
    return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")


def storage(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage: the address of the storage object, equal for all views."""
    return int(tensor.untyped_storage()._cdata)


def unravelled(at: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> list[torch.Tensor]:
    """Convert positions in dense memory to an index along each axis.

    Args:
        at: positions in elements, int64 of any shape.
        shape: of the tensor.
        strides: of the tensor, in elements.

    Returns:
        For each axis the index, int64 of the shape of `at`.
    """
    index = [torch.zeros_like(at)] * len(shape)
    for axis in sorted(range(len(shape)), key=lambda axis: (strides[axis], -shape[axis]), reverse=True):
        if shape[axis] > 1:
            index[axis], at = at // strides[axis], at % strides[axis]
    return index


def describe(directory: Path) -> dict[str, Any]:
    """Build the model of one directory, and record what vLLM builds.

    Args:
        directory: holds `config.json`, and perhaps `shapes.json` with the shape of each tensor by name.

    Returns:
        The JSON object that the module's docstring describes: layers, their tensors, what is not loaded.
    """
    config = EngineArgs(
        model=str(directory),
        dtype="float32",
        enforce_eager=True,
        # For models with latent attention and a state, vLLM's CPU build turns it off only after it has chosen sizes.
        enable_prefix_caching=False,
        max_model_len=64,
        skip_tokenizer_init=True,
    ).create_engine_config()
    path = directory / "shapes.json"
    shapes: dict[str, list[int]] = json.loads(path.read_text()) if path.exists() else {}
    recording = config.quant_config
    with set_current_vllm_config(config), tempfile.NamedTemporaryFile() as rendezvous:
        init_distributed_environment(1, 0, f"file://{rendezvous.name}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        tracer = RowTracer(shapes)
        with set_default_torch_dtype(torch.float32), torch.no_grad(), tracer:
            model = initialize_model(config)
            if shapes:
                model.load_weights(tracer.tensors())
    names = list(shapes)
    layers: dict[str, Any] = {}
    for name, module in model.named_modules():
        prefix = recording.asked.get(id(module))
        if not isinstance(module, LinearBase | RoutedExperts | VocabParallelEmbedding):
            continue
        experts = getattr(module, "global_num_experts", 0)
        holds = {key: tracer.loaded(value) for key, value in module.named_parameters(recurse=False)}
        tensors = dict.fromkeys(tensor for key, runs in holds.items() if "weight" in key for tensor, _, _ in runs)
        own = [
            module
            for tensor in tensors
            for module in (expert_modules(tensor) if experts else [tensor.removesuffix(".weight")])
        ]
        layers[name] = {
            "kinds": [base.__name__ for base in type(module).__mro__ if base.__module__.startswith("vllm.")],
            "asked": prefix is not None,
            "prefix": prefix if prefix is not None else getattr(module, "prefix", name),
            "skipped": recording.skipped_by(prefix, recording.ignored) if prefix else None,
            "divided": not getattr(module, "disable_tp", False),
            "experts": experts,
            "sizes": list(getattr(module, "output_sizes", None) or [getattr(module, "output_size", 0)]),
            "own": bool(prefix) and recording.listed(prefix, own),
            "named": bool(prefix) and recording.listed(prefix, own, prefix),
            "holds": holds,
        }
    read = {name for layer in layers.values() for runs in layer["holds"].values() for name, _, _ in runs}
    read |= {name for value in model.parameters() for name, _, _ in tracer.loaded(value)}
    modules = [name.removesuffix(".weight") for name in names]
    # Only classes that rename ignore lists have a mapper here.
    mapped = recording.mapper.get_rename_mapper() if recording.mapper is not None else None
    renamed = {module: mapped.map_name(module) for module in modules} if mapped is not None else {}
    return {
        "layers": layers,
        "unread": [name for name in names if name not in read],
        "packed": {key: list(value) for key, value in recording.packed_modules_mapping.items()},
        "mapper": {module: other for module, other in renamed.items() if other != module},
        "version": str(vllm.__version__),
    }


def expert_modules(tensor: str) -> list[str]:
    """Return the names for an ignore list: the module of an expert's tensor, its expert and all experts."""
    module = tensor.removesuffix(".weight")
    return [".".join(module.split(".")[: -end or None]) for end in range(3)]


def answer(directory: Path, output: Path) -> None:
    """Describe a directory in `output`.json, or write `output`.error with the traceback, and end the process."""
    os.sched_setaffinity(0, CPUS)
    memory_used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = {resource.RLIMIT_AS: memory_used + MEMORY, resource.RLIMIT_FSIZE: FILE, resource.RLIMIT_CORE: 0}
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    try:
        # Otherwise vLLM starts an interpreter to inspect the class.
        for name in json.loads((directory / "config.json").read_text())["architectures"]:
            if name in ModelRegistry.models:
                ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
        output.with_suffix(".json").write_text(json.dumps(describe(directory)))
    except BaseException:
        output.with_suffix(".error").write_text(traceback.format_exc())
    os._exit(0)


def main() -> None:
    """Answer for each directory in a fork, so that one model cannot affect or crash another."""
    output, *directories = sys.argv[1:]
    # Otherwise the Transformers backend loads a processor, to see whether it takes images or audio.
    MultiModalProcessingInfo._get_supported_modalities = lambda _: ["image"]
    gc.freeze()
    fork = multiprocessing.get_context("fork")
    running: list[Any] = []
    for number, directory in enumerate(directories):
        # Polling is_alive() works; waiting for sentinels does not, since vLLM closes them.
        while len(running) >= len(CPUS):
            time.sleep(0.02)
            running = [process for process in running if process.is_alive()]
        running.append(fork.Process(target=answer, args=(Path(directory), Path(output, str(number)))))
        running[-1].start()
    for process in running:
        process.join()


if __name__ == "__main__":
    main()
