"""All that is asked of transformers beyond what it documents, in one place.

A model is made as `from_pretrained` makes it, but for its weights, and a few of its tensors at a time are loaded by the
same functions. They are private, so the versions they were tested with are held here. Nothing is fetched and nothing of
a model is executed: classes are those that transformers itself lists, built from a config.json of which only plain data
is left.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from typing import Any

from ..errors import OpenQuantError, SourceError, UsageError

# The oldest and the newest release whose private functions were tested; tests/forward/test_streamed_zoo.py runs both.
TESTED = ("5.16", "5.24")
# Classes whose own forward pass fails in a release, and how.
FAILING = {
    ("Llama4ForConditionalGeneration", "5.24"): "its forward pass asks the text model for image outputs",
}


def require_tested(found: str | None) -> None:
    """Refuse a version of transformers that this module was not tested with; None if there is none.

    Raises:
        UsageError: it is too old, too new or missing.
    """
    oldest, newest = (tuple(map(int, name.split("."))) for name in TESTED)
    numbers = re.match(r"(\d+)\.(\d+)", found or "")
    if numbers is None or not oldest <= tuple(map(int, numbers.groups())) <= newest:
        raise UsageError(
            f"running a model takes transformers {TESTED[0]} to {TESTED[1]}; "
            + (f"{found} is installed" if found else "it is not installed"),
            f'pip install "transformers>={TESTED[0]},<{newest[0]}.{newest[1] + 1}"',
        )


def _installed() -> str | None:
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


require_tested(_installed())

import torch  # noqa: E402  (the check comes first)
from torch import nn  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402
from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: E402
from transformers.core_model_loading import (  # noqa: E402
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.integrations import hub_kernels  # noqa: E402
from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: E402
from transformers.modeling_utils import LoadStateDictConfig  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402
from transformers.utils import logging as messages  # noqa: E402

# What config.json may not decide: code to fetch, kernels, how things are computed and handed back, quantization.
_IGNORED = re.compile(
    r"auto_map|custom_pipelines|custom_generate|_?(attn|experts)_implementation(_internal|_autoset)?|.*kernel_config"
    r"|use_kernels|fusion_config|distributed_config|quantization_config|compression_config|transformers_weights"
    r"|_?name_or_path|_?output_attentions|output_hidden_states|output_router_logits|use_return_dict|return_dict"
    r"|torchscript|gradient_checkpointing|_commit_hash|dtype|torch_dtype|num_labels|id2label|label2id"
)
# Architectures and model types whose own code adds nothing but draft layers to one of transformers, or that it calls
# otherwise.
_SAME = {
    "MiMoForCausalLM": "Qwen2ForCausalLM",
    "mimo": "qwen2",
    "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "TeleChat3ForCausalLM": "LlamaForCausalLM",
}
# What classes of stacked experts say of themselves where transformers computes them as all others, for those that
# compute in a way of their own.
_OF_STACKS = {
    "Llama4TextExperts": {"is_concatenated": True, "is_transposed": True, "has_gate": True},
    "Step3p7Experts": {"is_concatenated": True, "is_transposed": False, "has_gate": True},
}
# Computed when a model is made, such as rotary frequencies; gigabytes of them are somebody's mistake.
_MOST_BUFFERS = 1 << 30


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Meanwhile transformers fetches no kernels, shows no progress bar and says nothing below errors."""
    kernels, bars, level = hub_kernels._kernels_enabled, messages._tqdm_active, messages.get_verbosity()
    hub_kernels._kernels_enabled = False
    messages._tqdm_active = False
    messages.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hub_kernels._kernels_enabled, messages._tqdm_active = kernels, bars
        messages.set_verbosity(level)


def model_class(architecture: str, model_type: object) -> type[PreTrainedModel]:
    """The class of transformers that a config.json names.

    Args:
        architecture: first of its `architectures`; where letters differ from the class only in case, that is the one.
        model_type: as config.json has it.

    Raises:
        SourceError: transformers has no such language model.
    """
    listed = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    names = {name for mapping in listed for name in mapping.values()}
    own = [mapping[model_type] for mapping in listed if isinstance(model_type, str) and model_type in mapping]
    architecture = _SAME.get(architecture, architecture)
    alike = (name for name in own if name.lower() == architecture.lower())
    name = architecture if architecture in names else next(alike, None)
    if name is None:
        raise SourceError(
            f"transformers {_installed()} has no language model {architecture} (model_type {model_type!r})",
            "a newer transformers may have it; code that comes with a model is not executed",
        )
    release = ".".join((_installed() or "").split(".")[:2])
    if (name, release) in FAILING:
        raise SourceError(
            f"{name} of transformers {_installed()} cannot be run: {FAILING[name, release]}",
            f'pip install "transformers>={TESTED[0]},<{release}"',
        )
    import transformers

    with quiet_transformers():
        try:
            found = getattr(transformers, name)
        except (ImportError, RuntimeError) as error:
            raise SourceError(f"{name} cannot be imported: {_first_line(error)}", "install what it needs") from error
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise SourceError(f"{name} of transformers {_installed()} is not a model here", "install what it needs")
    return found


