"""Says what vLLM builds of models, and what it asks a quantization for. An interpreter with vLLM runs this by itself.

    python probe.py OUTPUT DIRECTORY...

A directory has a config.json with a quantization_config of {"quant_method": "asked", "ignored_layers": [...]}, and may
have a shapes.json: the shape of each tensor of a checkpoint. OUTPUT/<number>.json says of each directory

    layers    by path: its class and bases ("kinds"), whether it asks for a quantization ("asked") and by which name
              ("prefix"), whether ignored_layers has it ("skipped"), whether ranks divide it ("divided"), how many
              experts it has, how many rows each of its parts has ("sizes"), what is loaded into its weights ("holds"):
              by parameter, [tensor, first row, rows]; and whether a list has it that names those tensors' modules
              ("own"), or these and the prefix ("named")
    unread    tensors of the checkpoint that are loaded into nothing
    packed    packed_modules_mapping
    mapper    modules of the checkpoint that the engine renames where a list has them, and their names then
    version   of vLLM

or OUTPUT/<number>.error says why there is none. Where rows of the tensors go is watched as the class loads them,
so that nothing depends on what it says of itself; what is large has no memory meanwhile. No code of a repository is
run, and nothing is fetched.
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
# The imports bind this thread to one of the CPUs.
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
# Bytes that a process may take beside what the imports have, and that it may write: a config may say any size.
MEMORY, FILE = 8 << 30, 1 << 26
# Rows that a tensor may have.
ROWS = 1 << 32
# Numbers of a tensor that has memory.
LARGEST = 1 << 16
COPIES = (torch.ops.aten.clone, torch.ops.aten._to_copy, torch.ops.aten._unsafe_view, torch.ops.aten._reshape_copy)


class ExpertsMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """Makes weights of experts whatever they compute: not every engine has a kernel for that without a quantization."""

    def __init__(self, moe: Any) -> None:
        super(UnquantizedFusedMoEMethod, self).__init__(moe)
        self.supports_pre_processed_weights = False

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size: int, *_: Any, **__: Any) -> tuple[int, int]:
        """As they are."""
        return hidden_size, intermediate_size


@register_quantization_config("asked")
class RecordingConfig(QuantizationConfig):  # type: ignore[misc]
    """A quantization that quantizes nothing, and remembers what it was asked for."""

    def __init__(self, ignored: list[str]) -> None:
        super().__init__()
        self.ignored = ignored
        self.mapper: Any = None
        # By id of the layer, which the model keeps.
        self.asked: dict[int, str] = {}

    @classmethod
    def get_name(cls) -> str:
        """As config.json has it."""
        return "asked"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """All that tests use."""
        return [torch.float32, torch.bfloat16, torch.half]

    @classmethod
    def get_min_capability(cls) -> int:
        """None."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RecordingConfig:
        """Of quantization_config."""
        return cls(config.get("ignored_layers", []))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """As Fp8Config does."""
        self.mapper = hf_to_vllm_mapper
        self.ignored = hf_to_vllm_mapper.apply_list(self.ignored)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """What computes nothing differently; None for attention, as where there are no scales for its cache."""
        self.asked[id(layer)] = prefix
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        if isinstance(layer, RoutedExperts):
            return ExpertsMethod(layer.moe_config)
        return UnquantizedEmbeddingMethod() if isinstance(layer, VocabParallelEmbedding) else None

    def skipped(self, prefix: str) -> bool | None:
        """Whether a layer is listed, as Fp8Config decides it; None where it refuses a list of some parts only."""
        return self.skipped_by(prefix, self.ignored)

    def listed(self, prefix: str, names: list[str], *more: str) -> bool:
        """Whether a list of these names has a layer, or of these and more by the engine's own names."""
        renamed = self.mapper.apply_list(names) if self.mapper is not None else names
        return self.skipped_by(prefix, [*renamed, *more]) is True

    def skipped_by(self, prefix: str, ignored: list[str]) -> bool | None:
        """Whether a list has a layer, as it is once renamed."""
        try:
            return bool(is_layer_skipped(prefix, ignored, self.packed_modules_mapping))
        except ValueError:
            return None


Rows = Callable[[torch.Tensor], torch.Tensor]


