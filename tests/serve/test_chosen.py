"""What is chosen when nothing, everything or a few are asked for."""

import pytest
from chosen import KINDS, choose

from support import small_checkpoints


def test_one_of_each_kind_or_all_or_those_named():
    assert choose("", False) == tuple(name for name in small_checkpoints.ARCHITECTURES if name in KINDS)
    assert choose("", True) == small_checkpoints.ARCHITECTURES
    named = "Qwen3ForCausalLM,LlamaForCausalLM"
    assert choose(named, False) == choose(named, True) == ("LlamaForCausalLM", "Qwen3ForCausalLM")


def test_every_kind_has_a_small_model():
    assert {*KINDS} - {*small_checkpoints.ARCHITECTURES} == set()


def test_a_misspelled_name_is_an_error():
    with pytest.raises(ValueError, match="has no LamaForCausalLM$"):
        choose("LlamaForCausalLM,LamaForCausalLM", False)
