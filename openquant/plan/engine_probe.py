"""Says what vLLM builds of models, and what it asks a quantization for. An interpreter with vLLM runs this by itself.

    python engine_probe.py OUTPUT DIRECTORY...

A directory has a config.json with a quantization_config of {"quant_method": "asked", "ignored_layers": [...]}, and may
have a shapes.json: the shape of each tensor of a checkpoint. OUTPUT/<number>.json says of each directory

    layers    by path: its class and bases ("kinds"), whether it asks for a quantization ("asked") and by which name
              ("prefix"), whether ignored_layers has it ("skipped"), whether ranks divide it ("divided"), how many
              experts it has, and what is loaded into its weights ("holds"): by parameter, [tensor, first row, rows]
    unread    tensors of the checkpoint that are loaded into nothing
    packed    packed_modules_mapping
    mapper    modules of the checkpoint that the engine renames, and their names then

or OUTPUT/<number>.error says why there is none. With shapes the model is built on the CPU in float32: every number that
is loaded says which row of which tensor it is, so that nothing depends on what a class says of itself. Without, nothing
has memory. No code of a repository is run, and nothing is fetched.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# The imports bind this thread to one of the CPUs.
os.environ |= {"ENGINE_CPUS": " ".join(map(str, os.sched_getaffinity(0)))}

import torch  # Before vLLM, whose CPU build finds OpenMP through it.
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
from vllm.utils.torch_utils import set_default_torch_dtype

CPUS = {int(number) for number in os.environ["ENGINE_CPUS"].split()}
# A row's number is tensor * ROWS + row; float32 has all whole numbers up to 1 << 24.
ROWS = 4096


@register_quantization_config("asked")
class Asking(QuantizationConfig):  # type: ignore[misc]
    """A quantization that quantizes nothing, and remembers what it was asked for."""

    def __init__(self, ignored: list[str]) -> None:
        super().__init__()
        self.ignored = ignored
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
    def from_config(cls, config: dict[str, Any]) -> Asking:
        """Of quantization_config."""
        return cls(config.get("ignored_layers", []))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """As Fp8Config does."""
        self.ignored = hf_to_vllm_mapper.apply_list(self.ignored)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """What computes nothing differently; None for attention, as where there are no scales for its cache."""
        self.asked[id(layer)] = prefix
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        if isinstance(layer, RoutedExperts):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        return UnquantizedEmbeddingMethod() if isinstance(layer, VocabParallelEmbedding) else None

    def skipped(self, prefix: str) -> bool | None:
        """Whether a layer is listed, as Fp8Config decides it; None where it refuses a list of some parts only."""
        try:
            return bool(is_layer_skipped(prefix, self.ignored, self.packed_modules_mapping))
        except ValueError:
            return None


def numbered(shapes: dict[str, list[int]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in which every number says where it stands: which tensor, and which row (of a stack: which expert)."""
    for number, (name, shape) in enumerate(shapes.items()):
        rows = torch.arange(shape[0] if shape else 1, dtype=torch.float32) % ROWS + number * ROWS
        yield name, rows.reshape(-1, *[1] * (len(shape) - 1)).expand(shape).contiguous() if shape else rows[0]


def held(parameter: torch.Tensor, names: list[str]) -> list[list[Any]]:
    """The runs of rows in a parameter: [tensor, first row, rows]; of experts, those of every expert after another."""
    rows = parameter.detach()
    if rows.ndim > 1:
        rows = rows.flatten(2)[..., 0] if rows.ndim > 2 else rows[:, 0]
    runs: list[list[Any]] = []
    for value in rows.flatten().tolist():
        # What is not loaded is not a number; what a class computes from what it loads is none of these.
        if not 0 <= value < len(names) * ROWS or value % 1:
            continue
        name, row = names[int(value) // ROWS], int(value) % ROWS
        if runs and runs[-1][0] == name and runs[-1][1] + runs[-1][2] == row:
            runs[-1][2] += 1
        elif not (parameter.ndim > 2 and runs and runs[-1][:2] == [name, row]):
            runs.append([name, row, 1])
    return runs


def describe(directory: Path) -> dict[str, Any]:
    """What is asked and built of one directory."""
    config = EngineArgs(
        model=str(directory), dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True
    ).create_engine_config()
    path = directory / "shapes.json"
    shapes: dict[str, list[int]] = json.loads(path.read_text()) if path.exists() else {}
    asking = config.quant_config
    with set_current_vllm_config(config), tempfile.NamedTemporaryFile() as rendezvous:
        init_distributed_environment(1, 0, f"file://{rendezvous.name}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(torch.float32), torch.device("cpu" if shapes else "meta"):
            model = initialize_model(config)
        if shapes:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(torch.nan if parameter.is_floating_point() else -1)
                model.load_weights(numbered(shapes))
    names = list(shapes)
    layers: dict[str, Any] = {}
    for name, module in model.named_modules():
        prefix = asking.asked.get(id(module))
        if not isinstance(module, LinearBase | RoutedExperts | VocabParallelEmbedding):
            continue
        layers[name] = {
            "kinds": [base.__name__ for base in type(module).__mro__ if base.__module__.startswith("vllm.")],
            "asked": prefix is not None,
            "prefix": prefix if prefix is not None else getattr(module, "prefix", name),
            "skipped": asking.skipped(prefix) if prefix else None,
            "divided": not getattr(module, "disable_tp", False),
            "experts": getattr(module, "global_num_experts", 0),
            "holds": {key: held(value, names) for key, value in module.named_parameters(recurse=False)}
            if shapes
            else {},
        }
    read = {name for layer in layers.values() for runs in layer["holds"].values() for name, _, _ in runs}
    others = [value for _, value in model.named_parameters()] if shapes else []
    read |= {name for value in others for name, _, _ in held(value, names)}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    modules = [name.removesuffix(".weight") for name in names]
    mapped = mapper.get_rename_mapper() if mapper is not None else None
    renamed = {module: mapped.map_name(module) for module in modules} if mapped is not None else {}
    return {
        "layers": layers,
        "unread": [name for name in names if name not in read],
        "packed": {key: list(value) for key, value in asking.packed_modules_mapping.items()},
        "mapper": {module: other for module, other in renamed.items() if other != module},
    }


def answer(directory: Path, output: Path) -> None:
    """Write `output`.json, or `output`.error with the traceback."""
    os.sched_setaffinity(0, CPUS)
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