class RowTracer(TorchDispatchMode):  # type: ignore
    """Follows rows of a checkpoint's tensors to where they are loaded. What is large has no memory.

    A storage that holds such rows has a function: from positions in it to codes, tensor * ROWS + row; the last row
    stands for what was computed rather than copied. What is small is real, as classes look at some of it.

    Args:
        shapes: of the tensors, by name.
    """

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes, self.names = shapes, list(shapes)
        # By the address of a storage, which may be used again once nothing has it: all are kept.
        self.rows: dict[int, Rows] = {}
        self.writes: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.kept: list[torch.Tensor] = []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is to be loaded. A row of a stack is an expert."""
        for number, (name, shape) in enumerate(self.shapes.items()):
            tensor = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            self.comes(tensor, partial(self.of_rows, number, max(1, math.prod(shape[1:]))))
            yield name, tensor

    def comes(self, tensor: torch.Tensor, rows: Rows) -> None:
        """Say what a storage's elements are."""
        self.kept.append(tensor)
        self.rows[storage(tensor)] = rows

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it, and see where rows go."""
        kwargs, name = kwargs or {}, function.overloadpacket
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if name is torch.ops.aten.copy_:
            target, source = args[:2]
            if storage(source) in self.rows:
                self.kept.append(target)
                self.writes.setdefault(storage(target), []).append((target, source.expand(target.shape)))
            return target if target.is_meta or source.is_meta else function(*args, **kwargs)
        result = self.done(function, given, args, kwargs)
        known = [one for one in given if storage(one) in self.rows]
        for made in tree_leaves(result) if known else ():
            if not isinstance(made, torch.Tensor) or any(storage(made) == storage(one) for one in given):
                continue
            if name in COPIES:
                self.comes(made, partial(self.of_view, known[0], made.stride()))
            elif name is torch.ops.aten.cat:
                dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
                self.comes(made, partial(self.of_joined, args[0], dim % made.ndim, made))
            else:
                self.comes(made, partial(self.computed, known[0]))
        return result

    def done(self, function: Any, given: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """What an operation gives: without memory if it is large, or made of what has none."""
        arguments = {argument.name for argument in function._schema.arguments}
        to_meta = {"device": torch.device("meta")} if "device" in arguments else {}
        if any(one.is_meta for one in given):
            real = [one for one in given if not one.is_meta]
            if real and function._schema.name.endswith("_"):
                return args[0]
            args, kwargs = tree_map(without_memory, (args, kwargs))
            return function(*args, **{**kwargs, **to_meta})
        # What makes a tensor of a given size.
        if "pin_memory" in arguments and function.overloadpacket is not torch.ops.aten._to_copy:
            try:
                large = function(*tree_map(without_memory, args), **{**tree_map(without_memory, kwargs), **to_meta})
            except (NotImplementedError, RuntimeError):
                return function(*args, **kwargs)
            if large.numel() > LARGEST:
                return large
        return function(*args, **kwargs)

    def codes(self, view: torch.Tensor, index: list[torch.Tensor]) -> torch.Tensor:
        """What is at an index of a tensor; -1 of what was not loaded."""
        at = torch.tensor(int(view.storage_offset()))
        for one, stride in zip(index, view.stride(), strict=True):
            at = at + one * stride
        rows = self.rows.get(storage(view))
        return rows(at) if rows is not None else torch.full_like(at, -1)

    def of_rows(self, number: int, size: int, at: torch.Tensor) -> torch.Tensor:
        """What is at positions of a tensor to be loaded, with so many elements in a row."""
        return number * ROWS + at // size

    def of_view(self, view: torch.Tensor, strides: tuple[int, ...], at: torch.Tensor) -> torch.Tensor:
        """What is at positions of a copy of a view."""
        return self.codes(view, unravelled(at, tuple(view.shape), strides))

    def of_joined(self, pieces: list[torch.Tensor], dim: int, whole: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """What is at positions of several one after the other."""
        index = unravelled(at, tuple(whole.shape), whole.stride())
        found, start = torch.full_like(at, -1), 0
        for piece in pieces:
            inside = (index[dim] >= start) & (index[dim] < start + piece.shape[dim])
            place = [one[inside] - (start if axis == dim else 0) for axis, one in enumerate(index)]
            found[inside] = self.codes(piece, place)
            start += piece.shape[dim]
        return found

    def computed(self, view: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """What is at positions of what was made from a tensor: no row of it."""
        first = self.codes(view, [torch.zeros((), dtype=torch.int64)] * view.ndim)
        return torch.where(first < 0, first, first // ROWS * ROWS + ROWS - 1).expand(at.shape)

    def held(self, parameter: torch.Tensor) -> list[list[Any]]:
        """The runs of rows in a parameter: [tensor, first row, rows]; of experts, the tensors in their order."""
        whole = parameter.detach()
        given = [(whole, whole)] if storage(whole) in self.rows else self.writes.get(storage(whole), [])
        size = max(1, math.prod(whole.shape[1 if whole.ndim < 3 else 2 :]))
        places, codes = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        for target, source in given:
            if target.storage_offset() % size or not target.numel():
                continue
            # A row is told by its first number.
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
        # Of what is written twice the last counts.
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
    """A tensor of this shape on no device."""
    if not isinstance(one, torch.Tensor) or one.is_meta:
        return one
    return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")


def storage(tensor: torch.Tensor) -> int:
    """What tells its memory from others'."""
    return int(tensor.untyped_storage()._cdata)


