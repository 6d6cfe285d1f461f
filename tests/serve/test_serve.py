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
    find_engine,
    rewrite,
    table_cells,
)
from engine_layers import UNBUILT, Layers, built, written

from conftest import EXAMPLE
from openquant import compress, dequantize
from openquant.formats.reference import encode, group_absmax, group_scale
from openquant.formats.schemes import TENSOR, find_scheme
from openquant.models import MODELS
from support import small_checkpoints

pytestmark = pytest.mark.serve

SCHEMES = ("tensor", "channel", "block")
TRAINED = "tiny-qwen3"
QWEN3_MOE = "Qwen3MoeForCausalLM"
# What vLLM's CPU build cannot run beside what it cannot build, some of it in bfloat16 either. All else is.
NOT_RUN = (
    *UNBUILT,
    # "Aligned KV cache block size 128 is not supported by attention backend(s): CPU_MLA"; its other attention is Triton's.
    *("BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM"),
    # A kernel in Triton before its attention (v1/attention/ops/metadata.py:43); sparse attention.
    *("DeepseekV4ForCausalLM", "HYV4ForCausalLM"),
    # FP8 experts with a bias; a convolution of Mamba's first kind (layers/mamba/mamba_mixer.py:289).
    *("Ernie4_5_MoeForCausalLM", "JambaForCausalLM"),
    # '_lib_fn_wrapper' object has no attribute 'get', in vllm/triton_utils/dispatcher.py:139.
    "KimiK25ForConditionalGeneration",
    # Routers with sigmoids, or with experts that do nothing.
    *("LagunaForCausalLM", "LongcatFlashForCausalLM", "MiniMaxM2ForCausalLM", "Step3p5ForCausalLM"),
)
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
# The trained model in each scheme, the others in one, in turn.
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
    "tensors-and-rows": Mixture(
        TRAINED, "tensor", {"scheme_for": {ATTENTION: "channel"}}, {"tensor": 12, "channel": 16}
    ),
    "experts-in-blocks": Mixture(
        QWEN3_MOE, "channel", {"scheme_for": {"**.experts.**": "block"}}, {"channel": 11, "block": 12}
    ),
    # Half of its key and value heads is no block.
    "two-ranks": Mixture(TRAINED, "block", {"tp": 2}, {"block": 16, "channel": 12}),
    "reordered": Mixture("Llama4ForCausalLM", "block", {"ignore": ["**.experts.**"]}, {"block": 8, "channel": 6}),
    "head-by-row": Mixture(TRAINED, "channel", {"quantize_lm_head": True}, {"channel": 29}),
    "head-beside-blocks": Mixture(TRAINED, "block", {"quantize_lm_head": True}, {"block": 28, "channel": 1}),
}
MIXTURES = {name: mixture for name, mixture in ALL_MIXTURES.items() if mixture.source in (TRAINED, *RANDOM)}

