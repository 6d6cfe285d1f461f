"""A real vLLM loads what openquant writes, answers over HTTP, and computes what the scales and codes stand for.

The CPU kernels keep activations in bfloat16, all but that for one scale per row, so nothing else here measures the
activation rounding of a GPU.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from chosen import CHOSEN, EVERYTHING, NAMED, in_turn
from engine_client import (
    TO_DEQUANTIZED,
    TO_SOURCE,
    Answers,
    Engine,
    EngineError,
    complete,
    dequantize,
    find_engine,
    rewrite,
    table_cells,
)
from engine_layers import UNBUILT, Layers, built, usual, written

from conftest import EXAMPLE
from openquant import compress
from openquant.formats.reference import encode, group_absmax, group_scale
from openquant.formats.schemes import TENSOR, find_scheme
from openquant.models import MODELS
from support import small_checkpoints

pytestmark = pytest.mark.serve

SCHEMES = ("tensor", "channel", "block")
TRAINED = "tiny-qwen3"
QWEN3_MOE = "Qwen3MoeForCausalLM"
# What vLLM's CPU build cannot run, some of it in bfloat16 either. All else is.
NOT_RUN = {
    **dict.fromkeys(("DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM", "UnlimitedOCRForCausalLM"), "not built"),
    "DeepseekV32ForCausalLM": "sparse attention",
    # "Aligned KV cache block size 128 is not supported by attention backend(s): CPU_MLA"; its other attention is Triton's.
    "BailingMoeV2_5ForCausalLM": "latent attention beside a state",
    "BailingMoeV3ForCausalLM": "latent attention beside a state",
    # v1/attention/ops/metadata.py:43
    "DeepseekV4ForCausalLM": "a kernel in Triton before its attention",
    "DiffusionGemmaForBlockDiffusion": "not built",
    "Dots3NoteForCausalLM": "not built",
    "Ernie4_5_MoeForCausalLM": "FP8 experts with a bias",
    "Ernie4_5_VLMoeForConditionalGeneration": "not built",
    "Gemma3nForConditionalGeneration": "not built",
    "Glm5NextForCausalLM": "not built",
    "Glm5NextForConditionalGeneration": "not built",
    "GlmMoeDsaForCausalLM": "sparse attention",
    "HYV4ForCausalLM": "sparse attention",
    "InternVLChatModel": "not built",
    # layers/mamba/mamba_mixer.py:289 looks for a third axis, which the CPU build's layout of weights has not.
    "JambaForCausalLM": "a convolution of Mamba's first kind",
    # '_lib_fn_wrapper' object has no attribute 'get', in vllm/triton_utils/dispatcher.py:139.
    "KimiK25ForConditionalGeneration": "what the class imports, among which it looks for kernels to replace",
    "KimiLinearForCausalLM": "not built",
    "LagunaForCausalLM": "a router with sigmoids",
    # '_OpNamespace' '_moe_C' object has no attribute 'topk_softmax'
    "LongcatFlashForCausalLM": "a router with experts that do nothing",
    "MiniMaxM2ForCausalLM": "a router with sigmoids",
    **{
        f"NemotronH_{name}": "not built"
        for name in ("Nano_VL_V2", *(f"{size}Omni_Reasoning_V3" for size in ("", "Nano_", "Super_")))
    },
    "Molmo2ForConditionalGeneration": "not built",
    "OlmoHybridForCausalLM": "not built",
    "Qwen4ExpForCausalLM": "not built",
    "Qwen4ExpForConditionalGeneration": "not built",
    "Rnj1ForCausalLM": "CPUAttentionBackendImpl.__init__() got an unexpected keyword argument 'chunk_lookback'",
    "Step3p5ForCausalLM": "a router with sigmoids",
    "Step3p7ForConditionalGeneration": "not built",
}
RANDOM = tuple(
    name
    for name in CHOSEN
    if name not in NOT_RUN and any(small_checkpoints.refused(name, find_scheme(scheme)) is None for scheme in SCHEMES)
)
EXPERTS_IGNORED = "**.experts.**"
# Their experts are left in bfloat16: vLLM's CPU build has no FP8 kernel with apply_router_weight_on_input, nor with GELU.
PLAIN_EXPERTS = (
    *("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    *("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
)
# vLLM's CPU build computes no experts without a gate: they are built and loaded, and served without the last layer.
UNGATED = ("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM")
# The first has experts in its entry, as Gemma 4 has, and none in its class.
DENSE = ("Gemma4UnifiedForConditionalGeneration", *UNGATED)
# Nor has it one for experts with one scale per row; for dense layers it has.
SERVED = tuple(
    (name, scheme)
    for name in (TRAINED, *RANDOM)
    for scheme in SCHEMES
    if name == TRAINED
    or (
        small_checkpoints.refused(name, find_scheme(scheme)) is None
        and (scheme != "channel" or name in (*PLAIN_EXPERTS, *DENSE) or not MODELS[name].experts)
    )
)
# A server takes as long as forty models: by day one per tensor answers, in test_serve_from_hub.py.
ANSWERING = ((TRAINED, "block"), *(run for run in SERVED if run == (QWEN3_MOE, "tensor")))
# The trained model in each scheme, the others in one, in turn; in all with OPENQUANT_ALL=1.
RUN = (
    *(run for run in SERVED if run[0] == TRAINED),
    *in_turn(run for run in SERVED if run[0] not in (TRAINED, QWEN3_MOE)),
    *(run for run in SERVED if run[0] == QWEN3_MOE),
)
# By day those whose scales are joined, or stand in a stack, too.
DEQUANTIZED = tuple(
    run for run in RUN if EVERYTHING or NAMED or run[0] in (TRAINED, QWEN3_MOE, "Phi3ForCausalLM", "Llama4ForCausalLM")
)

COMPRESSED = "compressed-tensors"
ATTENTION = "**.self_attn.*"


@dataclass(frozen=True)
class Mixture:
    """A directory whose layers do not all have one scheme.

    Attributes:
        source: the model.
        scheme: of most layers.
        options: as compress() takes them.
        schemes: how many layers each scheme has.
    """

    source: str
    scheme: str
    options: Mapping[str, Any]
    schemes: Mapping[str, int]


ALL_MIXTURES = {
    "rows-and-blocks": Mixture(TRAINED, "block", {"scheme_for": {ATTENTION: "channel"}}, {"block": 12, "channel": 16}),
    "tensors-and-rows": Mixture(
        TRAINED, "tensor", {"scheme_for": {ATTENTION: "channel"}}, {"tensor": 12, "channel": 16}
    ),
    "experts-in-blocks": Mixture(
        QWEN3_MOE, "channel", {"scheme_for": {"**.experts.**": "block"}}, {"channel": 11, "block": 12}
    ),
    "attention-by-row": Mixture(
        QWEN3_MOE, "block", {"scheme_for": {ATTENTION: "channel"}}, {"block": 15, "channel": 8}
    ),
    # Half of its key and value heads is no block.
    "two-ranks": Mixture(TRAINED, "block", {"tp": 2}, {"block": 16, "channel": 12}),
    "reordered": Mixture("Llama4ForCausalLM", "block", {"ignore": ["**.experts.**"]}, {"block": 8, "channel": 6}),
    "head-by-row": Mixture(TRAINED, "channel", {"quantize_lm_head": True}, {"channel": 29}),
    "head-by-tensor": Mixture(TRAINED, "tensor", {"quantize_lm_head": True}, {"tensor": 29}),
    "head-beside-blocks": Mixture(TRAINED, "block", {"quantize_lm_head": True}, {"block": 28, "channel": 1}),
}
MIXTURES = {name: mixture for name, mixture in ALL_MIXTURES.items() if mixture.source in (TRAINED, *RANDOM)}

# Factors on the logits or on what experts add, and experts chosen otherwise, make more of the same errors.
FURTHER = {
    # 0.0059 in blocks; bfloat16 of the dequantized weights is as far, 0.0060.
    "AriaForConditionalGeneration": 0.01,
    # 0.0066 per tensor, 0.0058 in blocks: a norm after its experts makes what they add as large as all else.
    "AXK1ForCausalLM": 0.01,
    "ExaoneMoeForCausalLM": 0.01,
    "ExaoneMoEForCausalLM": 0.01,
    # 0.013 per tensor, 0.012 in blocks: it leaves out of an MLP what is below a threshold.
    "Gemma3nForCausalLM": 0.03,
    # 0.123 and 0.118 by row.
    "Gemma4ForCausalLM": 0.15,
    "Gemma4ForConditionalGeneration": 0.15,
    "Gemma4UnifiedForConditionalGeneration": 0.1,
    "Granite4VisionForConditionalGeneration": 0.03,
    # 0.0100 per tensor, 0.0087 in blocks: its router does not divide by what it leaves out.
    "FlexOlmoForCausalLM": 0.02,
    "GraniteForCausalLM": 0.03,
    "GraniteMoeForCausalLM": 0.05,
    "GraniteSpeechForConditionalGeneration": 0.03,
    "GraniteSpeechPlusForConditionalGeneration": 0.03,
    "GraniteMoeSharedForCausalLM": 0.05,
    "GraniteMoeSWAForCausalLM": 0.05,
    # Of rows, 0.026 and 0.025 to the source; its dequantized weights are half as far.
    "GraniteSWAForCausalLM": 0.04,
    "NemotronForCausalLM": 0.04,
    "HunYuanMoEV1ForCausalLM": 0.02,
    "MixtralForCausalLM": 0.02,
    # 0.0074 per tensor, 0.0088 in blocks: its router leaves experts out by a threshold.
    "PhiMoEForCausalLM": 0.02,
    "Qwen3NextForCausalLM": 0.01,
    # 0.0051 and 0.0053 in blocks where AMX computes; bfloat16 of the dequantized weights is as far.
    "Qwen3OmniMoeForConditionalGeneration": 0.01,
    "Qwen3VLMoeForConditionalGeneration": 0.01,
    "Qwen3_5MoeForCausalLM": 0.02,
    "Qwen3_5MoeForConditionalGeneration": 0.02,
}
# Bound on the divergence of models with experts to their dequantized weights.
ROUTED_OTHERWISE = 0.001


@pytest.fixture(scope="session", autouse=True)
def engine() -> Engine:
    """Before anything else, since without it there is nothing to do."""
    return find_engine()


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    found = {name: write_source(root / name, name) for name in RANDOM}
    for file in ("tokenizer.json", "tokenizer_config.json") if QWEN3_MOE in found else ():
        shutil.copy(EXAMPLE / file, found[QWEN3_MOE])
    return {TRAINED: EXAMPLE, **found}


def write_source(root: Path, name: str) -> Path:
    """A small model; of UNGATED without its last layer."""
    if name not in UNGATED:
        return small_checkpoints.write(root, name, vocab=2048)
    weights = small_checkpoints.tensors(name, vocab=2048)
    weights = {tensor: weight for tensor, weight in weights.items() if ".layers.3." not in tensor}
    small_checkpoints.write(root, name, weights=weights, vocab=2048)
    config = json.loads((root / "config.json").read_text()) | {"hybrid_override_pattern": "M*-", "num_hidden_layers": 3}
    (root / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="session")
def compressed(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories by `<model>-<scheme>`."""
    root = tmp_path_factory.mktemp("compressed")
    found = {}
    for name, scheme in RUN:
        ignore = [EXPERTS_IGNORED] if name in PLAIN_EXPERTS else []
        found[f"{name}-{scheme}"] = root / f"{name}-{scheme}"
        compress(sources[name], root / f"{name}-{scheme}", scheme, ignore=ignore)
    return found


