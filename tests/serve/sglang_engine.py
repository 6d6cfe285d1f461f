"""Asks SGLang's own loader about model directories. The engine's own interpreter runs this; openquant is not there.

    sglang_engine.py OUTPUT DIRECTORY:PLAIN:SOURCE...

PLAIN holds the same model in bfloat16, with the weights that DIRECTORY's codes and scales stand for, and with experts one
by one; SOURCE holds it as it is published. SGLang builds and loads the first two, and every parameter of one is held
against the same parameter of the other: merged layers, experts and renamed modules are the same on both sides, so nothing
here knows of names. Nothing is computed: SGLang's kernels are stand-ins, and it believes to have a GPU, whose kind decides
what it builds.
As in engine.py one process imports it and each directory gets a fork, as many at a time as there are CPUs.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import socket
import sys
import traceback
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Before the imports.
os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_LOGGING_LEVEL": "error"}

import sglang_standins  # noqa: F401  (before SGLang)
import torch
from sglang.srt.configs import update_config
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.layers import linear
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.managers.scheduler import spawn_world_rank
from sglang.srt.model_loader.loader import DefaultModelLoader, _get_quantization_config, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

# Codes, an element each, or several in one.
CODES = (torch.float8_e4m3fn, torch.int8, torch.int32, torch.uint8)
# What it joins only where nothing is quantized (models/kimi_linear.py:259, models/muse_glimmer.py:194).
APART = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "fused_qkvbfg_a_proj": ("qkv_proj", "b_proj", "f_a_proj", "g_a_proj"),
    "fused_fg_b_proj": ("f_b_proj", "g_b_proj"),
}
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# What has no attention in its first layer is refused with most.
BACKENDS = {"lfm2": "torch_native", "lfm2_moe": "torch_native"}
CPUS = os.sched_getaffinity(0)


class Rotary(torch.nn.Identity):
    """Stands in for a rotary embedding, which has no weights and asks for kernels."""

    # What some classes take for its forward (models/bailing_moe_linear.py:111).
    forward_cuda = torch.nn.Identity.forward


factory.get_rope_cpu = Rotary
torch.set_num_threads(1)
# On a CPU it would pad what does not divide into blocks.
update_config.may_get_weight_block_size = lambda *_: None
# Nor pad zero points, which it counts as rows, of what files hold joined (layers/linear.py:919).
linear._is_cpu = False


def model_config(directory: Path) -> ModelConfig:
    """SGLang's reading of config.json, made the process's own."""
    args = ServerArgs(
        model_path=str(directory),
        device="cpu",
        attention_backend=BACKENDS.get(json.loads((directory / "config.json").read_text())["model_type"], "triton"),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        disable_radix_cache=True,
    )
    ranks = SpawnRanks(world_rank=spawn_world_rank(args, tp_rank=0, pp_rank=0), dp_rank=None, gpu_id=0)
    publish(args, role="scheduler", ranks=ranks)
    if not torch.distributed.is_initialized():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=port)
    # As model_executor/model_runner.py does on a CPU.
    config = update_config.adjust_config_with_unaligned_cpu_tp(ModelConfig.from_server_args(args), LoadConfig(), 1)
    bootstrap.init_layer_runtime(model_config=config)
    return config


def load(directory: Path) -> torch.nn.Module:
    """A model as SGLang builds and fills it; what it does not fill is NaN."""
    config = model_config(directory)
    how = LoadConfig()
    with set_default_torch_dtype(torch.bfloat16), torch.device("cpu"):
        model = _initialize_model(config, how, _get_quantization_config(config, how))
    for parameter in model.parameters():
        if parameter.dtype.is_floating_point:
            parameter.data.fill_(float("nan"))
    loader = DefaultModelLoader(how)
    loader.load_weights_only(model, loader._get_all_weights(config, model), torch.device("cpu"))
    return model


def values(model: torch.nn.Module, name: str, parameter: torch.nn.Parameter, columns: int) -> torch.Tensor:
    """What a parameter of a weight with so many columns stands for: codes are multiplied by their scales."""
    if parameter.dtype not in CODES:
        return parameter.data.float()
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    if parameter.dtype == torch.int32:
        words, scale = parameter.data, getattr(module, f"{last}_scale").data.float()
        if getattr(parameter, "is_transposed", False):
            # Experts lie turned.
            words, scale = words.mT, scale.mT
        bits = 32 * words.shape[-1] // columns
        places = [(words >> place) & (2**bits - 1) for place in range(0, 32, bits)]
        codes = torch.stack(places, dim=-1).flatten(-2).float()
        zero = getattr(module, f"{last}_zero_point", None)
        if zero is None:
            return (codes - 2 ** (bits - 1)) * spread(scale, codes.shape, [])
        # Those of several rows share a word.
        words = zero.data.mT if getattr(zero, "is_transposed", False) else zero.data
        rows = torch.stack([(words >> place) & (2**bits - 1) for place in range(0, 32, bits)], dim=-2).flatten(-3, -2)
        return (codes - spread(rows.float(), codes.shape, [])) * spread(scale, codes.shape, [])
    if parameter.dtype == torch.uint8:
        both = torch.tensor([*FP4, *(-value for value in FP4)])
        codes = torch.stack([both[(parameter.data & 15).int()], both[(parameter.data >> 4).int()]], -1).flatten(-2)
        # Each merged layer has room for one, which all have alike.
        over = getattr(module, f"{last}_global_scale").data.reshape(*codes.shape[:-2], -1).amax(-1)[..., None, None]
        return codes * spread(getattr(module, f"{last}_scale").data.float() / over, codes.shape, [])
    scale = next(getattr(module, found) for end in ("_scale", "_scale_inv") if hasattr(module, found := last + end))
    return parameter.data.float() * spread(scale.data.float(), parameter.shape, getattr(module, "logical_widths", []))


def spread(scale: torch.Tensor, shape: torch.Size, widths: list[int]) -> torch.Tensor:
    """A scale for each code of [..., out, in], of one for each matrix, of each merged one, each row or each block."""
    *stack, rows, cols = shape
    if scale.dim() <= 1 + len(stack) and scale.shape[-1:] != (rows,):
        # One for each of the merged matrices.
        parts = scale.shape[-1] if scale.dim() > len(stack) else 1
        heights = widths if len(widths) == parts else [rows // parts] * parts
        return scale.reshape(*stack, parts, 1).repeat_interleave(torch.tensor(heights), -2)
    high, wide = (-(-size // count) for size, count in zip((rows, cols), scale.shape[-2:], strict=True))
    grid = scale.repeat_interleave(high, -2)[..., :rows, :]
    return grid.repeat_interleave(wide, -1)[..., :cols]


def read(directory: Path) -> tuple[dict[str, torch.Tensor], str | None]:
    """The parameters of a model in bfloat16, and why SGLang does not load it; None if it does."""
    try:
        parameters = {name: parameter.data for name, parameter in load(directory).named_parameters()}
    except Exception as error:
        return {}, f"{type(error).__name__}: {error}"
    missing = [name for name, value in parameters.items() if value.isnan().any()]
    return parameters, f"in bfloat16 it leaves {missing} unfilled" if missing else None


def compare(directory: Path, plain: Path, source: Path) -> dict[str, Any]:
    """What SGLang made of a directory, beside what it made of the same model in bfloat16.

    Returns: `not_run`, why there is nothing to compare with, since it does not load the source in bfloat16 either, or
    None; `codes`, how many codes it has room for; `unfilled` and `differing`, the parameters that the quantized
    files left alone, or that do not stand for what the other has; `cache`, the scales of keys and values.
    """
    reference, reason = read(plain)
    if reason is not None:
        if read(source)[1] is None:
            raise ValueError(f"it loads the source, but not with the names that outputs have: {reason}")
        return {"not_run": reason}

    model = load(directory)
    # Words stand for the weight that they are named after.
    parameters = {name.removesuffix("_packed"): parameter for name, parameter in model.named_parameters()}
    unfilled, differing, codes = [], [], 0
    for name, expected in reference.items():
        path, last = name.removesuffix(".weight").rpartition(".")[::2]
        parts = [name] if name in parameters else [f"{path}.{part}.weight" for part in APART.get(last, ())]
        found = [values(model, part, parameters[part], expected.shape[-1]) for part in parts]
        value = torch.cat(found).reshape(expected.shape).bfloat16() if found else None
        codes += sum(each.numel() for part, each in zip(parts, found, strict=True) if parameters[part].dtype in CODES)
        if value is not None and value.isnan().any():
            unfilled.append(name)
        elif value is None or not torch.equal(value, expected.bfloat16()):
            differing.append(name)
    cache = {
        name: float(parameter) for name, parameter in parameters.items() if name.endswith((".k_scale", ".v_scale"))
    }
    return {"not_run": None, "codes": codes, "unfilled": unfilled, "differing": differing, "cache": cache}


def answer(directory: Path, plain: Path, source: Path, output: Path) -> None:
    """Ask about one directory; write `output`.json, or `output`.error with the traceback."""
    try:
        output.with_suffix(".json").write_text(json.dumps(compare(directory, plain, source)))
    except Exception:
        output.with_suffix(".error").write_text(traceback.format_exc())
    os._exit(0)


def main() -> None:
    output, *asked = sys.argv[1:]
    # What each fork would import.
    importlib.import_module("sglang.srt.models.registry")
    importlib.import_module("configurations").register()
    gc.freeze()
    fork = multiprocessing.get_context("fork")
    running: dict[int, BaseProcess] = {}
    for number, directories in enumerate(asked):
        while len(running) >= len(CPUS):
            for sentinel in wait(list(running)):
                running.pop(sentinel).join()
        process = fork.Process(target=answer, args=(*map(Path, directories.split(":")), Path(output, str(number))))
        process.start()
        running[process.sentinel] = process
    for process in running.values():
        process.join()


if __name__ == "__main__":
    main()
