"""A KV cache for one forward pass over a whole text, which keeps nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache


class TextCache(DynamicCache):  # type: ignore[misc]  # mypy does not read transformers
    """A KV cache that stores neither keys and values nor states, because no token comes after the text.

    Otherwise a text that waits for its next layer would hold those of all layers before it.

    Args:
        config: the model's config, of transformers.
    """

    # Read by pass_checkpoint.py: a pass that continues may have another cache.
    holds_nothing = True

    def __init__(self, config: Any) -> None:
        super().__init__(config=config.get_text_config())

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values [batch, heads, length, dim]."""
        del layer_idx, args, kwargs
        return key_states, value_states

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the layer computes with, and drop the state."""
        states: Tensor = super().update_conv_state(conv_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        layer.conv_states = dict.fromkeys(layer.conv_states)
        layer.is_conv_states_initialized = dict.fromkeys(layer.conv_states, False)
        return states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Return the state, and do not store it."""
        del layer_idx, args, kwargs
        return recurrent_states
