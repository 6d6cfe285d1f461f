"""transformers loads outputs on the CPU and computes with the weights we wrote."""

from __future__ import annotations

import inspect
import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conftest import everything
from openquant import compress
from openquant.formats.quantization import read_quantization
from openquant.formats.reference import decode
from openquant.formats.schemes import BLOCK, BLOCK_UE8M0, CHANNEL, TENSOR, VARIANTS, Scheme
from openquant.models import MODELS
from support import small_checkpoints, small_models
from support.conversions import Shelf
from support.representatives import in_all_ways

DENSE = ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"]
# The exceptions are in the registry (split experts that it wants stacked); the wrapped models are read as a whole.
# Of what it makes the language model alone, it reads none as a whole.
ALL = [
    name
    for name in small_checkpoints.ARCHITECTURES
    if not small_models.MODELS[name].alone
    and MODELS[name].transformers_reads_blocks
    and all(experts.transformers for experts in MODELS[name].experts)
    and small_checkpoints.refused(name, BLOCK) is None
]
# One of each kind that stores its layers in a way of its own: joined, in stacks, with draft layers, beside a vision tower,
# with an image, in another class; half of them for each of the two schemes that engines take most.
FOR_BLOCKS = [
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Blip2ForConditionalGeneration",
    "DeepseekV3ForCausalLM",
    "GPTBigCodeForCausalLM",
    "Phi3ForCausalLM",
]
FOR_CHANNELS = ["FalconForCausalLM", "Gemma3ForConditionalGeneration", "JambaForCausalLM"]
# It leaves draft layers out: those of a model of two layers.
DRAFT = ("model.layers.2.", "model.language_model.layers.2.", "model.mtp_layers.")
# How far from its source an output is at least, where that is less than most: 0.0141 measured, and 0 from its dequantized
# weights.
NEARER = {"GPTBigCodeForCausalLM": 0.012}


def dequantized(output: Path, target: Path, scheme: Scheme | None) -> Path:
    """The same model in bfloat16, with the weights that codes and scales stand for; None: as its config says."""
    target.mkdir()
    weights = small_checkpoints.read(output)
    config = json.loads((output / "config.json").read_text())
    quantization = read_quantization(config)
    whole = (torch.float8_e4m3fn, torch.int8)
    found = (name for name in weights if name.endswith(("_packed", "weight")))
    for name in [name for name in found if name.endswith("_packed") or weights[name].dtype in whole]:
        codes, name = weights.pop(name), name.removesuffix("_packed")
        form = scheme.format if scheme else quantization.format_of(name.removesuffix(".weight"))
        assert form is not None
        scale = next(weights.pop(found) for found in (f"{name}_scale", f"{name}_scale_inv") if found in weights)
        weights.pop(f"{name}_shape", None)
        weights.pop(f"{name.removesuffix('.weight')}.input_global_scale", None)
        if form.global_scale:
            scale = scale.float() / weights.pop(f"{name}_global_scale")
        weights[name] = decode(codes, scale, form).to(torch.bfloat16)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


def logits(directory: Path, tokens: torch.Tensor, **options: object) -> torch.Tensor:
    import transformers

    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    architecture, _ = small_models.MODELS[architecture].made_as or (architecture, "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, report = getattr(transformers, architecture).from_pretrained(
            directory, dtype=torch.bfloat16, output_loading_info=True, **options
        )
        assert not report["missing_keys"], report["missing_keys"]
        # Nothing has a place for a scale of activations that are not rounded.
        left = [name for name in report["unexpected_keys"] if not (options and name.endswith("input_global_scale"))]
        unexpected = [name for name in left if not name.startswith(DRAFT)]
        assert not unexpected, unexpected
        with torch.no_grad():
            return model.eval()(input_ids=tokens, **image(model, tokens)).logits.float()


