"""All uses of private functions of transformers.

A model is made as `from_pretrained` makes it, but without weights, and a few tensors at a time are loaded by the same
functions. They are private, so this module has the range of versions that it was tested with. Nothing is downloaded,
and no code that comes with a model is executed: classes are those that transformers lists, and only plain data of
config.json reaches them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from inspect import signature
from typing import Any

from ..errors import SourceError, UsageError
from ..machine import first_line

# The oldest and the newest tested release; tests/streaming/test_streamed_architectures.py runs both.
TESTED = ("5.18", "5.24")
# Classes whose forward pass fails in a release of transformers, and why.
FAILING = {("Llama4ForConditionalGeneration", "5.24"): "its forward pass asks the text model for image outputs"}


RELEASE = version("transformers")


def require_tested(installed: str) -> None:
    """Refuse a version of transformers that this module was not tested with, such as "6.0.0".

    Raises:
        UsageError: it is too old or too new.
    """
    oldest, newest = (tuple(map(int, release.split("."))) for release in TESTED)
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers is None or not oldest <= tuple(map(int, numbers.groups())) <= newest:
        raise UsageError(
            f"running a model takes transformers {TESTED[0]} to {TESTED[1]}; {installed} is installed",
            f'pip install "transformers>={TESTED[0]},<{newest[0]}.{newest[1] + 1}"',
        )


require_tested(RELEASE)

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

# Keys of config.json that are ignored: code and kernels to download, choices of implementation and outputs,
# quantization.
_IGNORED = re.compile(
    r"auto_map|custom_pipelines|custom_generate|_?(attn|experts)_implementation(_internal|_autoset)?|.*kernel_config"
    r"|use_kernels|fusion_config|distributed_config|quantization_config|compression_config|transformers_weights"
    r"|_?name_or_path|_?output_attentions|output_hidden_states|output_router_logits|use_return_dict|return_dict"
    r"|torchscript|gradient_checkpointing|_commit_hash|dtype|torch_dtype|num_labels|id2label|label2id"
)
# Architectures and model types that transformers has under another name, or whose own code adds only MTP layers.
_ALIASES = {
    "MiMoForCausalLM": "Qwen2ForCausalLM",
    "mimo": "qwen2",
    "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "TeleChat3ForCausalLM": "LlamaForCausalLM",
}
# Attributes that transformers sets on most modules of stacked experts, for classes with a forward of their own.
_STACK_ATTRIBUTES = {
    "Llama4TextExperts": {"is_concatenated": True, "is_transposed": True, "has_gate": True},
    "Step3p7Experts": {"is_concatenated": True, "is_transposed": False, "has_gate": True},
}
OTHER_WEIGHTS = "config.json or this shard belongs to other weights: download the checkpoint again"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Context manager in which transformers downloads no kernels, shows no progress bars and logs errors only."""
    kernels = hub_kernels._kernels_enabled
    bars = messages._tqdm_active
    level = messages.get_verbosity()
    hub_kernels._kernels_enabled = False
    messages._tqdm_active = False
    messages.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hub_kernels._kernels_enabled = kernels
        messages._tqdm_active = bars
        messages.set_verbosity(level)


def model_class(architecture: str, model_type: object) -> type[PreTrainedModel]:
    """Find the class of transformers that a config.json names.

    Args:
        architecture: the first of `architectures` in config.json. A class of that `model_type` whose name differs only
            in case is taken too.
        model_type: its `model_type`.

    Raises:
        SourceError: transformers has no such language model, or one that fails in this release.
    """
    mappings = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    names = {name for mapping in mappings for name in mapping.values()}
    of_type = [mapping[model_type] for mapping in mappings if isinstance(model_type, str) and model_type in mapping]
    architecture = _ALIASES.get(architecture, architecture)
    same_letters = (name for name in of_type if name.lower() == architecture.lower())
    name = architecture if architecture in names else next(same_letters, None)
    if name is None:
        raise SourceError(
            f"transformers {RELEASE} has no language model {architecture} (model_type {model_type!r})",
            "if the class was only renamed, put its old name into config.json; a newer transformers may have it",
        )
    release = ".".join(RELEASE.split(".")[:2])
    if (name, release) in FAILING:
        raise SourceError(
            f"{name} of transformers {RELEASE} cannot be run: {FAILING[name, release]}",
            f'pip install "transformers>={TESTED[0]},<{release}"',
        )
    import transformers

    with quiet_transformers():
        kind: type[PreTrainedModel] = getattr(transformers, name)
    return kind


