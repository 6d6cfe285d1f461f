"""An output computes as engines serve it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import EXAMPLE
from openquant import compress
from openquant.data.domains import read_prompts
from openquant.data.tokenizer import load_tokenizer
from openquant.errors import SourceError
from openquant.evaluation.as_served import Fp8Cache, ServedModel, compare_answers, round_activations
from openquant.files.checkpoint import open_checkpoint
from openquant.formats.format import ActivationQuantization
from openquant.formats.numbers import E4M3
from openquant.streaming.model import StreamedModel
from support import small_checkpoints
from support.quantized_checkpoints import PER_TENSOR, STATIC, by_tensor, store

STATIC_INPUTS = ActivationQuantization(E4M3, (None, None), static=True)
LAYER = "model.layers.1"


def served(root: Path, **options: Any) -> ServedModel:
    return ServedModel(StreamedModel(open_checkpoint(root)), **options)


def test_a_quantized_head_and_embedding_are_computed_as_served(tmp_path: Path) -> None:
    compress(EXAMPLE, tmp_path / "out", "int8-weights", quantize_lm_head=True, quantize_embeddings=True)
    output = served(tmp_path / "out")
    assert {"lm_head", "model.embed_tokens"} <= output.model.quantized.keys()


def test_what_engines_merge_has_the_largest_static_scale(tmp_path: Path) -> None:
    root = store(tmp_path / "static", by_tensor(**STATIC), PER_TENSOR)
    larger = {"self_attn.k_proj": 2.0, "self_attn.o_proj": 8.0, "mlp.gate_proj": 3.0}
    expected = {
        **dict.fromkeys([f"self_attn.{letter}_proj" for letter in "qkv"], 2.0),
        **dict.fromkeys(["mlp.gate_proj", "mlp.up_proj"], 3.0),
        "self_attn.o_proj": 8.0,
        "mlp.down_proj": 0.25,
    }

    def change(held: dict[str, torch.Tensor]) -> None:
        held.update({f"{LAYER}.{name}.input_scale": torch.tensor(scale) for name, scale in larger.items()})
        # Engines have the largest of those that are there.
        del held[f"{LAYER}.self_attn.v_proj.input_scale"]

    small_checkpoints.change_weights(root, change)
    output = served(root)
    with output.model.resident() as model, output.round_inputs():
        for name, scale in expected.items():
            layer = model.get_submodule(f"{LAYER}.{name}")
            x = 1000 * torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
            assert torch.equal(
                layer(x), torch.nn.functional.linear(round_activations(x, STATIC_INPUTS, scale), layer.weight)
            )
    # All of them are there when the layer computes, wherever they lie.
    assert {f"{LAYER}.self_attn.k_proj.input_scale", f"{LAYER}.mlp.up_proj.input_scale"} <= set(
        output.model.scales[LAYER]
    )


def test_a_static_scale_that_no_member_has_is_missed(tmp_path: Path) -> None:
    root = store(tmp_path / "static", by_tensor(**STATIC), PER_TENSOR)
    small_checkpoints.change_weights(root, lambda held: held.pop(f"{LAYER}.mlp.down_proj.input_scale"))
    output = served(root)
    with (
        output.model.resident() as model,
        output.round_inputs(),
        pytest.raises(SourceError, match=f"^{LAYER}.mlp.down_proj has no static activation scale, though config"),
    ):
        model(input_ids=torch.arange(4)[None], use_cache=False)


def test_texts_are_written_from_keys_and_values_in_fp8(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(EXAMPLE, source)
    # Far too small, so that it shows.
    scales = {f"model.layers.{n}.self_attn.{kind}_scale": torch.tensor(0.001) for n in range(4) for kind in "kv"}
    small_checkpoints.change_weights(source, lambda held: held.update(scales))
    tokenizer = load_tokenizer(EXAMPLE)
    prompts = read_prompts(None, tokenizer)[:1]
    output, checkpoint = served(source, kv_cache="fp8"), open_checkpoint(EXAMPLE)
    [[shown]] = compare_answers(StreamedModel(checkpoint), [output], tokenizer, prompts)
    assert shown["differs_at"] is not None
    # As passes over the whole text have it.
    ids = list(prompts[0].ids)
    with output.model.resident() as model, output.round_inputs():
        for _ in range(8):
            cache = Fp8Cache(model.config, lambda _: (0.001, 0.001))
            ids.append(int(output.model.logits(torch.tensor(ids), cache)[-1].argmax()))
    assert shown["output"].startswith(tokenizer.decode(ids[len(prompts[0].ids) :]))
    assert served(source).cache() is None


def test_answers_end_where_the_source_says(tmp_path: Path) -> None:
    source = shutil.copytree(EXAMPLE, tmp_path / "source")
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(2048)]}))
    tokenizer = load_tokenizer(EXAMPLE)
    prompts = read_prompts(None, tokenizer)[:1]
    for first, second, ended in ((source, EXAMPLE, True), (EXAMPLE, source, False)):
        model = StreamedModel(open_checkpoint(first))
        [[shown]] = compare_answers(model, [served(second)], tokenizer, prompts)
        for answer in (shown["source"], shown["output"]):
            assert (len(tokenizer.encode(answer)) == 1) is ended
