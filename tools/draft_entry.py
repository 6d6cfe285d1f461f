"""Asks vLLM about an architecture, and drafts what the registry needs of it.

    OPENQUANT_VLLM=DIR/bin/python python tools/draft_entry.py ARCHITECTURE [--model CONFIG.json] [--layers]

Prints the small model that it asks with, as
tests/support/small_models.yaml has it; the entries that say the same as the engine; a draft
of one from the engine's answers; and where there is an entry, what that says otherwise. vLLM builds the class small
and loads tensors into it under the names that transformers saves: where their rows go is watched. Nothing is taken from
what a class says of itself, and no weights are needed. docs/adding-an-architecture.md says more.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from entry_draft import differences, draft  # noqa: E402
from openquant.errors import OpenQuantError, UsageError  # noqa: E402
from openquant.models import MODELS  # noqa: E402
from openquant.registry.architecture import ModuleRules  # noqa: E402
from support import small_checkpoints, small_models  # noqa: E402
from support.small_models import Small  # noqa: E402
from vllm_probe.client import EngineAnswer, EngineFailed, Question, ask_engine  # noqa: E402
from vllm_probe.modules import engine_modules  # noqa: E402

STUB = ROOT / "tests" / "serve" / "stub"
# What makes a configuration small, by its keys; the first that matches. What
# small_checkpoints.COMMON has is left to it.
SMALL: tuple[tuple[str, Any], ...] = (
    (r"(num_|n_routed_|moe_)?(local_|routed_|num_)?experts|num_experts|moe_num_experts|num_local_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|num_selected_experts|moe_top_k", 2),
    (r"(moe|expert|shared_expert|moe_shared_expert)_intermediate_size", 128),
    (r"(n|num|moe_num)_shared_experts?", 1),
    (r"n_group|topk_group|n_groups|mamba_n_groups", 1),
    (r"first_k_dense_replace|num_nextn_predict_layers", 1),
    (r"q_lora_rank", 128),
    (r"kv_lora_rank", 512),
    (r"qk_(nope|rope)_head_dim|v_head_dim", 64),
    (r"sliding_window|attention_chunk_size", 512),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads", 4),
    (r"linear_(key|value)_head_dim|mamba_d_head|mamba_head_dim|mamba_d_state|ssm_state_size", 64),
    (r"mamba_n_heads|mamba_num_heads", 8),
)
# Weights of a small model at most.
LARGEST = 100_000_000
TOWER: Mapping[str, Any] = {
    "depth": 1,
    "num_hidden_layers": 1,
    "num_layers": 1,
    "hidden_size": 128,
    "embed_dim": 128,
    "d_model": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_heads": 2,
    "head_dim": 64,
    "image_size": 56,
    "patch_size": 14,
    "out_hidden_size": 256,
}


def shrunk(known: Mapping[str, Any]) -> dict[str, Any]:
    """What a small model of this configuration says beside small_checkpoints.COMMON."""
    found: dict[str, Any] = {}
    count = known.get("num_hidden_layers")
    for key, value in known.items():
        small = next((small for pattern, small in SMALL if re.fullmatch(pattern, key)), None)
        if small is not None and isinstance(value, int):
            found[key] = small
        elif isinstance(value, list) and len(value) == count and count:
            kinds = list(dict.fromkeys(value))[: small_checkpoints.LAYERS]
            found[key] = [*kinds, *kinds[-1:] * (small_checkpoints.LAYERS - len(kinds))]
        elif key.endswith(("eps", "epsilon", "_act", "activation", "activation_function")):
            found |= {key: value} if key not in small_checkpoints.COMMON or "act" in key else {}
    return found


def small_model(architecture: str, config: Mapping[str, Any] | None) -> Small:
    """The model of small_models.yaml; a draft of one where there is none.

    Raises:
        UsageError: transformers does not have the class.
    """
    if architecture in small_models.MODELS:
        return small_models.MODELS[architecture]
    import transformers

    if config is None:
        made = getattr(transformers, architecture, None)
        if made is None:
            raise UsageError(
                f"transformers {transformers.__version__} has no {architecture}",
                "--model CONFIG.json of a published model; or write its lines in tests/support/small_models.yaml "
                "first, with made_as",
            )
        config = made.config_class().to_dict()
    text = config.get("text_config")
    if not isinstance(text, dict):
        return Small(str(config.get("model_type")), shrunk(config))
    towers = {
        key: {**{k: v for k, v in TOWER.items() if k in value}, "model_type": value.get("model_type")}
        for key, value in config.items()
        if key.endswith("_config") and key != "text_config" and isinstance(value, dict)
    }
    vision = towers.pop("vision_config", None)
    return Small(
        str(config.get("model_type")),
        {"model_type": text.get("model_type"), **shrunk(text)},
        vision=vision,
        beside=towers,
    )


def question(architecture: str, listed: list[str]) -> Question:
    """What the engine is asked: of what transformers saves, if that has the class."""
    try:
        if architecture not in small_checkpoints.HAND_MADE:
            hold_small(architecture)
        shapes = small_checkpoints.shapes(architecture)
    except (AttributeError, KeyError, ValueError, TypeError) as error:
        print(f"# transformers does not make it: {error!r}; the engine is asked for names alone\n")
        shapes = {}
    return Question(small_checkpoints.config(architecture), shapes, listed)


def hold_small(architecture: str) -> None:
    """Raises:
    UsageError: what transformers would make is no small model.
    """
    import torch
    import transformers

    made_as, model_type = small_models.MODELS[architecture].made_as or (
        architecture,
        small_models.MODELS[architecture].model_type,
    )
    known = {key: value for key, value in small_checkpoints.config(architecture).items() if key != "model_type"}
    with torch.device("meta"):
        model = getattr(transformers, made_as)(transformers.AutoConfig.for_model(model_type, **known))
    count = sum(weight.numel() for weight in model.parameters())
    if count > LARGEST:
        raise UsageError(
            f"the small model of {architecture} would have {count:,} weights",
            "write it in tests/support/small_models.yaml: parts of its configuration still have their usual sizes",
        )


def answer(found: EngineAnswer | EngineFailed) -> EngineAnswer:
    """It, or the error."""
    if isinstance(found, EngineFailed):
        raise found
    return found


def main() -> None:
    """Ask, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architecture")
    parser.add_argument("--model", type=Path, help="config.json, or a directory with one, to make the small model from")
    parser.add_argument("--layers", action="store_true", help="print every layer that the engine builds")
    arguments = parser.parse_args()
    try:
        report(arguments.architecture, arguments.model, arguments.layers)
    except OpenQuantError as error:
        sys.exit(f"{error.message}\n{error.hint}")


