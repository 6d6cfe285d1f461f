"""The planner of the static Space, in a Python without the packages that a browser has not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import openquant.cli.arguments
from openquant.api import compress
from openquant.fit.table import fit_table
from openquant.result import Reporter
from openquant.web.view import fit_html, plan_html
from support import small_checkpoints

SPACE = Path(__file__).parents[2] / "space"
# What Pyodide lacks, or would take long to load.
ABSENT = ("accelerate", "greenlet", "httpx2", "huggingface_hub", "jinja2", "numba", "numpy", "resource")
ABSENT += ("safetensors", "tokenizers", "torch", "tqdm", "transformers", "yaml")
# Plans requests on stdin, each a repository and what is asked of it, as worker.js does.
SCRIPT = """
import json, shutil, sys, tempfile
from pathlib import Path

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"{name} is not in a browser", name=name)

sys.meta_path.insert(0, Absent())
import without_numpy
import planner

for folder, asked in json.load(sys.stdin):
    source, root = Path(folder), Path(tempfile.mkdtemp())
    files = {path.name: [path.stat().st_size, "0" * 64] for path in source.iterdir()}
    index = source / "model.safetensors.index.json"
    for path in (source / "config.json", index):
        if path.exists():
            shutil.copy(path, root)
    try:
        shards = json.loads(planner.needed_shards(list(files), index.read_bytes() if index.exists() else None))
        heads = {name: (source / name).read_bytes()[:100] for name in shards}
        more = lambda name, offset, length: (source / name).read_bytes()[offset : offset + length]
        planner.open_repository({"repo": "org/name", "commit": "1" * 40, "files": files}, root, heads, more)
        print(planner.planned({"gpu": "4090", "context": "8k", "scheme": "", "options": {}, "target": ""} | asked))
    except Exception as error:
        print(json.dumps({"problem": planner.problem(error), "kind": type(error).__name__}))
    shutil.rmtree(root)
"""


def planned(*asked):
    """What the planner answers to each (directory, request)."""
    script = SCRIPT.replace("ABSENT:", f"{ABSENT!r}:")
    given = json.dumps([(str(folder), request) for folder, request in asked])
    done = subprocess.run([sys.executable, "-c", script], input=given, cwd=SPACE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


class Keeper(Reporter):
    def on_plan(self, plan, *_):
        self.plan = plan


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Checkpoints of many kinds."""
    root = tmp_path_factory.mktemp("sources")
    kinds = ("Qwen3MoeForCausalLM", "LlamaForCausalLM", "DeepseekV3ForCausalLM", "Gemma3ForConditionalGeneration")
    return [small_checkpoints.write(root / kind, kind) for kind in kinds]


def test_plans_are_those_of_the_command_line(sources, example):
    requests = [(source, {"scheme": scheme}) for source in sources for scheme in ("tensor", "nvfp4")]
    requests += [
        (
            example,
            {"scheme": "int4", "options": {"group_size": "32", "asymmetric": True, "ignore": "**.o_proj lm_head"}},
        ),
        (example, {"scheme": "channel", "options": {"quantize_lm_head": True, "no_search": False, "tp": ""}}),
    ]
    for (source, asked), answer in zip(requests, planned(*requests), strict=True):
        options = {name: value for name, value in asked.get("options", {}).items() if value}
        if "ignore" in options:
            options["ignore"] = options["ignore"].split()
        keeper = Keeper()
        result = compress(source, scheme=asked["scheme"], dry_run=True, reporter=keeper, **options).to_json()
        assert answer["html"] == plan_html(keeper.plan, f"org/name@{'1' * 40}")
        figures = {**answer["plan"], "model": result["model"], "revision": None}
        figures.pop("digest")
        assert figures == json.loads(json.dumps({name: result[name] for name in figures}))


def test_the_table_is_that_of_fit(example):
    (answer,) = planned((example, {"context": "1k"}))
    expected = fit_table(example, "4090", context="1k")
    assert answer["table"] == fit_html(expected, answer["scheme"]).replace(str(example), "org/name")
    assert answer["scheme"] == expected.uncalibrated