@pytest.fixture(scope="session")
def mixtures(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directory of each mixture."""
    root = tmp_path_factory.mktemp("mixtures")
    for name, mixture in MIXTURES.items():
        result = compress(sources[mixture.source], root / name, mixture.scheme, format=COMPRESSED, **mixture.options)
        assert result.schemes == mixture.schemes
    return {name: root / name for name in MIXTURES}


def test_the_table_says_which_are_served() -> None:
    said = {
        (name, scheme)
        for name, cells in table_cells().items()
        for scheme, cell in zip(SCHEMES, cells[:3], strict=True)
        if "served" in cell
    }
    assert said == {(name, scheme) for name, scheme in SERVED if name != TRAINED}


# Answers over HTTP.


@pytest.mark.parametrize(("name", "scheme"), ANSWERING)
def test_answers(name: str, scheme: str, engine: Engine, compressed: dict[str, Path], tmp_path: Path) -> None:
    model = compressed[f"{name}-{scheme}"]
    with engine.serve(model, tmp_path / "log", shim=scheme == "tensor") as address:
        answer = complete(address, model, "import os\n\ndef main(")
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 8


def test_two_ranks_serve_what_falls_back_for_them(engine: Engine, mixtures: dict[str, Path], tmp_path: Path) -> None:
    model = mixtures["two-ranks"]
    with engine.serve(model, tmp_path / "log", shim=False, ranks=2) as address:
        assert complete(address, model, "import os\n\ndef main(")["choices"][0]["text"]
    compress(EXAMPLE, tmp_path / "blocks", "block", format=COMPRESSED)
    refused = tmp_path / "refused"
    with pytest.raises(EngineError), engine.serve(tmp_path / "blocks", refused, shim=False, ranks=2):
        pass
    assert "is not divisible by weight quantization block_n = 128" in refused.read_text(errors="replace")


# Log-probabilities.


@pytest.fixture(scope="session")
def logprobs(
    engine: Engine,
    sources: dict[str, Path],
    compressed: dict[str, Path],
    mixtures: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Answers:
    """Of sources, compressed directories and mixtures, of some `<it>-dequantized`, and of the spoilt ones."""
    root = tmp_path_factory.mktemp("logprobs")
    models = {**sources, **compressed, **mixtures}
    models["separate"] = separate_scales(compressed[f"{TRAINED}-tensor"], root / "separate")
    for name in ("separate", *(f"{name}-{scheme}" for name, scheme in DEQUANTIZED), *mixtures):
        models[f"{name}-dequantized"] = dequantize(models[name], root / f"{name}-dequantized")
    for scheme in SCHEMES:
        models[f"larger-{scheme}"] = larger_scales(compressed[f"{TRAINED}-{scheme}"], root / f"larger-{scheme}")
    return engine.logprobs(models, root / "answers")


@pytest.mark.parametrize(("name", "scheme"), RUN)
def test_stays_close_to_the_source(name: str, scheme: str, logprobs: Answers) -> None:
    bound = TO_SOURCE + (TO_DEQUANTIZED[scheme] if scheme == "channel" else 0)
    assert logprobs.between(name, f"{name}-{scheme}") <= FURTHER.get(name, bound)


@pytest.mark.parametrize(("name", "scheme"), DEQUANTIZED)
def test_computes_what_codes_and_scales_stand_for(name: str, scheme: str, logprobs: Answers) -> None:
    bound = TO_DEQUANTIZED[scheme]
    if scheme == "channel":
        bound = FURTHER.get(name, bound)
    if name not in (TRAINED, *DENSE) and MODELS[name].experts:
        bound = max(bound, ROUTED_OTHERWISE)
    assert logprobs.between(f"{name}-{scheme}-dequantized", f"{name}-{scheme}") <= bound


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_compute_what_codes_and_scales_stand_for(name: str, logprobs: Answers) -> None:
    # In this format one scale per tensor has the kernel for one per row, which rounds activations.
    assert logprobs.between(f"{name}-dequantized", name) <= TO_DEQUANTIZED["channel"]
    assert logprobs.between(MIXTURES[name].source, name) <= TO_SOURCE


@pytest.mark.parametrize("scheme", SCHEMES)
def test_control_larger_scales_show(scheme: str, logprobs: Answers) -> None:
    assert logprobs.between(TRAINED, f"larger-{scheme}") > TO_SOURCE


def test_control_separate_scales_show(logprobs: Answers) -> None:
    assert logprobs.between("separate-dequantized", "separate") > TO_DEQUANTIZED["tensor"]


def larger_scales(source: Path, target: Path) -> Path:
    tensors = small_checkpoints.read(source)
    for name in tensors:
        if "weight_scale" in name:
            tensors[name] = tensors[name] * 1.25
    return rewrite(source, target, tensors)


def separate_scales(source: Path, target: Path) -> Path:
    """Give each member of a joined layer a scale of its own: vLLM then rounds a second time as it joins them."""
    original = small_checkpoints.read(EXAMPLE)
    tensors = small_checkpoints.read(source)
    for name in tensors:
        if re.search(r"\.(q|k|v|gate|up)_proj\.weight$", name):
            weight = original[name]
            scale = group_scale(group_absmax(weight, TENSOR.format.group), TENSOR.format)
            tensors[name] = encode(weight, scale, TENSOR.format)
            tensors[f"{name.removesuffix('.weight')}.{TENSOR.format.scale.name}"] = scale.reshape(())
    return rewrite(source, target, tensors)


# Layers.


@dataclass(frozen=True)
class Case:
    """A compressed directory whose layers and weights vLLM is asked for.

    Attributes:
        name: what pytest calls it.
        architecture: one of small_checkpoints.ARCHITECTURES.
        scheme: one of SCHEMES.
        ignore: patterns.
        config: changes to the source's config.json.
        prefixes: changes to the source's tensor names.
        mlp: rows of gate and up to leave; None for all.
        format: as compress() takes it.
        scale_format: likewise.
        options: more of what it takes.
    """

    name: str
    architecture: str
    scheme: str
    ignore: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    prefixes: Mapping[str, str] = field(default_factory=dict)
    mlp: int | None = None
    format: str | None = None
    scale_format: str = "float"
    options: Mapping[str, Any] = field(default_factory=dict)


# As transformers 4.52 and later write them.
NEWER_PREFIXES = {
    "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
GEMMA3_WRAPPED, LLAMA4_WRAPPED = "Gemma3ForConditionalGeneration", "Llama4ForConditionalGeneration"
SPARSE_STEP = {"mlp_only_layers": [], "decoder_sparse_step": 2}


def mixed(architecture: str, scheme: str, pattern: str, other: str) -> Case:
    """Where the two schemes met the wrong layers, a scale would not have the shape that vLLM expects."""
    return Case(
        f"{architecture}-{scheme}-{other}",
        architecture,
        scheme,
        format=COMPRESSED,
        options={"scheme_for": {pattern: other}},
    )


def has_head(architecture: str) -> bool:
    config = small_checkpoints.config(architecture)
    tied = config.get("tie_word_embeddings") or config.get("text_config", {}).get("tie_word_embeddings")
    return not tied and MODELS[architecture].head_refused is None


def is_quantized(architecture: str) -> bool:
    """Whether vLLM loads its embedding quantized."""
    return MODELS[architecture].embedding is not None


MORE_CASES = (
    Case("compressed-tensor", "LlamaForCausalLM", "tensor", format=COMPRESSED),
    Case("compressed-block", "LlamaForCausalLM", "block", format=COMPRESSED),
    Case("compressed-block-experts", QWEN3_MOE, "block", format=COMPRESSED),
    # In the fp8 format it is refused.
    Case("compressed-block-renamed", "Mistral3ForConditionalGeneration", "block", format=COMPRESSED),
    # Queries, keys and values fall back to rows by themselves.
    Case("compressed-block-reordered", "Llama4ForCausalLM", "block", format=COMPRESSED),
    Case("compressed-two-ranks", QWEN3_MOE, "block", format=COMPRESSED, options={"tp": 2}),
    mixed("Qwen3ForCausalLM", "block", "model.layers.0.self_attn.k_proj", "channel"),
    mixed(QWEN3_MOE, "block", "**.experts.**", "channel"),
    # The engine's own names: of a merged layer, of a wrapper's parts, of the experts' module, of its backend.
    mixed("StableLmForCausalLM", "channel", "**.{mlp,self_attn}.*", "block"),
    mixed("Gemma3ForConditionalGeneration", "channel", "**.self_attn.*", "block"),
    mixed("MiniMaxM2ForCausalLM", "channel", "**.experts.**", "block"),
    mixed("DeepseekV3ForCausalLM", "block", "**.kv_a_proj_with_mqa", "channel"),
    mixed("GraniteMoeHybridForCausalLM", "channel", "**.mamba.*", "block"),
    mixed("Qwen3VLMoeForConditionalGeneration", "channel", "**.experts.**", "block"),
    mixed("Qwen3VLForConditionalGeneration", "block", "**.self_attn.*", "tensor"),
    mixed("Olmo2ForCausalLM", "block", "**.self_attn.*", "channel"),
    *(
        Case(
            f"{name}-tables",
            name,
            "channel",
            options={"quantize_lm_head": True, "quantize_embeddings": is_quantized(name)},
        )
        for name in small_checkpoints.ARCHITECTURES
        if name not in UNBUILT and has_head(name) and small_checkpoints.refused(name, find_scheme("channel")) is None
    ),
    Case("powers-of-two", QWEN3_MOE, "block", scale_format="ue8m0"),
    Case("some-attention", "Qwen3ForCausalLM", "block", ("model.layers.0.self_attn.k_proj",)),
    Case("uneven-mlp", "LlamaForCausalLM", "block", config={"intermediate_size": 448}, mlp=448),
    Case("some-rows", "Qwen3ForCausalLM", "channel", ("model.layers.0.self_attn.k_proj",)),
    Case("uneven-rows", "LlamaForCausalLM", "channel", config={"intermediate_size": 448}, mlp=448),
    Case("experts-by-one", QWEN3_MOE, "block", ("model.layers.1.mlp.experts.2.up_proj",)),
    Case("experts-by-row", QWEN3_MOE, "channel", ("model.layers.1.mlp.experts.2.up_proj",)),
    Case("dense-by-row", QWEN3_MOE, "channel", ("model.layers.0.mlp.gate_proj",), SPARSE_STEP),
    Case("dense-among-experts", QWEN3_MOE, "tensor", ("model.layers.0.mlp.gate_proj",)),
    # The engine then knows no members of gate_up_proj.
    Case("dense-by-step", QWEN3_MOE, "block", ("model.layers.0.mlp.gate_proj",), SPARSE_STEP),
    Case("llama4-experts", "Llama4ForCausalLM", "tensor", (EXPERTS_IGNORED, "**.shared_expert.*")),
    Case("gemma3-newer-names", GEMMA3_WRAPPED, "block", ("**.layers.1.mlp.up_proj",), prefixes=NEWER_PREFIXES),
    # No such case for Llama 4: vLLM loads no checkpoint with these names, quantized or not.
    Case("llama4-wrapped", LLAMA4_WRAPPED, "tensor", ("**.layers.1.self_attn.*", "**.layers.0.feed_forward.up_proj")),
)
# What must be listed, since vLLM builds it as FP8 where it is not.
LISTED = {
    GEMMA3_WRAPPED: {
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
        "vision_tower.vision_model.encoder.layers.0.self_attn.k_proj",
        "vision_tower.vision_model.encoder.layers.0.self_attn.v_proj",
        "vision_tower.vision_model.encoder.layers.0.self_attn.out_proj",
        "vision_tower.vision_model.encoder.layers.0.mlp.fc1",
        "vision_tower.vision_model.encoder.layers.0.mlp.fc2",
    },
    QWEN3_MOE: {"model.layers.1.mlp.gate"},
    "HunYuanMoEV1ForCausalLM": {f"model.layers.{layer}.mlp.gate.wg" for layer in (0, 1)},
    "Lfm2MoeForCausalLM": {"model.layers.0.conv.in_proj", "model.layers.1.feed_forward.gate"},
    "Qwen3_5ForCausalLM": {f"model.layers.0.linear_attn.in_proj_{gate}" for gate in ("a", "b")},
    "DeepseekV3ForCausalLM": {f"model.layers.{layer}.self_attn.kv_b_proj" for layer in (0, 1)},
    "Qwen2_5_VLForConditionalGeneration": {
        "visual.blocks.0.attn.qkv",
        "visual.blocks.0.attn.proj",
        *(f"visual.blocks.0.mlp.{part}_proj" for part in ("gate", "up", "down")),
        *("visual.merger.mlp.0", "visual.merger.mlp.2"),
    },
}
UNLISTED = in_turn((name, scheme) for name in LISTED if name in CHOSEN for scheme in ("tensor", "channel"))
BUILT = in_turn(
    (name, scheme)
    for name in CHOSEN
    for scheme in SCHEMES
    if name not in UNBUILT and small_checkpoints.refused(name, find_scheme(scheme)) is None
)
CASES = (
    *(Case(f"{name}-{scheme}", name, scheme) for name, scheme in dict.fromkeys((*BUILT, *UNLISTED))),
    *(case for case in MORE_CASES if case.architecture in CHOSEN),
)
DROPPED = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The compressed directory of each case."""
    root = tmp_path_factory.mktemp("cases")
    return {case.name: compress_case(case, root) for case in CASES}


def compress_case(case: Case, root: Path) -> Path:
    weights = {}
    for name, weight in small_checkpoints.tensors(case.architecture).items():
        if case.mlp and ".mlp." in name:
            weight = weight[:, : case.mlp] if ".down_proj." in name else weight[: case.mlp]
        prefix = next((prefix for prefix in case.prefixes if name.startswith(prefix)), "")
        weights[case.prefixes.get(prefix, "") + name.removeprefix(prefix)] = weight.contiguous()
    source = small_checkpoints.write(root / f"{case.name}-source", case.architecture, weights=weights)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **case.config}))
    formats = {"format": case.format, "scale_format": case.scale_format}
    compress(source, root / case.name, case.scheme, **formats, ignore=case.ignore, **case.options)
    return root / case.name