def report(architecture: str, given: Path | None, every: bool) -> None:
    """Print all that the module says."""
    interpreter = os.environ.get("OPENQUANT_VLLM")
    if not interpreter:
        raise UsageError("OPENQUANT_VLLM names no interpreter", "tests/serve/install_vllm.sh installs one")
    config = None
    if given is not None:
        config = json.loads((given / "config.json" if given.is_dir() else given).read_text())
    if architecture not in small_checkpoints.ARCHITECTURES:
        small = small_models.MODELS[architecture] = small_model(architecture, config)
        print("# tests/support/small_models.yaml: compare it with a published config.json")
        keys = ("model_type", "config", "vision", "beside")
        fields = {key: value for key in keys if (value := getattr(small, key))}
        print(yaml.safe_dump({architecture: fields}, sort_keys=False, default_flow_style=None, width=116))
    entry = MODELS.get(architecture)
    asking = question(architecture, [])
    modules = [name.removesuffix(".weight") for name, shape in asking.shapes.items() if len(shape) > 1]
    if entry is not None:
        asked_entry = ModuleRules(entry.with_layer_count(small_checkpoints.LAYERS))
        kept = [module for module in modules if asked_entry.rule(module).keep is not None]
        asking = question(architecture, asked_entry.engine_names(kept))
    asked = answer(ask_engine([asking], Path(interpreter), STUB)[0])
    if every or not asking.shapes:
        for layer in asked.layers:
            print(f"# {layer.path}: {layer.kinds[0]}, asked by {layer.prefix if layer.asked else None}")
        print(f"# packed_modules_mapping: {dict(asked.packed)}")
    if not asking.shapes:
        return
    told = engine_modules(asked, asking.shapes)
    if entry is not None:
        print("# what the entry says otherwise than the engine")
        for text, where in differences(entry, told).items():
            print(f"#   {text}: {', '.join(where)}")
    made = draft(architecture, asked, asking.shapes, small_checkpoints.HIDDEN)
    fitting = [other for other in MODELS.values() if not shape_errors(other, told)]
    same = [other.name for other in sorted(fitting, key=lambda other: len(other.compress))][:8]
    print(f"# entries that say the same as the engine: {', '.join(same) or 'none'}\n")
    print(f'model(\n    "{architecture}",')
    for piece in made.pieces:
        print(f"    {piece},")
    if made.entry.layers != "model.layers.*":
        print(f'    layers="{made.entry.layers}",')
    if made.keep:
        print("    keep=(")
        for keep in made.keep:
            why = "ROUTER" if keep.why == "router" else f'"{keep.why}"'
            print(f'        Keep("{keep.pattern}", {why}{", divided=True" if keep.divided else ""}),')
        print("    ),")
    print(")\n")
    for text in made.questions:
        print(f"# {text}")
    for text, where in shape_errors(made.entry, told).items():
        print(f"# the draft is otherwise than the engine: {text}: {', '.join(where)}")


def shape_errors(entry: Any, told: Any) -> dict[str, list[str]]:
    """Differences without those of lists, which were not asked for."""
    return {text: where for text, where in differences(entry, told).items() if not text.startswith("kept, and not")}


if __name__ == "__main__":
    main()
