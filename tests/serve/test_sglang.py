"""SGLang's own loader builds what openquant writes as it is stored, and fills it with what codes and scales stand for.

Nothing is computed: no kernel of SGLang's runs on a CPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
from chosen import CHOSEN, in_all, in_turn
from engine_client import EngineError, find_loader, rewrite, table_cells, write_cached

import openquant
from conftest import EXAMPLE, change_json
from openquant import compress
from openquant.files.checkpoint import open_checkpoint
from openquant.formats.schemes import find_others, find_scheme
from openquant.models import MODELS
from openquant.plan.decisions import PlanOptions
from openquant.plan.engines import find_refusal, sglang_refusal
from openquant.plan.plan import make_plan
from support import small_checkpoints

pytestmark = pytest.mark.serve

COMPRESSED = "compressed-tensors"
# As compress() takes them. The first five have a column in docs/architectures.md.
SCHEMES: dict[str, dict[str, Any]] = {
    "tensor": {"scheme": "tensor"},
    "channel": {"scheme": "channel"},
    "block": {"scheme": "block"},
    "int4": {"scheme": "int4"},
    "nvfp4": {"scheme": "nvfp4"},
    "block-ue8m0": {"scheme": "block", "scale_format": "ue8m0"},
    "tensor-compressed": {"scheme": "tensor", "format": COMPRESSED},
    "block-compressed": {"scheme": "block", "format": COMPRESSED},
    "mxfp8": {"scheme": "mxfp8"},
    "int8": {"scheme": "int8"},
    "int8-weights": {"scheme": "int8-weights"},
    "int4-channel": {"scheme": "int4", "group_size": "channel"},
    "int4-asymmetric": {"scheme": "int4", "asymmetric": True},
    "int6": {"scheme": "int6"},
    "nvfp4-w4a4": {"scheme": "nvfp4-w4a4"},
}
COLUMNS = tuple(SCHEMES)[:5]
EACH_SCHEME = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
# What SGLang does not load in bfloat16 either, or not from these small models' config.json: keys of transformers'
# configurations that it calls otherwise, towers of one size, classes for CUDA alone.
NOT_RUN = """
    AXK1ForCausalLM AriaForConditionalGeneration Blip2ForConditionalGeneration Cohere2MoeForCausalLM
    Cohere2VisionForConditionalGeneration DeepseekOCR2ForCausalLM DeepseekOCRForCausalLM DeepseekV4ForCausalLM
    Dots3NoteForCausalLM Ernie4_5_VLMoeForConditionalGeneration FalconH1ForCausalLM FlexOlmoForCausalLM
    Gemma3nForCausalLM Gemma3nForConditionalGeneration Gemma4ForCausalLM Gemma4UnifiedForConditionalGeneration
    Glm5NextForConditionalGeneration GlmForCausalLM GlmOcrForConditionalGeneration
    Granite4VisionForConditionalGeneration HunYuanVLForConditionalGeneration IQuestLoopCoderForCausalLM
    InternVLChatModel KimiK25ForConditionalGeneration Llama4ForCausalLM LlavaForConditionalGeneration
    LongcatFlashForCausalLM Mamba2ForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM
    MiniMaxM3SparseForConditionalGeneration Molmo2ForConditionalGeneration
    MossTranscribeDiarizeForConditionalGeneration MuseGlimmerForCausalLM NemotronH_Nano_Omni_Reasoning_V3
    NemotronH_Nano_VL_V2 NemotronH_Omni_Reasoning_V3 PaddleOCRVLForConditionalGeneration
    QianfanOCRForConditionalGeneration Qwen2_5OmniForConditionalGeneration Step3p5ForCausalLM
    Step3p7ForConditionalGeneration UnlimitedOCRForCausalLM