def make_config(kind: type[PreTrainedModel], config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Make the configuration object of a model class.

    Args:
        kind: the model class.
        config: contents of config.json.
        dtype: the dtype that the model computes in.

    Returns:
        An object of `kind.config_class`.

    Raises:
        SourceError: transformers refuses it, or it belongs to another class.
    """
    config_class = kind.config_class
    assert config_class is not None
    expected = config_class.model_type

    plain = _plain(config)
    model_type = plain.get("model_type")
    if _ALIASES.get(str(model_type), model_type) == expected:
        plain["model_type"] = expected
    else:
        # The text model of a multimodal model has a part of the config, such as text_config.
        inner = [part for part in plain.values() if isinstance(part, dict) and part.get("model_type") == expected]
        if not inner:
            raise SourceError(
                f"config.json has model_type {model_type!r}, but {kind.__name__} is of {expected!r}",
                "download or copy config.json again",
            )
        plain = inner[0]

    with _explain_errors("refuses config.json", "download or copy it again"):
        config_object = config_class.from_dict(plain)

    for part in (config_object, *(getattr(config_object, name) for name in config_object.sub_configs)):
        if part is not None:
            part.dtype = dtype
    return config_object


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without the ignored keys."""
    return {
        key: _plain(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not _IGNORED.fullmatch(key)
    }


def empty_model(kind: type[PreTrainedModel], config: Any, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Make a model without weights.

    Args:
        kind: its class.
        config: made by `make_config`.
        dtype: the dtype it computes in.
        device: the device of its buffers.

    Returns:
        A model in eval mode whose parameters and stored buffers have no values, and whose other buffers are computed
        as in `from_pretrained`.

    Raises:
        SourceError: transformers cannot make it.
    """
    with _explain_errors(
        f"cannot make {kind.__name__} of this config.json",
        "download or copy it again; if it is sound, another version of transformers may know it",
    ):
        with ExitStack() as stack:
            for context in kind.get_init_context(dtype, False, False, None):
                stack.enter_context(context)
            model: Any = kind(config)

        model.tie_weights()

        # Only buffers that no checkpoint stores are computed then.
        for parameter in model.parameters():
            parameter._is_hf_initialized = True
        model._move_missing_keys_from_meta_to_device(stored_buffers(model), {"": device}, None, None)
        model._initialize_missing_keys(False)
        # Models read the dtype of weights that are not loaded yet. Some weights stay in float32.
        for part, part_dtype in model._get_dtype_plan(dtype).items():
            for name, parameter in model.named_parameters():
                parameter.data = parameter.data.to(part_dtype) if part in name else parameter.data
    for module in model.modules():
        module.__dict__.update(_STACK_ATTRIBUTES.get(type(module).__name__, {}))
    frozen: PreTrainedModel = model.eval().requires_grad_(False)
    return frozen


def stored_buffers(model: PreTrainedModel) -> set[str]:
    """Return the names of the buffers that checkpoints have."""
    return {name for name, _ in model.named_buffers()} - {name for name, _ in model.named_non_persistent_buffers()}


def output_head(model: PreTrainedModel) -> nn.Module | None:
    """Return the module that computes logits from hidden states; None if there is none.

    Some multimodal classes do not name the head of the language model that they hold.
    """
    parts: list[Any] = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    heads: Iterator[nn.Module | None] = (part.get_output_embeddings() for part in parts)
    return next((head for head in heads if head is not None), None)


def is_layer(model: PreTrainedModel, name: str, module: nn.Module) -> bool:
    """Whether a module of a model is a decoder layer, or a layer of a vision or audio tower."""
    class_names = set(model._no_split_modules or ())
    in_list = name.rpartition(".")[2].isdigit()
    return in_list and (isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in class_names)


def cache_argument(model: PreTrainedModel) -> str:
    """Return the keyword under which a model's `forward` and `generate` take a KV cache.

    `cache` from transformers 5.24 on; before that `cache_params` in state-space models, else `past_key_values`.
    """
    parameters = signature(model.forward).parameters
    return next(name for name in ("cache", "cache_params", "past_key_values") if name in parameters)


def is_stateful(model: PreTrainedModel) -> bool:
    """Whether layers of a model keep a state that runs from token to token, as those of Mamba do."""
    return bool(getattr(model, "_is_stateful", False))


def tree_mask(model: PreTrainedModel, visible: torch.Tensor) -> torch.Tensor:
    """Return a mask of four axes as the attention of a model takes it.

    Args:
        model: the model.
        visible: whether each token attends to each other, bool [1, 1, tokens, tokens].

    Returns:
        `visible` itself for torch's attention, which adds nothing to it; else what is added to scores: 0 or the lowest
        number, in the dtype of the model.
    """
    if model.config.get_text_config()._attn_implementation == "sdpa":
        return visible
    lowest = torch.finfo(model.dtype).min
    return torch.zeros(visible.shape, dtype=model.dtype, device=visible.device).masked_fill(~visible, lowest)


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Return the tied parameters: name -> name of the parameter that it shares its weight with."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def may_lack(model: PreTrainedModel, name: str) -> bool:
    """Whether a checkpoint need not have a parameter, by its name."""
    return any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_missing or ())


def parameter_targets(model: PreTrainedModel, names: Mapping[str, Any]) -> dict[str, str]:
    """Find the parameter that each tensor of a checkpoint becomes or is a part of.

    Args:
        model: the model.
        names: names of the checkpoint's tensors; values are not used.

    Returns:
        For each tensor that the model has a parameter or buffer for, its name in the model.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state_dict = model.state_dict()
    prefix = model.base_model_prefix
    targets = {}
    for name in names:
        target, _ = rename_source_key(name, renamings, converters, prefix, state_dict)
        if target not in state_dict and name in state_dict:
            target, _ = rename_source_key(name, [], [], prefix, state_dict)
        if target in state_dict:
            targets[name] = target
    return targets


def load_tensors(model: PreTrainedModel, tensors: Mapping[str, Any], dtype: torch.dtype, device: str) -> None:
    """Load tensors of a checkpoint into a model; transformers renames, splits and stacks them as needed.

    Args:
        model: the model, with placeholders in their place.
        tensors: lazy tensors by their names in the checkpoint; `tensor[...]` reads one.
        dtype: dtype of the weights, but for those that the model keeps in float32.
        device: device of the weights.

    Raises:
        SourceError: a tensor has the wrong shape, or cannot be read or converted. If it cannot be read, its
            `LazyTensor.error` has the reason.
    """
    # Made anew for each load, because its converters keep state.
    mapping: Any = get_model_conversion_mapping(model)
    plan = model._get_dtype_plan(dtype)
    config = LoadStateDictConfig(device_map={"": device}, dtype=dtype, dtype_plan=plan, weight_mapping=mapping)
    with quiet_transformers():
        info, _ = convert_and_load_state_dict_in_model(model, dict(tensors), config)
    for name, shape, expected in sorted(info.mismatched_keys):
        raise SourceError(f"{name} is {list(shape)}, but by config.json it must be {list(expected)}", OTHER_WEIGHTS)
    for name, text in sorted(info.conversion_errors.items()):
        last_line = (text.strip() or "unknown").splitlines()[-1].strip()
        raise SourceError(f"{name} cannot be made of the checkpoint's tensors: {last_line[:300]}", OTHER_WEIGHTS)


@contextmanager
def _explain_errors(what: str, hint: str) -> Iterator[None]:
    """Raise what transformers raises meanwhile as a SourceError that says what it cannot do."""
    try:
        with quiet_transformers():
            yield
    except Exception as error:
        raise SourceError(f"transformers {RELEASE} {what}: {first_line(error)[:300]}", hint) from error