def unravelled(at: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> list[torch.Tensor]:
    """Positions in dense memory as an index of each axis."""
    index = [torch.zeros_like(at)] * len(shape)
    for axis in sorted(range(len(shape)), key=lambda axis: (strides[axis], -shape[axis]), reverse=True):
        if shape[axis] > 1:
            index[axis], at = at // strides[axis], at % strides[axis]
    return index


def describe(directory: Path) -> dict[str, Any]:
    """What is asked and built of one directory."""
    config = EngineArgs(
        model=str(directory),
        dtype="float32",
        enforce_eager=True,
        # With latent attention and a state its CPU build turns it off after sizes were set that need it.
        enable_prefix_caching=False,
        max_model_len=64,
        skip_tokenizer_init=True,
    ).create_engine_config()
    path = directory / "shapes.json"
    shapes: dict[str, list[int]] = json.loads(path.read_text()) if path.exists() else {}
    asking = config.quant_config
    with set_current_vllm_config(config), tempfile.NamedTemporaryFile() as rendezvous:
        init_distributed_environment(1, 0, f"file://{rendezvous.name}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        followed = RowTracer(shapes)
        with set_default_torch_dtype(torch.float32), torch.no_grad(), followed:
            model = initialize_model(config)
            if shapes:
                model.load_weights(followed.tensors())
    names = list(shapes)
    layers: dict[str, Any] = {}
    for name, module in model.named_modules():
        prefix = asking.asked.get(id(module))
        if not isinstance(module, LinearBase | RoutedExperts | VocabParallelEmbedding):
            continue
        experts = getattr(module, "global_num_experts", 0)
        holds = {key: followed.held(value) for key, value in module.named_parameters(recurse=False)}
        held = dict.fromkeys(tensor for key, runs in holds.items() if "weight" in key for tensor, _, _ in runs)
        # A list has experts by the module that holds them, and each of the first.
        own = [place for tensor in held for place in (places(tensor) if experts else [tensor.removesuffix(".weight")])]
        layers[name] = {
            "kinds": [base.__name__ for base in type(module).__mro__ if base.__module__.startswith("vllm.")],
            "asked": prefix is not None,
            "prefix": prefix if prefix is not None else getattr(module, "prefix", name),
            "skipped": asking.skipped(prefix) if prefix else None,
            "divided": not getattr(module, "disable_tp", False),
            "experts": experts,
            "sizes": list(getattr(module, "output_sizes", None) or [getattr(module, "output_size", 0)]),
            "own": bool(prefix) and asking.listed(prefix, own),
            "named": bool(prefix) and asking.listed(prefix, own, prefix),
            "holds": holds,
        }
    read = {name for layer in layers.values() for runs in layer["holds"].values() for name, _, _ in runs}
    read |= {name for value in model.parameters() for name, _, _ in followed.held(value)}
    modules = [name.removesuffix(".weight") for name in names]
    # Of classes that do not have lists renamed, their own is of no use for these.
    mapped = asking.mapper.get_rename_mapper() if asking.mapper is not None else None
    renamed = {module: mapped.map_name(module) for module in modules} if mapped is not None else {}
    return {
        "layers": layers,
        "unread": [name for name in names if name not in read],
        "packed": {key: list(value) for key, value in asking.packed_modules_mapping.items()},
        "mapper": {module: other for module, other in renamed.items() if other != module},
        "version": str(vllm.__version__),
    }


def places(tensor: str) -> list[str]:
    """The module of an expert's tensor, that of its expert and of all; of a stack, that and the one that it lies in."""
    module = tensor.removesuffix(".weight")
    return [".".join(module.split(".")[: -end or None]) for end in range(3)]


def answer(directory: Path, output: Path) -> None:
    """Write `output`.json, or `output`.error with the traceback."""
    os.sched_setaffinity(0, CPUS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for what, most in ((resource.RLIMIT_AS, held + MEMORY), (resource.RLIMIT_FSIZE, FILE), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (most, most))
    try:
        # Else vLLM starts an interpreter to look at the class.
        for name in json.loads((directory / "config.json").read_text())["architectures"]:
            if name in ModelRegistry.models:
                ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
        output.with_suffix(".json").write_text(json.dumps(describe(directory)))
    except BaseException:
        output.with_suffix(".error").write_text(traceback.format_exc())
    os._exit(0)


def main() -> None:
    """A fork for each directory: nothing is left from one to the next, and one that dies takes no other down."""
    output, *directories = sys.argv[1:]
    # Else the Transformers backend loads a processor, to see whether that takes images or sounds.
    MultiModalProcessingInfo._get_supported_modalities = lambda _: ["image"]
    gc.freeze()
    fork = multiprocessing.get_context("fork")
    running: list[Any] = []
    for number, directory in enumerate(directories):
        # Its sentinel tells nothing of a process here: vLLM closes it.
        while len(running) >= len(CPUS):
            time.sleep(0.02)
            running = [process for process in running if process.is_alive()]
        running.append(fork.Process(target=answer, args=(Path(directory), Path(output, str(number)))))
        running[-1].start()
    for process in running:
        process.join()


if __name__ == "__main__":
    main()