def image(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """An image in the place of the first tokens, for a class that computes nothing without one."""
    asked = inspect.signature(model.forward).parameters.get("pixel_values")
    if asked is None or asked.default is None:
        return {}
    tokens[:, : model.config.num_query_tokens] = model.config.image_token_index
    size = model.config.vision_config.image_size
    return {"pixel_values": torch.linspace(-1, 1, 3 * size * size, dtype=torch.bfloat16).reshape(1, 3, size, size)}


def tokens() -> torch.Tensor:
    return torch.randint(10, 500, (1, 32), generator=torch.Generator().manual_seed(0))


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_block_output_computes_what_its_dequantized_weights_do(
    shelf: Shelf, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    blocks = [(name, BLOCK) for name in (ALL if everything() else FOR_BLOCKS)]
    for architecture, scheme in [*blocks, ("Qwen3ForCausalLM", BLOCK_UE8M0)]:
        with subtests.test(architecture=architecture, scheme=scheme.suffix):
            source, output, _ = shelf.converted(architecture, scheme)
            found = logits(output, tokens())
            plain = dequantized(output, tmp_path / f"{architecture}{scheme.suffix}", scheme)
            assert distance(found, logits(plain, tokens())) < 0.01
            # The bound means something: the source itself is further away.
            assert distance(found, logits(source, tokens())) > NEARER.get(architecture, 0.015)


def test_per_tensor_output_is_refused(shelf: Shelf) -> None:
    import transformers

    output = shelf.converted("LlamaForCausalLM", TENSOR).output
    says = "scale_fmt must be .*'one scale per tensor: transformers misreads this; use vLLM or SGLang'"
    for load in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        with pytest.raises(ValueError, match=says):
            load.from_pretrained(output)


READ = [scheme for scheme in in_all_ways(VARIANTS) if scheme.method == "compressed-tensors" and scheme is not CHANNEL]
COMPRESSED = [
    *((CHANNEL, name) for name in (ALL if everything() else FOR_CHANNELS)),
    *((scheme, DENSE[number % len(DENSE)]) for number, scheme in enumerate(READ)),
]


def test_compressed_tensors_output_is_read(shelf: Shelf, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """By compressed-tensors: decompressed as the weights are loaded, or by default with activations rounded."""
    from transformers import CompressedTensorsConfig

    for scheme, architecture in COMPRESSED:
        with subtests.test(scheme=scheme.suffix, architecture=architecture):
            output = shelf.converted(architecture, scheme).output
            plain = dequantized(output, tmp_path / f"{architecture}{scheme.suffix}", scheme)
            expected = logits(plain, tokens())
            options = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
            assert torch.equal(logits(output, tokens(), **options), expected)
            if architecture in small_checkpoints.FIRST:
                # Scales rounded to bfloat16, and activations as the config says.
                found = logits(output, tokens())
                assert distance(found, expected) < (0.15 if scheme.format.input_global_scale is None else 0.4)
                assert torch.equal(found, expected) == (scheme.group["input_activations"] is None)


ATTENTION, EXPERTS = {"**.self_attn.*": "channel"}, {"**.experts.**": "channel"}
# Whether it also decompresses them while it loads: it knows one scheme for dense layers and one for experts.
MIXTURES = [
    ("Qwen3ForCausalLM", "block", {"scheme_for": ATTENTION}, False),
    ("Qwen3MoeForCausalLM", "channel", {"scheme_for": {"**.self_attn.*": "block"}}, False),
    ("Qwen3MoeForCausalLM", "block", {"scheme_for": EXPERTS}, True),
    ("Qwen3ForCausalLM", "channel", {"quantize_lm_head": True}, True),
]


def test_mixtures_are_read(shelf: Shelf, tmp_path: Path, subtests: pytest.Subtests) -> None:
    from transformers import CompressedTensorsConfig

    asked = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    for number, (architecture, scheme, options, decompressed) in enumerate(MIXTURES):
        with subtests.test(architecture=architecture, scheme=scheme, options=options):
            output = tmp_path / str(number)
            compress(shelf.source(architecture), output, scheme, format="compressed-tensors", **options)
            expected = logits(dequantized(output, tmp_path / f"{number}-plain", None), tokens())
            assert 0 < distance(logits(output, tokens()), expected) < 0.15
            if decompressed:
                assert torch.equal(logits(output, tokens(), **asked), expected)
            else:
                # Never misread: it says that it cannot.
                with pytest.raises(RuntimeError, match="issues during automatic conversion of the weights"):
                    logits(output, tokens(), **asked)