# Factors on the logits or on what experts add, and experts chosen otherwise, make more of the same errors.
FURTHER = {
    name: bound
    for bound, names in {
        0.01: (
            *("AriaForConditionalGeneration", "AXK1ForCausalLM", "ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
            *("Qwen3NextForCausalLM", "Qwen3OmniMoeForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        ),
        0.02: (
            *("FlexOlmoForCausalLM", "HunYuanMoEV1ForCausalLM", "MixtralForCausalLM", "PhiMoEForCausalLM"),
            *("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        ),
        0.03: (
            *("Gemma3nForCausalLM", "Granite4VisionForConditionalGeneration", "GraniteForCausalLM"),
            *("GraniteSpeechForConditionalGeneration", "GraniteSpeechPlusForConditionalGeneration"),
        ),
        0.05: (
            *("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", "GraniteMoeSWAForCausalLM"),
            *("GraniteSWAForCausalLM", "NemotronForCausalLM"),
        ),
        # 0.123 and 0.118 by row.
        0.15: (*("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"),),
    }.items()
    for name in names
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


def test_two_ranks_serve_what_falls_back_for_them(engine: Engine, mixtures: dict[str, Path], tmp_path: Path) -> None:
    model = mixtures["two-ranks"]
    with engine.serve(model, tmp_path / "log", shim=False, ranks=2) as address:
        assert complete(address, model, "import os\n\ndef main(")["choices"][0]["text"]


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
        models[f"{name}-dequantized"] = root / f"{name}-dequantized"
        dequantize(models[name], models[f"{name}-dequantized"])
    models["larger"] = larger_scales(compressed[f"{TRAINED}-block"], root / "larger")
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


def test_control_larger_and_separate_scales_show(logprobs: Answers) -> None:
    assert logprobs.between(TRAINED, "larger") > TO_SOURCE
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
    """A compressed directory whose layers and weights vLLM is asked for: its name for pytest, and what it is made of."""

    name: str
    architecture: str
    scheme: str
    options: Mapping[str, Any] = field(default_factory=dict)


GEMMA3_WRAPPED, LLAMA4_WRAPPED = "Gemma3ForConditionalGeneration", "Llama4ForConditionalGeneration"
BLOCKS = {"format": COMPRESSED}


def mixed(architecture: str, scheme: str, pattern: str, other: str) -> Case:
    """Where the two schemes met the wrong layers, a scale would not have the shape that vLLM expects."""
    options = {"format": COMPRESSED, "scheme_for": {pattern: other}}
    return Case(f"{architecture}-{scheme}-{other}", architecture, scheme, options)


def has_head(architecture: str) -> bool:
    config = small_checkpoints.config(architecture)
    tied = config.get("tie_word_embeddings") or config.get("text_config", {}).get("tie_word_embeddings")
    return not tied and MODELS[architecture].head_refused is None


def is_quantized(architecture: str) -> bool:
    """Whether vLLM loads its embedding quantized."""
    return MODELS[architecture].embedding is not None


MORE_CASES = (
    Case("compressed-tensor", "LlamaForCausalLM", "tensor", BLOCKS),
    Case("compressed-block", "LlamaForCausalLM", "block", BLOCKS),
    # In the fp8 format it is refused.
    Case("compressed-block-renamed", "Mistral3ForConditionalGeneration", "block", BLOCKS),
    Case("compressed-two-ranks", QWEN3_MOE, "block", {**BLOCKS, "tp": 2}),
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
        Case(f"{name}-tables", name, "channel", {"quantize_lm_head": True, "quantize_embeddings": is_quantized(name)})
        for name in small_checkpoints.ARCHITECTURES
        if name not in UNBUILT and has_head(name) and small_checkpoints.refused(name, find_scheme("channel")) is None
    ),
    Case("powers-of-two", QWEN3_MOE, "block", {"scale_format": "ue8m0"}),
    Case("some-attention", "Qwen3ForCausalLM", "block", {"ignore": ["model.layers.0.self_attn.k_proj"]}),
    Case("experts-by-one", QWEN3_MOE, "block", {"ignore": ["model.layers.1.mlp.experts.2.up_proj"]}),
    Case("experts-by-row", QWEN3_MOE, "channel", {"ignore": ["model.layers.1.mlp.experts.2.up_proj"]}),
    Case("dense-among-experts", QWEN3_MOE, "tensor", {"ignore": ["model.layers.0.mlp.gate_proj"]}),
    Case("llama4-experts", "Llama4ForCausalLM", "tensor", {"ignore": [EXPERTS_IGNORED, "**.shared_expert.*"]}),
    Case(
        "llama4-wrapped",
        LLAMA4_WRAPPED,
        "tensor",
        {"ignore": ["**.layers.1.self_attn.*", "**.layers.0.feed_forward.up_proj"]},
    ),
)
BUILT = in_turn(
    (name, scheme)
    for name in CHOSEN
    for scheme in SCHEMES
    if name not in UNBUILT and small_checkpoints.refused(name, find_scheme(scheme)) is None
)
CASES = (
    *(Case(f"{name}-{scheme}", name, scheme) for name, scheme in BUILT),
    *(case for case in MORE_CASES if case.architecture in CHOSEN),
)
DROPPED = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The compressed directory of each case."""
    root = tmp_path_factory.mktemp("cases")
    return {case.name: compress_case(case, root) for case in CASES}


def compress_case(case: Case, root: Path) -> Path:
    source = small_checkpoints.write(root / f"{case.name}-source", case.architecture)
    compress(source, root / case.name, case.scheme, **case.options)
    return root / case.name


@pytest.fixture(scope="session")
def layers(
    engine: Engine, cases: dict[str, Path], compressed: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Layers:
    """What vLLM says of each case, and of one without a scale, `dropped`."""
    root = tmp_path_factory.mktemp("layers")
    models = dict(cases)
    source = compressed[f"{TRAINED}-block"]
    tensors = small_checkpoints.read(source)
    del tensors[f"{DROPPED}.weight_scale_inv"]
    models["dropped"] = rewrite(source, root / "dropped", tensors)
    return dict(zip(models, engine.layers(list(models.values()), root / "answers"), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_layer_is_built_as_it_is_stored(case: Case, cases: dict[str, Path], layers: Layers) -> None:
    stored = written(cases[case.name])
    assert stored
    assert built(layers[case.name], stored) == stored


def test_control_a_missing_scale_shows(layers: Layers) -> None:
    answer = layers["dropped"]
    assert isinstance(answer, EngineError)
    assert f"were not initialized from checkpoint: {{'{DROPPED}.weight_scale_inv'}}" in str(answer)
