"""Which entry of the registry a plan goes by: the class's own, the one that is asked for, or one for what has none.

find_model(checkpoint).name                  # "Qwen3ForCausalLM"
find_model(unknown, "auto").name             # "generic"

Where an engine is asked what it builds of a class that has none (built.py), its entry is given instead of a name.
"""

from __future__ import annotations

from ..errors import PlanError
from ..files.checkpoint import Checkpoint
from ..models import GENERIC, MODELS
from ..registry.architecture import Architecture
from .tensor_parallel import config_value, text_config

MOST_LAYERS = 10_000
# The class's own entry where there is one, else what unlisted() makes.
AUTO = "auto"


def find_architecture(checkpoint: Checkpoint, asked: str | Architecture | None = None) -> Architecture:
    """The entry that a plan of a checkpoint goes by.

    Args:
        checkpoint: the opened source.
        asked: a class that has an entry, "auto" or "generic"; that of the checkpoint's own class if None; an entry
            that was found before as it is.

    Raises:
        PlanError: there is no such entry.
    """
    if isinstance(asked, Architecture):
        return asked
    name = asked or checkpoint.architecture
    if name == AUTO:
        return with_layer_counts(MODELS.get(checkpoint.architecture) or generic_architecture(checkpoint), checkpoint)
    if name == GENERIC.name:
        return GENERIC
    if name not in MODELS:
        raise PlanError(
            f"{name} is not a known architecture; known are {', '.join(sorted(MODELS))}",
            "if it is one of them by another name, say which with --architecture; --architecture auto asks vLLM what "
            "it builds of the class (OPENQUANT_VLLM names a Python that has it), or goes by names and shapes alone; or "
            "add an entry to openquant/architectures (README: Adding an architecture)",
        )
    return with_layer_counts(MODELS[name], checkpoint)


def with_layer_counts(model: Architecture, checkpoint: Checkpoint) -> Architecture:
    """An entry with the names that depend on how many layers config.json counts; of nonsense there is none."""
    layers = config_value(text_config(checkpoint, model), "num_hidden_layers") if model.beyond else 0
    return model.counted(layers) if isinstance(layers, int) and layers <= MOST_LAYERS else model


def generic_architecture(_: Checkpoint) -> Architecture:
    """What stands for the entry of a checkpoint whose class has none: projections are known by their usual names."""
    return GENERIC