def test_the_command_writes_what_was_planned(example):
    options = {"quantize_lm_head": True, "ignore": "**.o_proj **.q_proj", "tp": "2"}
    (answer,) = planned((example, {"scheme": "int4", "options": options}))
    words = ["compress", "-m", "org/name", "--revision", "1" * 40, "--scheme", "int4"]
    words += ["--quantize-lm-head", "--ignore=**.o_proj", "--ignore=**.q_proj", "--tp=2"]
    assert answer["words"] == [*words, "--stream", "--push-only", f"--push-to-hub={answer['target']}"]
    # It is one that openquant takes.
    given = openquant.cli.arguments.verb_parser(answer["words"]).parse_args(answer["words"])
    assert (given.ignore, given.tp) == (["**.o_proj", "**.q_proj"], 2)


def test_what_runs_the_model_needs_torch_time_and_disk(example):
    kinds = [
        {"scheme": "int4"},
        {"scheme": "int4", "options": {"gptq": True}},
        # 5 MB for weights beside 2 GB for the engine and a cache of 1,024 tokens.
        {"scheme": "mixture", "gpu": "2.1816GB", "context": "1k", "options": {"gptq": True}},
    ]
    plain, gptq, mixture = planned(*((example, kind) for kind in kinds))
    assert [answer["runs_model"] for answer in (plain, gptq, mixture)] == [False, True, True]
    # 180 s a gigabyte on two CPUs, and a minute to install torch.
    assert gptq["seconds"] - plain["seconds"] == 62
    assert gptq["disk"] - plain["disk"] == 3e9 + gptq["plan"]["output_bytes"]
    head = ["compress", "-m", "org/name", "--revision", "1" * 40]
    assert gptq["words"][:8] == [*head, "--scheme", "int4", "--gptq"]
    assert mixture["words"] == [
        *(*head, "--fit=2.1816GB", "--context=1k", "--gptq", "--stream", "--push-only", "--push-to-hub=name-MIXED")
    ]
    assert openquant.cli.arguments.verb_parser(mixture["words"]).parse_args(mixture["words"]).fit == "2.1816GB"
    assert mixture["html"].startswith("<p>Which layer gets which scheme is measured when the job runs.")


HOSTILE = "<img src=x onerror=alert(1)>"
REFUSED = [
    ({"gpu": "abacus"}, "abacus"),
    ({"scheme": "keep"}, "--scheme keep is for the command line"),
    ({"scheme": "tensor", "options": {"group_size": "32"}}, "group"),
    ({"options": {"tp": "many"}}, "is not a number"),
    ({"options": {"ignore": HOSTILE}}, "&lt;img matches no module"),
    ({"scheme": "mixture", "gpu": ""}, "a mixture needs a GPU to fit"),
    ({"scheme": "tensor", "options": {"awq": True}}, "--awq brings --scheme tensor nothing"),
    ({"scheme": HOSTILE}, "&lt;img src=x onerror=alert(1)&gt;"),
]


def test_what_cannot_be_is_said(subtests, example, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    *answers, broken = planned(*((example, asked) for asked, _ in REFUSED), (tmp_path, {}))
    for (asked, message), answer in zip(REFUSED, answers, strict=True):
        with subtests.test(asked=asked):
            assert message in answer["problem"]
            assert "<img" not in answer["problem"]
            assert answer["kind"] in ("PlanError", "UsageError", "SourceError")
    # A bug says no more than its kind.
    assert broken["kind"] == "SourceError"
    assert "holds no safetensors weights" in broken["problem"]


def test_options_that_are_not_offered_are_left_out(example):
    files = {"calibration": "/etc/passwd", "text": "/etc/passwd"}
    options = {**files, "scheme_for": "x=int4", "--push": "x", "architecture": "auto"}
    (answer,) = planned((example, {"scheme": "int4", "options": options}))
    assert answer["words"][6:9] == ["int4", "--stream", "--push-only"]
