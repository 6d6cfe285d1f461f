"""Configurations of models that an engine has the class of and only their own code reads: as engines get them from it.

The engines' interpreters run this; openquant is not there.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, LlamaConfig


class Block(dict[str, Any]):
    """What block_configs says of a layer, or of its attention or MLP, by attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        found = self[name]
        return Block(found) if isinstance(found, dict) else found


class NemotronNas(LlamaConfig):
    """Llama's, beside what each layer has."""

    model_type = "nemotron-nas"

    def __init__(self, block_configs: list[dict[str, Any]] | None = None, **more: Any) -> None:
        super().__init__(**more)
        self.block_configs = [Block(block) for block in block_configs or ()]


def register() -> None:
    """Have transformers read them."""
    AutoConfig.register("nemotron-nas", NemotronNas)
