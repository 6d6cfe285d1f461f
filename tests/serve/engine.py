"""Asks vLLM about model directories. The engine's own interpreter runs this; openquant is not there.

Each line of stdin is a question, [mode, output, environment, *directories] in JSON:

    logprobs       of random prompts
    text           of text_prompts.json, which are of examples/tiny-qwen3's tokenizer
    FILE.json      of the prompts in a file like text_prompts.json
    pooled         embeddings or the scores of classes, of random prompts
    layers
    auto, fp8      what is kept of a token in a cache of that dtype

Answers lie in OUTPUT, one for each directory, and last `done`. Importing vLLM takes longer than a tiny model does, so it
is imported once and each directory gets a fork of that process, as many at a time as there are CPUs.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Before the imports. The fork itself runs the model, and nothing is compiled: that costs seconds for each.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
# One fork for each CPU, so one thread for each fork. The imports bind this thread to one of the CPUs.
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"ENGINE_CPUS": " ".join(map(str, os.sched_getaffinity(0)))}

import configurations
import numpy as np
import torch  # Before vLLM, whose CPU build finds OpenMP through it.
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_embedding import (
    CompressedTensorsEmbeddingWNA16Int,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import CompressedTensorsMoEMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.transformers.multimodal import MultiModalProcessingInfo
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors

# A quantized checkpoint's missing parameters are no error without this (model_loader/default_loader.py:505).
TRACKED = {"enable_weights_track": True}
# What a class does not say that it has loaded, by a part of its name.
UNSAID = {
    # layers/fused_moe/runner/moe_runner.py:301 hands on experts alone.
    "LagunaForCausalLM": "experts.routed_experts.e_score_correction_bias",
    # models/granitemoehybrid.py:511
    "GraniteMoeHybridForCausalLM": ".block_sparse_moe.experts.",
}
CHECK = DefaultModelLoader.track_weights_loading
CONFIGURE_EXPERTS = FusedMoEConfig.__post_init__
QUANTIZED = (
    *(Fp8LinearMethod, Fp8MoEMethod, CompressedTensorsLinearMethod, CompressedTensorsMoEMethod),
    CompressedTensorsEmbeddingWNA16Int,
)
PROMPTS, LENGTH = 4, 64
TEXT = Path(__file__).parent / "text_prompts.json"
# Engines are never put away, which takes as long as setting one up: their processes just end.
HELD: list[LLM] = []
CPUS = {int(number) for number in os.environ["ENGINE_CPUS"].split()}


def vocabulary_of(directory: Path) -> int:
    """How many tokens a model knows."""
    config = json.loads((directory / "config.json").read_text())
    config = config.get("thinker_config", config)
    return config.get("text_config", config)["vocab_size"]


def random_prompts(vocabulary: int) -> list[list[int]]:
    """Tokens, [PROMPTS][LENGTH]."""
    chosen = random.Random(1234)
    return [[chosen.randrange(4, vocabulary) for _ in range(LENGTH)] for _ in range(PROMPTS)]


def logprobs(directory: Path, prompts: list[list[int]]) -> np.ndarray:
    """Log-probability of every token at every position of prompts of one length, [prompts * (length - 1), vocabulary]."""
    vocabulary, length = vocabulary_of(directory), len(prompts[0])
    engine = LLM(
        str(directory),
        dtype="bfloat16",
        distributed_executor_backend="uni",
        enable_prefix_caching=False,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        max_logprobs=-1,
        max_model_len=length + 16,
        max_num_batched_tokens=512,
        max_num_seqs=4,
        language_model_only=True,
        model_loader_extra_config=TRACKED,
        seed=0,
        skip_tokenizer_init=True,
    )
    HELD.append(engine)
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    # Nothing precedes the first token of a prompt.
    tables = [np.full((length - 1, vocabulary), np.nan, np.float32) for _ in answers]
    for answer, table in zip(answers, tables, strict=True):
        found = answer.prompt_logprobs
        np.put_along_axis(table, found.logprob_token_ids.numpy().astype(np.int64), found.logprobs.numpy(), 1)
    return np.concatenate(tables)


def pooled(directory: Path, prompts: list[list[int]]) -> np.ndarray:
    """The embedding of each prompt, or the score of each of its classes."""
    engine = LLM(
        str(directory),
        runner="pooling",
        dtype="bfloat16",
        distributed_executor_backend="uni",
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        max_model_len=len(prompts[0]) + 16,
        model_loader_extra_config=TRACKED,
    )
    HELD.append(engine)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    if json.loads((directory / "config.json").read_text())["architectures"][0].endswith("Classification"):
        return np.array([found.outputs.probs for found in engine.classify(inputs, use_tqdm=False)])
    return np.array([found.outputs.embedding for found in engine.embed(inputs, use_tqdm=False)])


def keep_tensors(self: LogprobsProcessor, found: LogprobsTensors) -> None:
    """For vLLM's method: a prompt's log-probabilities as they are, whose lists in Python take longer than the model."""
    self.prompt_logprobs = found


def check(self: DefaultModelLoader, model: torch.nn.Module, loaded: set[str], quantized: bool = False) -> None:
    """For vLLM's method, which knows each parameter by one name, though a router is a part of experts too."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    unsaid = UNSAID.get(type(model).__name__)
    for alike in names.values():
        if loaded.intersection(alike) or (unsaid and unsaid in alike[0]):
            loaded.update(alike)
    CHECK(self, model, loaded, quantized)