@pytest.fixture(scope="session")
def layers(
    engine: Engine,
    cases: dict[str, Path],
    compressed: dict[str, Path],
    mixtures: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Layers:
    """What vLLM says of each case, of `<architecture>-<scheme>-unlisted`, `dropped-<scheme>` and `ungrouped`."""
    root = tmp_path_factory.mktemp("layers")
    models = dict(cases)
    for architecture, scheme in UNLISTED:
        name = f"{architecture}-{scheme}"
        models[f"{name}-unlisted"] = unlist(cases[name], root / name)
    for scheme in SCHEMES:
        source = compressed[f"{TRAINED}-{scheme}"]
        tensors = {
            name: tensor
            for name, tensor in small_checkpoints.read(source).items()
            if f"{DROPPED}.weight_scale" not in name
        }
        models[f"dropped-{scheme}"] = rewrite(source, root / f"dropped-{scheme}", tensors)
    source = mixtures["rows-and-blocks"]
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]["config_groups"]["group_1"]
    models["ungrouped"] = rewrite(source, root / "ungrouped", small_checkpoints.read(source), config)
    return dict(zip(models, engine.layers(list(models.values()), root / "answers"), strict=True))


def unlist(source: Path, target: Path) -> Path:
    config = json.loads((source / "config.json").read_text())
    quantization = config["quantization_config"]
    quantization |= {key: [] for key in ("ignored_layers", "modules_to_not_convert", "ignore") if key in quantization}
    return rewrite(source, target, None, config)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_layer_is_built_as_it_is_stored(case: Case, cases: dict[str, Path], layers: Layers) -> None:
    """And the weights fill the model, or else vLLM refuses them."""
    stored = written(cases[case.name])
    assert stored
    assert built(layers[case.name], stored) == stored


@pytest.mark.parametrize(("architecture", "scheme"), UNLISTED)
def test_control_unlisted_layers_show(architecture: str, scheme: str, layers: Layers) -> None:
    listed, unlisted = (built(layers[f"{architecture}-{which}"], set()) for which in (scheme, f"{scheme}-unlisted"))
    assert unlisted - listed == {usual(module) for module in LISTED[architecture]}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_control_a_missing_scale_shows(scheme: str, layers: Layers) -> None:
    answer = layers[f"dropped-{scheme}"]
    assert isinstance(answer, EngineError)
    name = f"{DROPPED}.{find_scheme(scheme).format.scale.name}"
    assert f"Following weights were not initialized from checkpoint: {{'{name}'}}" in str(answer)


def test_control_a_missing_group_shows(layers: Layers) -> None:
    answer = layers["ungrouped"]
    assert isinstance(answer, EngineError)
    assert "assert param_data.shape == loaded_weight.shape" in str(answer)
