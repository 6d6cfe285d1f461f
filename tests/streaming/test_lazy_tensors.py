"""Tensors of a checkpoint one by one, as transformers' loader takes them."""

from __future__ import annotations

from pathlib import Path

import torch

from conftest import change_json
from openquant.files.checkpoint import open_checkpoint
from openquant.streaming.meta_model import LazyTensors
from openquant.weights.find import decoded_view
from support import small_checkpoints


def slices_of(source: Path) -> LazyTensors:
    view, weights = decoded_view(open_checkpoint(source))
    return LazyTensors(view, weights, lambda shard: source / shard)


def test_stacks_that_lie_turned_are_decoded_to_what_they_stand_for(tmp_path: Path) -> None:
    """As gpt-oss has its experts, in rows of codes that are columns of weights."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    name, chance = "model.layers.0.mlp.experts.down_proj", torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 64, 3, 16), generator=chance).to(torch.uint8)
    scales = torch.randint(110, 130, (3, 64, 3), generator=chance).to(torch.uint8)
    stored = {"model.embed_tokens.weight": torch.ones(64, 64), f"{name}_blocks": blocks, f"{name}_scales": scales}
    source = small_checkpoints.write(tmp_path / "source", weights=stored, shards=2)
    named = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    change_json(source / "config.json", lambda found: found.update(named))
    tensors = slices_of(source)
    found = tensors.select([name])[name]
    assert (found.get_shape(), found.get_dtype()) == ([3, 96, 64], "BF16")
    expected = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(found[...], expected)
    assert torch.equal(found[1:, 5], expected[1:, 5])
    where = open_checkpoint(source).where
    assert tensors.shards([name]) == {where[f"{name}_blocks"].shard, where[f"{name}_scales"].shard}


def test_plain_tensors_are_views_of_their_file(tmp_path: Path) -> None:
    stored = {
        "bool": torch.tensor([True, False]),
        "int64": torch.tensor([[1, -2], [3, 4]]),
        "float64": torch.tensor(0.1, dtype=torch.float64),
        "bfloat16": torch.randn(3, 5).bfloat16(),
        "float16": torch.randn(3, 5).half(),
    }
    tensors = slices_of(small_checkpoints.write(tmp_path / "source", weights=stored))
    for name, found in tensors.select(stored).items():
        assert found[...].dtype == stored[name].dtype
        assert torch.equal(found[...], stored[name])
        assert found[...].data_ptr() == found[...].data_ptr()
    # What was looked at comes from the file again.
    tensors.release_pages()
    assert torch.equal(tensors.select(["int64"])["int64"][...], stored["int64"])
