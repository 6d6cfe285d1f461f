"""--architecture auto of a class without an entry: what an engine says decides, what it does not say is left as it is.

A script stands in for the engine, which tests/serve/test_auto.py asks; an output goes on as it was begun.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import change_json
from openquant import OpenQuantError, compress, diagnose, explain, verify
from openquant.errors import PlanError
from openquant.files.checkpoint import open_checkpoint
from openquant.formats.schemes import INT8_W8A16
from openquant.models import GENERIC
from openquant.plan import summary
from openquant.plan.config import ignored_layers
from openquant.plan.plan import Plan
from openquant.recipes import read_recipe
from openquant.reporter import Reporter
from openquant.vllm_probe import build, client
from openquant.vllm_probe.choose import ArchitectureChoice, architecture_from_json, architecture_to_json
from support import small_checkpoints

NAME = "MyForCausalLM"


class Planned(Reporter):
    def planned(self, plan: Plan, *_: object) -> None:
        self.plan = plan


def plan_of(source: Path, scheme: str = "tensor", **options: Any) -> Plan:
    reporter = Planned()
    compress(source, None, scheme, dry_run=True, architecture="auto", reporter=reporter, **options)
    return reporter.plan


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine but those of tests."""
    monkeypatch.delenv("OPENQUANT_VLLM", raising=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model of a class that nobody knows."""
    found = small_checkpoints.write(tmp_path / "mine", "Qwen3ForCausalLM")
    change_json(found / "config.json", lambda c: c.update(architectures=[NAME], auto_map={"AutoModel": "x.X"}))
    return found


def layer(prefix: str, *members: str, kind: str = "ColumnParallelLinear", **more: Any) -> dict[str, Any]:
    """A layer as the probe says it, of whole tensors of the small model."""
    shapes = small_checkpoints.shapes("Qwen3ForCausalLM")
    holds = [[f"{member}.weight", 0, shapes[f"{member}.weight"][0]] for member in members or (prefix,)]
    known = {
        "kinds": [kind, "ColumnParallelLinear" if kind == "QKVParallelLinear" else kind, "LinearBase"],
        "asked": True,
        "prefix": prefix,
        "skipped": False,
        "divided": True,
        "experts": 0,
        "sizes": [rows for _, _, rows in holds],
        "own": True,
        "named": True,
        "holds": {"weight": holds},
    }
    return {**known, **more}


def answer() -> dict[str, Any]:
    """What vLLM says of Qwen3."""
    layers: dict[str, Any] = {}
    for number in range(small_checkpoints.LAYERS):
        at = f"model.layers.{number}"
        qkv = [f"{at}.self_attn.{part}_proj" for part in "qkv"]
        gated = [f"{at}.mlp.{part}_proj" for part in ("gate", "up")]
        for one in (
            layer(f"{at}.self_attn.qkv_proj", *qkv, kind="QKVParallelLinear"),
            layer(f"{at}.self_attn.o_proj", kind="RowParallelLinear"),
            layer(f"{at}.mlp.gate_up_proj", *gated),
            layer(f"{at}.mlp.down_proj", kind="RowParallelLinear"),
        ):
            layers[one["prefix"]] = one
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    return {"layers": layers, "unread": [], "packed": packed, "mapper": {}, "version": "9.9"}


Engine = Callable[[str], Path]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Names an engine that does what a shell script says; $2 is where answers go."""

    def named(script: str) -> Path:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("OPENQUANT_VLLM", str(path))
        return tmp_path / "asked"

    return named


def answering(engine: Engine, tmp_path: Path, found: Any) -> Path:
    (tmp_path / "answer").write_text(json.dumps(found))
    return engine(f'cp "{tmp_path}/answer" "$2/0.json"')


SAID = f"decided as vLLM 9.9 builds {NAME}: look at the plan; what SGLang makes of it is not known"


def test_what_the_engine_builds_is_quantized_joined_and_listed(source: Path, tmp_path: Path, engine: Engine) -> None:
    answering(engine, tmp_path, answer())
    reporter = Planned()
    result = compress(source, tmp_path / "out", "block", architecture="auto", reporter=reporter)
    assert (result.architecture, reporter.plan.notes[0]) == (NAME, SAID)
    compress(small_checkpoints.write(tmp_path / "known", "Qwen3ForCausalLM"), tmp_path / "expected", "block")
    written, expected = (tmp_path / name / "model.safetensors" for name in ("out", "expected"))
    assert written.read_bytes() == expected.read_bytes()
    ours, theirs = (json.loads((tmp_path / one / "config.json").read_text()) for one in ("out", "expected"))
    assert ours["quantization_config"] == theirs["quantization_config"]
    known = Planned()
    compress(tmp_path / "known", None, "block", dry_run=True, reporter=known)
    assert (reporter.plan.decisions.fused, summary.parallel_sizes(reporter.plan)) == (
        known.plan.decisions.fused,
        summary.parallel_sizes(known.plan),
    )


def test_every_verb_that_plans_asks(source: Path, tmp_path: Path, engine: Engine) -> None:
    asked_times = answering(engine, tmp_path, answer())
    explanation = explain(source, "model.layers.0.self_attn.q_proj", architecture="auto")
    assert {one.rsplit(".", 1)[1] for one in explanation.layers[0].joined} == {"q_proj", "k_proj", "v_proj"}
    assert diagnose(source, architecture="auto").architecture == NAME
    plan = plan_of(source, "none", kv_cache="fp8")
    assert plan.notes[0] == SAID
    assert asked_times.read_text() == "asked\n" * 3


def parts(plan: Plan) -> set[str]:
    """The projections that are quantized."""
    return {name.rpartition(".")[2].removesuffix("_proj") for name in plan.layers}


def layer_numbers() -> list[str]:
    return [f"model.layers.{number}" for number in range(small_checkpoints.LAYERS)]


def no_scheme_for_down(layers: dict[str, Any]) -> None:
    for one in layers.values():
        one["asked"] = not one["prefix"].endswith("down_proj")


def turned(layers: dict[str, Any]) -> None:
    """Has q its rows in another order."""
    for one in layers.values():
        (name, _, rows), *others = one["holds"]["weight"]
        if "qkv" in one["prefix"]:
            one["holds"]["weight"] = [[name, rows // 2, rows // 2], [name, 0, rows // 2], *others]


def joined_across_modules(layers: dict[str, Any]) -> None:
    for at in layer_numbers():
        both = layer(f"{at}.both", f"{at}.self_attn.o_proj", f"{at}.mlp.down_proj", kind="RowParallelLinear")
        del layers[f"{at}.self_attn.o_proj"], layers[f"{at}.mlp.down_proj"]
        layers[both["prefix"]] = both


def joined_with_more_in_one_layer(layers: dict[str, Any]) -> None:
    at = "model.layers.1"
    qkv = [f"{at}.self_attn.{part}_proj" for part in "qkv"]
    del layers[f"{at}.self_attn.o_proj"]
    more = layer(f"{at}.self_attn.qkv_proj", *qkv, f"{at}.self_attn.o_proj", kind="QKVParallelLinear")
    layers[more["prefix"]] = more
    # One of them has its rows in another order, in that layer alone.
    name, _, rows = more["holds"]["weight"].pop()
    more["holds"]["weight"] += [[name, 8, rows - 8], [name, 0, 8]]


def test_what_the_engine_joins_or_leaves_stays_as_it_is(subtests, source, tmp_path, engine):
    everything = {"q", "k", "v", "o", "gate", "up", "down"}
    for change, stays in (
        (no_scheme_for_down, {"down"}),
        (turned, {"q", "k", "v"}),
        (joined_across_modules, {"o", "down"}),
        (joined_with_more_in_one_layer, {"q", "k", "v", "o"}),
    ):
        with subtests.test(change.__name__):
            found = answer()
            change(found["layers"])
            answering(engine, tmp_path, found)
            plan = plan_of(source)
            assert parts(plan) - {"qkv", "gate_up"} == everything - stays
            assert not any("qkv" in name for name in plan.layers)
            if change is turned:
                kept = [kept.tensor.module for kept in plan.decisions.passthrough if "another order" in kept.why]
                assert {name.rpartition(".")[2].removesuffix("_proj") for name in kept} == stays
            if change is no_scheme_for_down:
                assert "model.layers.0.mlp.down_proj" in ignored_layers(plan)
                assert summary.schemes(plan) == {plan.scheme: 6 * small_checkpoints.LAYERS}


def test_what_has_to_stay_is_listed_under_the_engine_s_name_or_refused(source, tmp_path, engine):
    found = answer()
    for one in found["layers"].values():
        one |= {"own": False, "prefix": one["prefix"].replace("model.", "inner.")}
    answering(engine, tmp_path, found)
    assert "inner.layers.0.mlp.down_proj" in ignored_layers(plan_of(source, ignore=["**.down_proj"]))

    found = answer()
    turned(found["layers"])
    for one in found["layers"].values():
        if "qkv" in one["prefix"]:
            one |= {"own": False, "named": False, "prefix": "elsewhere.qkv_proj"}
    answering(engine, tmp_path, found)
    with pytest.raises(PlanError, match=r"vLLM 9\.9 builds elsewhere\.qkv_proj quantized, whatever config\.json lists"):
        plan_of(source)


def test_an_embedding_is_quantized_where_the_engine_asks_for_its_scheme(subtests, source, tmp_path, engine):
    for prefix, asked, found in (
        ("model.embed_tokens", True, "name"), ("", True, "class"), ("", False, None), ("model.embed_tokens", False, None)
    ):  # fmt: skip
        with subtests.test(prefix=prefix, asked=asked):
            told = answer()
            embedding = layer(prefix, "model.embed_tokens", kind="VocabParallelEmbedding", asked=asked)
            told["layers"]["model.embed_tokens"] = {**embedding, "kinds": ["VocabParallelEmbedding"]}
            tied = layer("lm_head", "model.embed_tokens", kind="ParallelLMHead")
            told["layers"]["lm_head"] = {**tied, "kinds": ["ParallelLMHead", "VocabParallelEmbedding"]}
            answering(engine, tmp_path, told)
            if found is None:
                with pytest.raises(PlanError, match="its embedding stays unquantized"):
                    plan_of(source, "channel", quantize_embeddings=True)
            else:
                plan = plan_of(source, "channel", quantize_embeddings=True)
                assert plan.model.embedding == found
                assert plan.decisions.of("model.embed_tokens").scheme == INT8_W8A16


STACKS = ("gate_up_proj", "down_proj")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def with_experts(*names: str, rows: int = 4) -> dict[str, Any]:
    """What vLLM says where the weights of the experts' names below `mlp.experts` are loaded into one layer of experts."""
    found = answer()
    for number in range(small_checkpoints.LAYERS):
        at = f"model.layers.{number}.mlp"
        del found["layers"][f"{at}.gate_up_proj"]
        one = found["layers"].pop(f"{at}.down_proj") | {"prefix": f"{at}.experts", "experts": 2}
        weights = {"w13_weight": names[:-1], "w2_weight": names[-1:]}
        one["holds"] = {key: [[f"{at}.experts.{name}", 0, rows] for name in those] for key, those in weights.items()}
        found["layers"][one["prefix"]] = one
    return found


@pytest.fixture
def stacked(source: Path) -> Callable[..., Path]:
    """Has the model two experts in stacks [2, in, out] that end in `suffix`; `square`: each as wide as it is long."""

    def change(suffix: str = "", square: bool = False) -> Path:
        def stack(tensors: dict[str, torch.Tensor]) -> None:
            for number in range(small_checkpoints.LAYERS):
                at = f"model.layers.{number}.mlp"
                gate, up, down = (tensors.pop(f"{at}.{name}.weight") for name in PROJECTIONS)
                if square:
                    size = down.shape[0]
                    gate, up, down = (torch.ones(size, size, dtype=gate.dtype) for _ in range(3))
                held = {"gate_up_proj": torch.cat([gate, up]), "down_proj": down}
                if square:
                    held = {"gate_proj": gate, "up_proj": up, "down_proj": down}
                for name, one in held.items():
                    tensors[f"{at}.experts.{name}{suffix}"] = torch.stack([one.T, one.T]).contiguous()

        small_checkpoints.change_weights(source, stack)
        return source

    return change


def answering_in_turn(engine: Engine, tmp_path: Path, *found: Any) -> None:
    """One answer after the other."""
    for number, one in enumerate(found):
        (tmp_path / f"answer{number}").write_text(json.dumps(one))
    counted = f'n=$(($(wc -l < "{tmp_path}/asked") - 1))'
    engine(f'{counted}; cp "$3/shapes.json" "{tmp_path}/shapes$n"; cp "{tmp_path}/answer$n" "$2/0.json"')


SINGLE = [f"{number}.{name}.weight" for name in PROJECTIONS for number in range(2)]


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_stacks_are_cut_where_the_engine_loads_their_experts_one_by_one(suffix, stacked, tmp_path, engine):
    source, stacks = stacked(suffix), [name + suffix for name in STACKS]
    answering_in_turn(engine, tmp_path, with_experts(*stacks), with_experts(*SINGLE))
    weights = [one for one, _ in plan_of(source).decisions.quantized if "mlp" in one.module]
    assert {(one.module.partition("mlp.")[2], one.transposed) for one in weights} == {
        (f"experts.{number}.{name}", True) for number in range(2) for name in PROJECTIONS
    }
    # It was asked a second time, about those.
    asked = json.loads((tmp_path / "shapes1").read_text())
    assert {name.partition("experts.")[2] for name in asked if "layers.0.mlp" in name} == {*SINGLE}

    # As of Aria: what holds up is loaded over what holds gate.
    (tmp_path / "asked").unlink()
    answering_in_turn(engine, tmp_path, with_experts(*stacks), with_experts(*SINGLE[2:]))
    with pytest.raises(PlanError, match="nor left out: a stack of experts that the engine does not load one by one"):
        plan_of(source)


def test_stacks_of_which_none_tells_its_axes_are_refused(stacked, tmp_path, engine):
    source = stacked(square=True)
    answering_in_turn(engine, tmp_path, with_experts(*PROJECTIONS), with_experts(*SINGLE))
    with pytest.raises(PlanError, match="nor left out: a stack of experts whose sizes do not tell which axis is which"):
        plan_of(source)


LONG_ERROR = 'printf "Traceback\nValueError: Nonsense is not supported. Known are: " > "$2/0.error"; seq -s, 30000'
# What a script does as the engine, and what the plan says.
FAILING = {
    'printf "Traceback\nValueError: no such class\n" > "$2/0.error"': "vLLM cannot build it: ValueError: no such class",
    'echo garbage > "$2/0.json"': "vLLM died, or its answer cannot be read",
    "exit 0": "as vLLM ended without an answer: look",
    'printf "" > "$2/0.error"': "as vLLM cannot build it: look",
    f'{LONG_ERROR} >> "$2/0.error"': "vLLM cannot build it: ValueError: Nonsense is not supported. Known are",
    "echo 'No module named vllm' >&2; exit 1": "does not say what vLLM builds: No module named vllm",
    'printf "a\\033[31mb\n" > "$2/0.error"': "vLLM cannot build it: a [31mb",
}


def test_names_decide_where_the_engine_fails_and_the_plan_says_why(subtests, source, engine, tmp_path, monkeypatch):
    assert plan_of(source).notes[0] == (
        "decided from names and shapes alone, as no vLLM is here to be asked (OPENQUANT_VLLM names a Python that has "
        "it): look at the plan, and at what the engine makes of it"
    )
    for script, why in FAILING.items():
        with subtests.test(script):
            engine(script)
            plan = plan_of(source)
            assert plan.model.name == GENERIC.name
            assert plan.notes[0].startswith("decided from names and shapes alone, as ")
            assert why in plan.notes[0]
            assert plan.notes[0].isprintable()
    monkeypatch.setattr(client, "MAX_BYTES", 1 << 16)
    engine("yes")
    assert "its messages are too long" in plan_of(source).notes[0]

    # Not where the engine quantizes nothing.
    answering(engine, tmp_path, {**answer(), "layers": {}})
    with pytest.raises(PlanError, match=rf"vLLM 9\.9 builds no layer of {NAME} that could be quantized") as raised:
        plan_of(source)
    assert raised.value.hint == 'architecture="generic" goes by names and shapes alone'


def test_an_engine_that_hangs_is_ended_with_all_it_started(source, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "SECONDS", 1)
    engine(f"sh -c 'sleep 3; echo alive > {tmp_path}/alive' & sleep 60")
    begin = time.monotonic()
    assert "no answer in 1 s" in plan_of(source).notes[0]
    assert time.monotonic() - begin < 20
    time.sleep(3)
    assert not (tmp_path / "alive").exists()


def test_layers_without_number_are_not_asked_about(source, engine, tmp_path):
    asked_times = answering(engine, tmp_path, answer())
    for count in (10**9, 10**30):
        change_json(source / "config.json", lambda config, count=count: config.update(num_hidden_layers=count))
        assert "config.json counts 1" in plan_of(source).notes[0]
    assert not asked_times.exists()


def test_no_code_of_a_repository_is_named_to_the_engine(source: Path, engine: Engine, tmp_path: Path) -> None:
    engine(f'cp "$3/config.json" {tmp_path}/told; ls "$3" > {tmp_path}/files; exit 1')
    (source / "x.py").write_text("raise SystemExit")
    plan_of(source)
    assert "auto_map" not in json.loads((tmp_path / "told").read_text())
    assert (tmp_path / "files").read_text() == "config.json\nshapes.json\n"


def test_an_output_goes_on_as_it_was_begun(source, engine, tmp_path, monkeypatch):
    answering(engine, tmp_path, answer())
    out = tmp_path / "out"
    compress(source, out, "channel", architecture="auto")
    whole = (out / "model.safetensors").read_bytes()
    journal = json.loads((out / ".openquant.json").read_text())
    (out / ".openquant.json").write_text(json.dumps({**journal, "done": False}))
    (out / "model.safetensors").unlink()
    # Without an engine, and with one that says something else.
    monkeypatch.delenv("OPENQUANT_VLLM")
    again = compress(source, out, "channel", architecture="auto")
    assert (again.resumed, (out / "model.safetensors").read_bytes()) == (True, whole)
    engine("exit 1")
    assert compress(source, out, "channel", architecture="auto").resumed
    # What was decided without one goes on so, too.
    monkeypatch.delenv("OPENQUANT_VLLM")
    compress(source, tmp_path / "plain", architecture="auto")
    asked_times = answering(engine, tmp_path, answer())
    asked_times.unlink(missing_ok=True)
    assert compress(source, tmp_path / "plain", architecture="auto").architecture == "generic"
    assert not asked_times.exists()
    # Another that replaces it asks anew.
    assert compress(source, tmp_path / "plain", architecture="auto", overwrite=True).architecture == NAME


def test_an_output_is_checked_and_asked_about_without_an_engine(source, engine, tmp_path, monkeypatch):
    answering(engine, tmp_path, answer())
    out = tmp_path / "out"
    compress(source, out, "block", architecture="auto")
    monkeypatch.delenv("OPENQUANT_VLLM")
    assert verify(out, source).problems == ()
    explanation = explain(out, "model.layers.0.self_attn.q_proj", "block", architecture="auto")
    assert (explanation.architecture, explanation.layers[0].scheme) == (NAME, "block")
    assert read_recipe(out) == ["--scheme=block", "--architecture=auto"]


def test_a_journal_of_anybody_decides_nothing(source, engine, tmp_path):
    answering(engine, tmp_path, answer())
    found = ArchitectureChoice("auto").entry(open_checkpoint(source))
    assert found is not None
    held = architecture_to_json(found)
    assert architecture_from_json(held, NAME) == found
    for broken in (
        [], {}, "compress", "{", {"name": NAME, "decided": "x"}, {**held, "name": "OtherForCausalLM"},
        {**held, "compress": ["a"] * 20_000}, {**held, "compress": ["{"]}, {**held, "layers": "x" * 10_000},
    ):  # fmt: skip
        assert architecture_from_json(broken, NAME) is None, str(broken)[:100]


def test_a_class_with_an_entry_asks_nobody(tmp_path: Path, engine: Engine) -> None:
    asked_times = engine("exit 1")
    source = small_checkpoints.write(tmp_path / "known", "Qwen3ForCausalLM")
    assert plan_of(source).model.name == "Qwen3ForCausalLM"
    assert not asked_times.exists()


def test_an_unknown_class_says_that_an_engine_can_be_asked(source: Path) -> None:
    with pytest.raises(OpenQuantError) as raised:
        compress(source, dry_run=True)
    assert 'architecture="auto" asks vLLM how it builds the class (OPENQUANT_VLLM names' in str(raised.value.hint)


def test_a_few_layers_of_each_kind_are_asked_about() -> None:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (8, 4)}
    for number in range(60):
        part = "dense" if number < 3 else f"experts.{number % 2}"
        shapes |= {f"model.layers.{number}.{part}.weight": (4, 4), f"model.layers.{number}.norm.weight": (4,)}
    found = build.sample_layers(shapes)
    numbers = {int(name.split(".")[2]) for name in found if "layers" in name}
    assert numbers == {0, 1, 2, 3, 5, 59, 4, 6, 58}
    assert list(found) == [name for name in shapes if name in found]


def test_nothing_is_said_of_generic_that_is_not_of_it() -> None:
    assert architecture_from_json(architecture_to_json(replace(GENERIC, decided="x")), NAME) == GENERIC


def test_an_engine_is_not_asked_about_more_tensors_or_layers_than_any_model_has(source, monkeypatch):
    checkpoint = open_checkpoint(source)
    monkeypatch.setattr(build, "MOST_TENSORS", 1)
    with pytest.raises(PlanError, match=r"^\d+ of its tensors differ in more than the layer$") as refused:
        build.build_architecture(checkpoint, Path("no-interpreter"))
    assert refused.value.hint == "no engine loads so many"
    monkeypatch.setattr(build, "MOST_LAYERS", 0)
    with pytest.raises(PlanError, match=r"^config.json counts \d+ layers$"):
        build.build_architecture(checkpoint, Path("no-interpreter"))