def configure_experts(self: FusedMoEConfig) -> None:
    """For vLLM's method, which refuses experts without a gate on a CPU at last (layers/fused_moe/config.py:1399)."""
    with suppress(NotImplementedError):
        CONFIGURE_EXPERTS(self)


def select_backend(moe_config: FusedMoEConfig) -> tuple[UnquantizedMoeBackend, None]:
    """For vLLM's function, which finds no kernel for experts without a gate on a CPU."""
    return UnquantizedMoeBackend.CPU, None


@contextmanager
def built(directory: Path, **options: Any) -> Iterator[tuple[VllmConfig, torch.nn.Module]]:
    """A model without its weights, within what vLLM builds it in."""
    config = EngineArgs(
        model=str(directory),
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=LENGTH,
        skip_tokenizer_init=True,
        **options,
    ).create_engine_config()
    with set_current_vllm_config(config), tempfile.NamedTemporaryFile() as rendezvous:
        init_distributed_environment(1, 0, f"file://{rendezvous.name}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(config)
        yield config, model


def layers(directory: Path) -> dict[str, Any]:
    """Which layers vLLM builds as FP8, whether the directory's weights fill the model, and scales of keys and values."""
    with built(directory, model_loader_extra_config=TRACKED) as (config, model):
        quantized = {
            getattr(module, "layer_name", name): isinstance(module.quant_method, QUANTIZED)
            for name, module in model.named_modules()
            if isinstance(module, LinearBase | RoutedExperts | VocabParallelEmbedding)
        }
        if any(directory.glob("*.safetensors")):
            get_model_loader(config.load_config).load_weights(model, config.model_config)
    # What is not loaded is -1.
    scales = {
        name: (float(module.k_scale), float(module.v_scale))
        for name, module in model.named_modules()
        if hasattr(module, "k_scale")
    }
    return {"quantized": quantized, "packed": config.quant_config.packed_modules_mapping, "cache": scales}


def cache(directory: Path, dtype: str) -> dict[str, tuple[str, int, int]]:
    """Of each layer that keeps something: its kind, the bytes of a page and the tokens that one is for."""
    # On a CPU that multiplies bfloat16, vLLM keeps recurrent states in float32, whatever config.json and its
    # options leave it to choose (platforms/cpu.py:303). On GPUs it does not.
    torch.cpu._is_avx512_bf16_supported = lambda: False
    with built(directory, kv_cache_dtype=dtype) as (config, _):
        # Experts are among them, which keep nothing.
        named = config.compilation_config.static_forward_context.items()
        specs = {name: layer.get_kv_cache_spec(config) for name, layer in named if hasattr(layer, "get_kv_cache_spec")}
    return {name: (type(spec).__name__, spec.page_size_bytes, spec.block_size) for name, spec in specs.items() if spec}


def answer(mode: str, directory: Path, output: Path, environment: dict[str, str]) -> None:
    """Ask about one directory; write `output`.npy or `output`.json, or `output`.error with the traceback."""
    os.environ.update(environment)
    os.sched_setaffinity(0, CPUS)
    try:
        # Else vLLM starts an interpreter to look at the class.
        for name in json.loads((directory / "config.json").read_text())["architectures"]:
            if name in ModelRegistry.models:
                ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
        computed = {"logprobs": logprobs, "pooled": pooled}
        if mode in computed:
            np.save(output.with_suffix(".npy"), computed[mode](directory, random_prompts(vocabulary_of(directory))))
        elif mode == "text" or mode.endswith(".json"):
            prompts = json.loads((TEXT if mode == "text" else Path(mode)).read_text())
            np.save(output.with_suffix(".npy"), logprobs(directory, prompts))
        else:
            # Neither computes anything, and so any experts can be built.
            FusedMoEConfig.__post_init__ = configure_experts
            unquantized_fused_moe_method.select_unquantized_moe_backend = select_backend
            found = layers(directory) if mode == "layers" else cache(directory, mode)
            output.with_suffix(".json").write_text(json.dumps(found))
    except Exception:
        output.with_suffix(".error").write_text(traceback.format_exc())
    os._exit(0)


def ask(mode: str, output: Path, environment: dict[str, str], *directories: str) -> None:
    """Ask about each directory in a fork."""
    fork = multiprocessing.get_context("fork")
    running: list[BaseProcess] = []
    for number, directory in enumerate(directories):
        # Its sentinel tells nothing of a process here: vLLM closes it.
        while len(running) >= len(CPUS):
            time.sleep(0.02)
            running = [process for process in running if process.is_alive()]
        running.append(fork.Process(target=answer, args=(mode, Path(directory), output / str(number), environment)))
        running[-1].start()
    for process in running:
        process.join()
    (output / "done").touch()


def main() -> None:
    # What each fork would import.
    importlib.import_module("vllm.v1.worker.cpu_worker")
    configurations.register()
    # Small models have no processor, which the Transformers backend asks whether it takes images or sounds.
    MultiModalProcessingInfo._get_supported_modalities = lambda _: ["image"]
    # What each would look for in all that is imported.
    current_platform.register_triton_kernel_overrides()
    current_platform.register_triton_kernel_overrides = lambda: None
    LogprobsProcessor._update_prompt_logprobs = keep_tensors
    DefaultModelLoader.track_weights_loading = check
    # Else each fork goes through all that was imported, again and again.
    gc.freeze()
    for line in sys.stdin:
        mode, output, environment, *directories = json.loads(line)
        ask(mode, Path(output), environment, *directories)


if __name__ == "__main__":
    main()