"""
# What it says of a class that it does not have.
LACKS = r"is not a registered model in the Transformers library|has no SGlang implementation"
# Whose experts it loads, and computes without their scales (models/afmoe.py:285, deepseek.py:215).
WITHOUT_SCALES = ("AfmoeForCausalLM", "DeepseekForCausalLM")
# The GPU of this loader is of Hopper, where it takes the class of nvfp4; that of Blackwell makes room for a gate.
ON_BLACKWELL = ("NemotronHForCausalLM", "nvfp4-w4a4")
QWEN3, QWEN3_MOE, GEMMA3 = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForConditionalGeneration"
DEEPSEEK, LLAMA4_WRAPPED = "DeepseekV3ForCausalLM", "Llama4ForConditionalGeneration"
IGNORED = {"ignore": ["**.layers.0.**"]}
ATTENTION, EXPERTS, LATENT = "**.self_attn.*", "**.experts.**", "**.kv_a_proj_with_mqa"


@dataclass(frozen=True)
class Cell:
    """A directory that SGLang is asked to load.

    Attributes:
        architecture: one of small_checkpoints.ARCHITECTURES.
        scheme: one of SCHEMES.
        options: more of what compress() takes.
        name: what pytest calls it.
    """

    architecture: str
    scheme: str
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def __str__(self) -> str:
        return f"{self.architecture}-{self.name or self.scheme}"


def fits(architecture: str, scheme: str) -> bool:
    """Whether there is such an output: vLLM loads all there are, and no experts with one scale in this format."""
    model = MODELS[architecture]
    options = SCHEMES[scheme]
    refused = small_checkpoints.refused(model.name, find_scheme(options["scheme"], options.get("format")))
    unseen = (scheme == "tensor-compressed" and model.experts) or (architecture, scheme) == ON_BLACKWELL
    return refused is None and not unseen


def advised(architecture: str) -> bool:
    """Whether it is told to take blocks in the other format, and nothing else."""
    model = MODELS[architecture]

    def refused(scheme: str, format: str) -> bool:
        return any(find_refusal(one.refused, find_scheme(scheme, format)) for one in (model, model.sglang))

    return refused("block", "fp8") and not refused("block", COMPRESSED) and not refused("tensor", "fp8")


# Most architectures have one column, in turn.
LOADED = {
    *in_turn((name, scheme) for name in CHOSEN for scheme in COLUMNS if fits(name, scheme)),
    *(
        (name, scheme)
        for name in CHOSEN
        for scheme in SCHEMES
        if fits(name, scheme) and (in_all(name) or name in EACH_SCHEME)
    ),
}
ALL_CELLS = (
    *(Cell(*each) for each in sorted(LOADED)),
    # What is advised instead.
    *(
        Cell(name, "block-compressed", name="advised")
        for name in small_checkpoints.ARCHITECTURES
        if not in_all(name) and name not in EACH_SCHEME and advised(name)
    ),
    Cell("OlmoForCausalLM", "tensor", {"ignore": [ATTENTION]}, "advised"),
    *(
        Cell(
            name, scheme, {"ignore": [f"**{pattern}" for pattern in MODELS[name].sglang.unpacked]}, f"{scheme}-unpacked"
        )
        for name in (DEEPSEEK, "Glm4MoeForCausalLM", "Qwen3NextForCausalLM", LLAMA4_WRAPPED)
        for scheme in ("int4", "nvfp4")
    ),
    # Names of what is left, or stored otherwise: merged layers, the experts' module, a wrapper's parts.
    *(
        Cell(name, scheme, IGNORED, f"{scheme}-ignored")
        for name, scheme in in_turn(
            (name, scheme)
            for name in (
                *(QWEN3, QWEN3_MOE, GEMMA3, DEEPSEEK, "Phi3ForCausalLM", "MiniMaxM2ForCausalLM", "Lfm2MoeForCausalLM"),
                *("Mistral3ForConditionalGeneration", "NemotronHForCausalLM", "Qwen2_5_VLForConditionalGeneration"),
            )
            for scheme in ("tensor", "channel")
        )
    ),
    *(
        Cell(name, "block-compressed", {"scheme_for": {pattern: "channel"}}, "mixed")
        for name, pattern in (
            (QWEN3, "model.layers.0.self_attn.k_proj"),
            (QWEN3_MOE, EXPERTS),
            (GEMMA3, ATTENTION),
            (DEEPSEEK, LATENT),
            ("NemotronHForCausalLM", "**.mixer.{q,k,v}_proj"),
            ("Qwen3_5ForConditionalGeneration", "**.linear_attn.*"),
        )
    ),
    Cell(QWEN3_MOE, "channel", {"scheme_for": {EXPERTS: "block"}}, "experts-in-blocks"),
    Cell(QWEN3_MOE, "channel", {"scheme_for": {EXPERTS: "nvfp4"}}, "experts-in-nvfp4"),
    *(
        Cell(QWEN3_MOE, scheme, {"scheme_for": {ATTENTION: "channel"}}, f"{scheme}-beside-channel")
        for scheme in ("int4", "int8-weights", "nvfp4")
    ),
    Cell(QWEN3_MOE, "int4", {"scheme_for": {ATTENTION: "int8-weights"}}, "all-in-words"),
    # What is advised where no other experts are loaded.
    Cell("NemotronHForCausalLM", "channel", {"scheme_for": {EXPERTS: "nvfp4"}}, "experts-in-nvfp4"),
    *(
        Cell(name, "channel", {"ignore": [EXPERTS]}, "experts-left")
        for name in ("GraniteMoeHybridForCausalLM", "DiffusionGemmaForBlockDiffusion")
    ),
    Cell(QWEN3, "int4", {"scheme_for": {ATTENTION: "channel"}}, "int4-beside-channel"),
    Cell(QWEN3, "channel", {"scheme_for": {ATTENTION: "block"}}, "some-in-blocks"),
    Cell(QWEN3, "block-compressed", {"tp": 2}, "two-ranks"),
    *(
        Cell(name, "channel", {"quantize_lm_head": True}, "head")
        for name in (
            QWEN3,
            "LlamaForCausalLM",
            DEEPSEEK,
            "MiniMaxM2ForCausalLM",
            "HunYuanMoEV1ForCausalLM",
            "StableLmForCausalLM",
        )
    ),
)
CELLS = tuple(cell for cell in ALL_CELLS if cell.architecture in CHOSEN)
# What --fit chooses of the example.
FIT = "fit"
DROPPED = "model.layers.1.mlp.down_proj.weight_scale"
# With scales of keys and values, which its classes of Llama load; some others take 1 in their place (models.py).
CACHED = [*(("LlamaForCausalLM", scheme) for scheme in ("channel", "none")), (QWEN3, "channel")]

Loaded = dict[str, "dict[str, Any] | EngineError"]


def write_source(root: Path, architecture: str) -> Path:
    """A small model; that of Qwen3's experts without its dense layer, which SGLang does not know of."""
    if architecture != QWEN3_MOE:
        return small_checkpoints.write(root, architecture)
    weights = {
        name: weight for name, weight in small_checkpoints.tensors(architecture).items() if ".layers.0.mlp." not in name
    }
    weights |= {name.replace(".1.", ".0.", 1): weight.clone() for name, weight in weights.items() if ".1.mlp." in name}
    small_checkpoints.write(root, architecture, weights=weights)
    change_json(root / "config.json", lambda config: config.update(mlp_only_layers=[]))
    return root


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sglang-sources")
    return {name: write_source(root / name, name) for name in dict.fromkeys(cell.architecture for cell in CELLS)}