def make_config(kind: type[PreTrainedModel], config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """The configuration object of a class.

    Args:
        kind: the class.
        config: config.json.
        dtype: what is computed in.

    Raises:
        SourceError: transformers refuses it, or it belongs to another class.
    """
    made = kind.config_class
    assert made is not None
    plain = _plain(config)
    told = plain.get("model_type")
    if _SAME.get(str(told), told) == made.model_type:
        plain["model_type"] = made.model_type
    else:
        # The text model of a wrapper has its part of the wrapper's.
        inner = [
            part for part in plain.values() if isinstance(part, dict) and part.get("model_type") == made.model_type
        ]
        if not inner:
            raise SourceError(
                f"config.json has model_type {told!r}, but {kind.__name__} is of {made.model_type!r}",
                "download or copy config.json again",
            )
        plain = inner[0]
    try:
        with quiet_transformers():
            found = made.from_dict(plain)
    except Exception as error:
        raise SourceError(
            f"transformers {_installed()} refuses config.json: {_first_line(error)}", "download or copy it again"
        ) from error
    for part in (found, *(getattr(found, name) for name in found.sub_configs)):
        if part is not None:
            part.dtype = dtype
    return found


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _plain(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not _IGNORED.fullmatch(key)
    }


def empty_model(kind: type[PreTrainedModel], config: Any, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A model whose parameters are on the meta device, and whose other tensors are what `from_pretrained` computes.

    Raises:
        SourceError: transformers cannot make it.
    """
    try:
        with quiet_transformers(), ExitStack() as stack:
            for context in kind.get_init_context(dtype, False, False, None):
                stack.enter_context(context)
            model: Any = kind(config)
        with quiet_transformers():
            needed = sum(buffer.nbytes for _, buffer in model.named_buffers())
            if needed > _MOST_BUFFERS:
                raise ValueError(f"its buffers are {needed:,} bytes")
            model.tie_weights()
            # Only what no checkpoint stores is left to be computed.
            for parameter in model.parameters():
                parameter._is_hf_initialized = True
            model._move_missing_keys_from_meta_to_device(stored_buffers(model), {"": device}, None, None)
            model._initialize_missing_keys(False)
            # Models ask weights that are not loaded yet what to compute in; some stay in float32.
            for part, kept in model._get_dtype_plan(dtype).items():
                for name, parameter in model.named_parameters():
                    parameter.data = parameter.data.to(kept) if part in name else parameter.data
    except Exception as error:
        raise SourceError(
            f"transformers {_installed()} cannot make {kind.__name__} of this config.json: {_first_line(error)}",
            "download or copy it again; if it is sound, another version of transformers may know it",
        ) from error
    for module in model.modules():
        module.__dict__.update(_OF_STACKS.get(type(module).__name__, {}))
    found: PreTrainedModel = model.eval().requires_grad_(False)
    return found


def stored_buffers(model: PreTrainedModel) -> set[str]:
    """Names of the buffers that checkpoints hold."""
    return {name for name, _ in model.named_buffers()} - {name for name, _ in model.named_non_persistent_buffers()}


def output_head(model: PreTrainedModel) -> nn.Module | None:
    """What makes logits of hidden states; None where there is no such module."""
    anything: Any = model
    found: nn.Module | None = anything.get_output_embeddings()
    return found


def is_layer(model: PreTrainedModel, name: str, module: nn.Module) -> bool:
    """Whether a module is one of those that models repeat: a decoder layer."""
    kinds = set(model._no_split_modules or ())
    numbered = name.rpartition(".")[2].isdigit()
    return numbered and (isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in kinds)


def cache_argument(model: PreTrainedModel) -> str:
    """The keyword under which a model's `forward` and `generate` take a KV cache.

    `cache` from transformers 5.24 on; before that `cache_params` in state-space models, else `past_key_values`.
    """
    parameters = signature(model.forward).parameters
    return next(name for name in ("cache", "cache_params", "past_key_values") if name in parameters)


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Parameters that are another one where the checkpoint does not hold both."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def may_lack(model: PreTrainedModel, name: str) -> bool:
    """Whether a checkpoint need not hold a parameter."""
    return any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_missing or ())


def parameter_targets(model: PreTrainedModel, names: Mapping[str, Any]) -> dict[str, str]:
    """The parameter that each tensor of a checkpoint becomes or is a part of, for those the model has a place for."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    known, prefix = model.state_dict(), model.base_model_prefix
    found = {}
    for name in names:
        target, _ = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, _ = rename_source_key(name, [], [], prefix, known)
        if target in known:
            found[name] = target
    return found


def load_tensors(model: PreTrainedModel, slices: Mapping[str, Any], dtype: torch.dtype, device: str) -> None:
    """Put tensors of a checkpoint where they belong in a model, renamed, split and stacked as they need be.

    Args:
        model: it has placeholders there.
        slices: by the checkpoint's names; `slice[...]` is the tensor.
        dtype: of what the model does not keep in float32.
        device: where to.

    Raises:
        SourceError: a tensor does not fit.
    """
    # Each of the mapping remembers what it was used for.
    mapping: Any = get_model_conversion_mapping(model)
    plan = model._get_dtype_plan(dtype)
    config = LoadStateDictConfig(device_map={"": device}, dtype=dtype, dtype_plan=plan, weight_mapping=mapping)
    with quiet_transformers():
        info, _ = convert_and_load_state_dict_in_model(model, dict(slices), config)
    for name, found, expected in sorted(info.mismatched_keys):
        raise SourceError(
            f"{name} is {list(found)}, but by config.json it must be {list(expected)}",
            "config.json belongs to other weights: download or copy the checkpoint again",
        )
    for name, text in sorted(info.conversion_errors.items()):
        raise _of_conversion(name, text)


def _of_conversion(name: str, text: str) -> OpenQuantError:
    lines = [line for line in text.splitlines() if line.strip()] or ["unknown"]
    return SourceError(
        f"{name} cannot be made of the checkpoint's tensors: {lines[-1].strip()[:300]}",
        "config.json belongs to other weights: download or copy the checkpoint again",
    )


def _first_line(error: Exception) -> str:
    """What an error says first; where that ends in a colon, what follows it too."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    told = lines[:2] if lines[0].endswith(":") else lines[:1]
    return " ".join(told)[:300]