@pytest.fixture(scope="session")
def outputs(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directory of each cell and of one without a scale; beside each, in `-plain`, in bfloat16."""
    find_loader()
    root = tmp_path_factory.mktemp("sglang-outputs")
    found = {}
    for cell in CELLS:
        found[str(cell)] = root / str(cell)
        compress(sources[cell.architecture], root / str(cell), **SCHEMES[cell.scheme], **cell.options)
        openquant.dequantize(root / str(cell), root / f"{cell}-plain")
    compress(EXAMPLE, root / FIT, fit="5.5bits", engines="sglang")
    found[FIT] = root / FIT
    for name, scheme in CACHED:
        found[f"{name}-{scheme}-cached"] = write_cached(root / f"{name}-{scheme}-cached", name, scheme)
    for name in (FIT, *(name for name in found if name.endswith("-cached"))):
        openquant.dequantize(root / name, root / f"{name}-plain")
    if QWEN3 not in CHOSEN:
        return found
    whole = root / f"{QWEN3}-tensor"
    tensors = {name: tensor for name, tensor in small_checkpoints.read(whole).items() if name != DROPPED}
    found["dropped"] = rewrite(whole, root / "dropped", tensors)
    (root / "dropped-plain").symlink_to(root / f"{QWEN3}-tensor-plain")
    return found


@pytest.fixture(scope="session")
def loaded(sources: dict[str, Path], outputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """What SGLang says of each."""
    plain = {name: output.with_name(f"{output.name}-plain") for name, output in outputs.items()}
    published = {**plain, **{str(cell): sources[cell.architecture] for cell in CELLS}}
    asked = [(output, plain[name], published[name]) for name, output in outputs.items()]
    answers = find_loader().load(asked, tmp_path_factory.mktemp("sglang") / "answers")
    return dict(zip(outputs, answers, strict=True))


def status(answer: dict[str, Any] | EngineError, output: Path) -> str:
    """`loaded`, `refused` or `not run`, with what is wrong."""
    if isinstance(answer, EngineError):
        return f"refused: {answer}"
    if re.search(LACKS, answer["not_run"] or ""):
        return f"refused: {answer['not_run']}"
    if answer["not_run"] is not None:
        return f"not run: {answer['not_run']}"
    if output.name.startswith(WITHOUT_SCALES):
        return "refused: it loads them, and computes without their scales"
    counts = {torch.float8_e4m3fn: 1, torch.int8: 1, torch.uint8: 2}
    stored = 0
    for name, tensor in small_checkpoints.read(output).items():
        # What words hold their shape tells.
        words = name.endswith(".weight_shape")
        scale = name.endswith(("_scale", "_scale_inv"))
        stored += int(tensor.prod()) if words else 0 if scale else tensor.numel() * counts.get(tensor.dtype, 0)
    whole = answer["codes"] == stored and not answer["unfilled"] and not answer["differing"]
    return "loaded" if whole else f"refused: {answer}, {stored} codes are stored"


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_sglang_loads_what_the_plan_says(
    cell: Cell, sources: dict[str, Path], outputs: dict[str, Path], loaded: Loaded
) -> None:
    found = status(loaded[str(cell)], outputs[str(cell)])
    if cell.architecture in NOT_RUN.split():
        assert found.startswith("not run: ")
        return
    arguments = SCHEMES[cell.scheme]
    chosen = {name: arguments[name] for name in ("scale_format", "group_size", "asymmetric") if name in arguments}
    scheme = find_scheme(arguments["scheme"], arguments.get("format"), **chosen)
    options = PlanOptions(
        ignore=tuple(cell.options.get("ignore", ())),
        scheme_for=find_others(scheme, cell.options.get("scheme_for", {})),
        tp=cell.options.get("tp"),
        head=cell.options.get("quantize_lm_head", False),
    )
    plan = make_plan(open_checkpoint(sources[cell.architecture]), scheme, options)
    assert found.partition(":")[0] == ("refused" if sglang_refusal(plan.entry, plan.decisions) else "loaded"), found
    assert openquant.verify(outputs[str(cell)]).problems == ()


def test_sglang_loads_the_mixture_that_is_chosen(outputs: dict[str, Path], loaded: Loaded) -> None:
    groups = json.loads((outputs[FIT] / "config.json").read_text())["quantization_config"]["config_groups"]
    assert len(groups) >= 2
    assert status(loaded[FIT], outputs[FIT]) == "loaded"


@pytest.mark.parametrize(("name", "scheme"), CACHED)
def test_sglang_loads_the_scales_of_keys_and_values(
    name: str, scheme: str, outputs: dict[str, Path], loaded: Loaded
) -> None:
    answer = loaded[f"{name}-{scheme}-cached"]
    assert not isinstance(answer, EngineError), answer
    assert not answer["unfilled"] and not answer["differing"]
    found = sorted(each for each in answer["cache"].values() if not isnan(each))
    stored = small_checkpoints.read(outputs[f"{name}-{scheme}-cached"])
    scales = sorted(float(each) for key, each in stored.items() if key.endswith((".k_scale", ".v_scale")))
    assert found == (scales if name == "LlamaForCausalLM" else [])


def test_the_table_says_which_sglang_loads(outputs: dict[str, Path], loaded: Loaded) -> None:
    found = {
        (name, scheme): "refused"
        for name in table_cells()
        for scheme in COLUMNS
        if name not in small_checkpoints.ARCHITECTURES or not fits(name, scheme)
    }
    for cell in CELLS:
        if cell.scheme in COLUMNS and not cell.options:
            answer = status(loaded[str(cell)], outputs[str(cell)]).partition(":")[0]
            found[cell.architecture, cell.scheme] = answer
    for cell in CELLS:
        advice = cell.scheme == "block-compressed" and not cell.options and advised(cell.architecture)
        if advice and cell.architecture not in NOT_RUN.split():
            assert status(loaded[str(cell)], outputs[str(cell)]) == "loaded"
            found[cell.architecture, "block"] = "`--format compressed-tensors` loaded, else refused"
    said = {
        (name, scheme): cells[5 + COLUMNS.index(scheme)] for name, cells in table_cells().items() for scheme in COLUMNS
    }
    assert {key: said[key] for key in found} == found


@pytest.mark.skipif(QWEN3 not in CHOSEN, reason="it is not asked for")
def test_control_what_lacks_a_scale_shows(outputs: dict[str, Path], loaded: Loaded) -> None:
    assert status(loaded["dropped"], outputs["dropped"]).startswith("refused: ")
