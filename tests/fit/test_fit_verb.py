"""compress --fit: budgets, the check on other texts, kept scores, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from conftest import EXAMPLE, tree
from openquant import compress, verify
from openquant.cli.commands import main
from openquant.errors import OpenQuantError, PlanError, UsageError
from openquant.files.cards import published_card
from openquant.files.checkpoint import open_checkpoint
from openquant.fit import session
from openquant.fit.budget import CHOSEN, Budget, read_budget, refuse_options
from openquant.fit.menu import UNQUANTIZED, units_of
from openquant.fit.run import joined_patterns
from openquant.fit.session import read_scores, scores_json
from openquant.formats.hardware import find_gpu
from openquant.formats.schemes import find_scheme
from openquant.options import Recipe
from openquant.plan.plan import make_plan
from openquant.plan.serving import OVERHEAD, UTILIZATION
from openquant.streaming import memory
from support import small_checkpoints, starting
from support.reporters import Told

# The file of the example's scores, and a size of its weights, in bytes.
NAME, LIMIT = "tiny-qwen3.scores.json", 4_066_500


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtures are compared on fewer texts, where the choice does not depend on them."""
    monkeypatch.setattr(session, "COMPARED", (4, 96))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scores of the example in the default schemes, and the output that came with them."""
    root = tmp_path_factory.mktemp("kept")
    words = ["-m", str(EXAMPLE), "-o", "out", "--fit", f"size={LIMIT}B"]
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()) as err, redirect_stdout(StringIO()):
        patch.chdir(root)
        assert main(["compress", *words]) == 0, err.getvalue()
    (root / "said").write_text(err.getvalue())
    return root


@pytest.fixture
def scored(kept: Path, tmp_path: Path) -> Path:
    """A directory with these scores."""
    shutil.copy(kept / NAME, tmp_path / NAME)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What a command says that succeeds."""
    code = main([str(word) for word in words])
    err = capsys.readouterr().err
    assert code == 0, err
    return err


def stored(root: Path) -> int:
    return sum(info.nbytes for info in open_checkpoint(root).tensors.values())


def test_budgets_are_read() -> None:
    for text, budget in [
        ("24GB", Budget("gpu", 24e9)),
        ("2x80GiB", Budget("gpu", 80 * 2**30, 2)),
        ("size=12.5GB", Budget("size", 12.5e9)),
        ("4.5bits", Budget("bits", 4.5)),
        ("5 bits", Budget("bits", 5)),
        ("kl=0.02", Budget("kl", 0.02)),
        ("4090", Budget("gpu", int(23.5 * 2**30), 1, find_gpu("RTX 4090"))),
        ("2x RTX 4090", Budget("gpu", int(23.5 * 2**30), 2, find_gpu("RTX 4090"))),
        ("4xA100-80", Budget("gpu", int(79.1 * 2**30), 4, find_gpu("A100-80"))),
        # As a size it would be 3090 TiB.
        ("3090Ti", Budget("gpu", int(23.5 * 2**30), 1, find_gpu("RTX 3090 Ti"))),
    ]:
        assert read_budget(text) == budget


def test_other_budgets_are_refused(tmp_path: Path) -> None:
    texts = ["24", "0GB", "0x24GB", "-1GB", "kl=0", "kl=-1", "kl=x", "size=", "0bits", "bits", "24GB 8k", "0x4090"]
    for text in (*texts, "kl=inf", "9" * 400 + "GB"):
        with pytest.raises(UsageError, match="^--fit .* is no size") as caught:
            compress(EXAMPLE, tmp_path / "out", fit=text)
        assert "5.0bits" in caught.value.hint, text


def test_a_mixture_is_smaller_than_its_budget_and_better_than_one_scheme(kept: Path) -> None:
    out = kept / "out"
    assert stored(out) <= LIMIT
    lines = [line for line in (kept / "said").read_text().splitlines() if line.startswith("--fit: ")]
    assert (
        lines[0]
        == "--fit: scoring 16 units in int4, nvfp4, int8-weights with 3 documents of 96 tokens: prose (1), code (1), chats (1)"
    )
    assert lines.pop(1).startswith("--fit: wrote ")
    mixture, single = (
        re.fullmatch(r"--fit: (.+): KL (\S+) \[.*\] nats, (\S+) GB, (\S+) bits a weight", line) for line in lines[2:]
    )
    assert mixture is not None and single is not None
    assert (mixture[1], single[1]) == ("the mixture", "--scheme nvfp4")
    # It loses half of what the scheme does, and has 5 % more bytes.
    assert float(mixture[2]) <= 0.55 * float(single[2])
    assert not verify(out, EXAMPLE, full=True).problems

    scores = json.loads((kept / NAME).read_text())
    assert len(scores["units"]) == 16 and scores["units"][0]["kl"].keys() == {"int4", "nvfp4", "int8-weights"}


def test_a_mixture_is_repeated_by_its_recipe(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "compress", "-m", EXAMPLE, "-o", tmp_path / "again", "--recipe", kept / "out")
    for file in (kept / "out").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
    assert "Other sizes" not in (tmp_path / "again" / "README.md").read_text()


def test_kept_scores_answer_a_dry_run(
    scored: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for fit in ["6bits", "kl=0.002"]:
        with subtests.test(fit=fit):
            err = said(capsys, "compress", "-m", EXAMPLE, "-o", scored / "more", "--fit", fit, "--dry-run")
            assert [path.name for path in scored.iterdir()] == [NAME]
            assert f"--fit: scores of 16 units from {scored / NAME}" in err
            assert "--fit: this mixture follows from the scores; nothing is compared on other texts" in err


@pytest.mark.usefixtures("few")
def test_the_commands_that_serve_have_the_context_there_is_room_for(
    scored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = int((LIMIT + OVERHEAD + 1024 * 2048) / UTILIZATION) + 2
    words = ("compress", "-m", EXAMPLE, "-o", scored / "out", "--fit", f"{memory}B", "--context", 1024)
    assert main([str(word) for word in words]) == 0
    out = capsys.readouterr().out
    card = (scored / "out" / "README.md").read_text()
    commands = [
        "vllm serve out --max-model-len 1024",
        "python -m sglang.launch_server --model-path out --context-length 1024",
    ]
    assert out.splitlines()[-2:] == [f"  {line.replace(' out', f' {scored}/out')}" for line in commands]
    assert "\n".join(["```", *commands, "```"]) in card
    published = published_card(card, "org/name", None)
    assert "\n".join(["```", *(line.replace(" out", " org/name") for line in commands), "```"]) in published


def test_a_dry_run_without_scores_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("compress", "-m", EXAMPLE, "-o", tmp_path / "out", "--fit", "6bits", "--gptq", "--dry-run")
    assert main([str(word) for word in words]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: --dry-run writes nothing, and there are no scores of this model in ")
    assert hint == "hint: the mixture is not known without them: leave --dry-run out once, and the scores are kept"


def test_the_card_shows_what_it_chose_from(kept: Path) -> None:
    card = (kept / "out" / "README.md").read_text()
    table = card.partition("## Other sizes\n")[2].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if line.startswith("| ")][1:]
    assert {"int4", "nvfp4", "6bits", "int8-weights"} < {row[0] for row in rows}
    [own] = [row for row in rows if row[0].endswith(", this output**")]
    assert f"size&#61;{LIMIT}B" in own[0] or f"size={LIMIT}B" in own[0]
    # What was measured has an interval: the mixture, and the best single scheme that fits.
    assert sorted(row[0] for row in rows if not row[3].startswith("about ")) == sorted([own[0], "nvfp4"])
    assert all(re.fullmatch(r"\S+ \[\S+, \S+\]", row[3]) for row in rows if not row[3].startswith("about "))
    # A full bar is 24 wide.
    assert max(row[4].count("█") for row in rows) == 24
    sizes = [float(row[1]) for row in rows]
    assert sizes == sorted(sizes) and len(rows) >= 9


@pytest.mark.usefixtures("few")
def test_the_head_and_the_embedding_are_units_too(tmp_path: Path) -> None:
    out, limit = tmp_path / "out", 3_150_000
    compress(EXAMPLE, out, fit=f"size={limit}B", engines="vllm", quantize_lm_head=True, quantize_embeddings=True)
    names = {info.name for info in open_checkpoint(out).tensors.values()}
    assert {"lm_head.weight_scale", "model.embed_tokens.weight_scale"} <= names
    assert stored(out) <= limit
    assert not verify(out, EXAMPLE, full=True).problems


@pytest.mark.usefixtures("few")
def test_a_kl_divergence_gives_the_smallest_mixture(scored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    err = said(capsys, "compress", "-m", EXAMPLE, "-o", scored / "out", "--fit", "kl=0.002")
    measured = [float(kl) for kl in re.findall(r"--fit: the mixture: KL (\S+) ", err)]
    assert min(measured) <= 0.002
    # Uniform nvfp4 (3.87 MB) loses 0.009, int8-weights (5.27 MB) 0.0002.
    assert 3_900_000 < stored(scored / "out") < 4_900_000


@pytest.mark.usefixtures("few")
def test_where_one_scheme_is_as_good_it_is_written(scored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    err = said(capsys, "compress", "-m", EXAMPLE, "-o", scored / "out", "--fit", "size=5270000B")
    assert "--fit: the mixture is not better beyond chance, so --scheme int8-weights is taken" in err
    compress(EXAMPLE, scored / "alone", "int8-weights")
    for file in (scored / "alone").glob("*.safetensors"):
        assert file.read_bytes() == (scored / "out" / file.name).read_bytes()
    assert "| **int8-weights, this output** |" in (scored / "out" / "README.md").read_text()


def test_what_cannot_be_chosen_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    whole = (
        "2 GB of GPU memory leave nothing for weights: a KV cache of 8,192 tokens takes 0.0 GB, and engines take 2 GB"
    )
    small = "--fit 2bits leaves 0.00289 GB for weights, and the smallest mixture takes 0.00373 GB (4.13 bits a weight)"
    rows: list[tuple[type[OpenQuantError], dict[str, Any], str]] = [
        (PlanError, {"fit": "2bits"}, small),
        (PlanError, {"fit": "24GB"}, '--fit 24GB leaves 20.1 GB for weights, and the unquantized ones take 0.00839 GB'),
        (PlanError, {"fit": "4090", "candidates": "int4"}, "--fit 4090 leaves 21.2 GB for weights"),
        (PlanError, {"fit": "2GB"}, whole),
        (UsageError, {"fit": "cpu"}, "how much memory a CPU has for weights is not known"),
        (PlanError, {"fit": "3x24GB"}, "3 GPUs cannot share this model: they do not divide it"),
        (UsageError, {"scheme": "int4"}, "--fit chooses the schemes, and --scheme is given"),
        (UsageError, {"context": 0}, "a context of 0 tokens holds nothing"),
        (UsageError, {"candidates": "tensor"}, "--candidates names tensor, whose `fp8` config has one scheme for all layers"),
        (UsageError, {"candidates": ["int4", "int4"]}, "--candidates names a scheme twice"),
        (OpenQuantError, {"candidates": "int4,int5"}, "SGLang does not load int5 of this model: "),
        (OpenQuantError, {"fit": "T4", "candidates": "int4"}, "SGLang has no kernel for int4 on T4"),
        (UsageError, {"fit": None, "context": 4096}, "--context, --for and --candidates are for --fit"),
    ]  # fmt: skip
    for kind, given, message in rows:
        with subtests.test(given=given):
            with pytest.raises(kind) as caught:
                compress(EXAMPLE, tmp_path / "out", **{"fit": "5bits", **given})
            assert caught.value.message.startswith(message)


def test_a_model_that_repeats_its_layers_is_refused(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", "HrmTextForCausalLM")
    with pytest.raises(
        PlanError, match="^HrmTextForCausalLM runs its layers several times, and --fit measures a layer"
    ):
        compress(source, tmp_path / "out", fit="5bits")


def test_options_that_it_decides_are_refused(subtests: pytest.Subtests) -> None:
    for name in CHOSEN:
        with subtests.test(name=name):
            given = {"scheme": "int4", "scheme_for": {"**": "int4"}, "smooth": 0.5, "activation_scheme": "static"}
            given |= {"format": "compressed-tensors", "scale_format": "ue8m0", "group_size": 64}
            value = given.get(name, True)
            recipe = Recipe(**{name: value})  # type: ignore[arg-type]
            flag = "--" + name.replace("_", "-")
            with pytest.raises(UsageError, match=f"^--fit chooses the schemes, and {flag} is given"):
                refuse_options(recipe)


def test_scores_that_are_kept_need_no_memory(scored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SUSPENDED", 1 << 40)
    with pytest.raises(UsageError, match="^a memory of 64,000,000,000 bytes is too little: scoring units takes up to "):
        compress(EXAMPLE, scored / "elsewhere" / "out", fit="6bits", max_memory="64GB")
    compress(EXAMPLE, scored / "out", fit="6bits", max_memory="64GB", dry_run=True)


def test_ranks_find_what_one_process_finds(kept: Path, tmp_path: Path) -> None:
    with starting.job() as job:
        done = job.finish(2, "-m", EXAMPLE, "-o", tmp_path / "out", "--fit", f"size={LIMIT}B")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / NAME).read_bytes() == (kept / NAME).read_bytes()
    assert tree(tmp_path / "out") == tree(kept / "out")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out", NAME]
    # One of them speaks.
    assert done.stderr.count("--fit: scoring 16 units in int4, nvfp4, int8-weights") == 1


@pytest.mark.usefixtures("few")
def test_where_only_unquantized_weights_lose_so_little_nothing_is_written(scored: Path) -> None:
    with pytest.raises(PlanError, match="^only unquantized weights lose so little"):
        compress(EXAMPLE, scored / "out", fit="kl=1e-12")
    assert not (scored / "out").exists()


def test_scores_that_do_not_belong_to_a_run_are_not_used(tmp_path: Path) -> None:
    units = units_of({"int8-weights": make_plan(open_checkpoint(EXAMPLE), find_scheme("int8-weights"))})
    scores = tuple({"int8-weights": 0.001 * number, UNQUANTIZED: 0.0} for number in range(len(units)))
    file = tmp_path / "kept.scores.json"
    file.write_bytes(scores_json(scores, units, {"model": "this"}))
    assert read_scores(file, {"model": "this"}) == scores
    assert read_scores(file, {"model": "another"}) is None
    for damaged in (b"", b"{", b"\xff\xfe", b"{}", b"[]"):
        file.write_bytes(damaged)
        assert read_scores(file, {"model": "this"}) is None, damaged
    assert read_scores(tmp_path / "missing.scores.json", {}) is None


def test_a_file_of_another_kind_is_not_replaced_by_scores(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"mine": 1}')
    with pytest.raises(UsageError, match=f"{NAME} exists and is not a file of scores that openquant wrote"):
        compress(EXAMPLE, tmp_path / "out", fit="6bits")
    assert (tmp_path / NAME).read_text() == '{"mine": 1}'


@pytest.mark.usefixtures("few", "at_once")
def test_scoring_that_is_stopped_continues_and_gives_the_same_scores(kept: Path, tmp_path: Path) -> None:
    part = tmp_path / f"{NAME}.part"

    def stop(*_: int) -> None:
        if part.exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(EXAMPLE, tmp_path / "out", fit="6bits", reporter=Told(stop))
    assert [path.name for path in tmp_path.iterdir()] == [part.name]
    seen = Told()
    compress(EXAMPLE, tmp_path / "out", fit="6bits", reporter=seen)
    assert any("an earlier run is continued" in note for note in seen.notes)
    assert (tmp_path / NAME).read_bytes() == (kept / NAME).read_bytes()
    assert not list(tmp_path.glob("*.part*"))


def test_layers_with_one_scheme_are_one_pattern() -> None:
    patterns = ["a.0.{q,k}", "a.11.{q,k}", "a.0.o", "a.2.{q,k}", "head", "b.1.experts.3.up", "b.2.experts.3.up"]
    assert joined_patterns(patterns) == ["a.{0,2,11}.{q,k}", "a.0.o", "head", "b.{1,2}.experts.3.up"]


@pytest.mark.usefixtures("few")
def test_the_schemes_that_it_may_choose_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FP8 layers have their activations in FP8 too, so that GPUs multiply in it."""
    out = tmp_path / "out"
    named = ("--candidates", "nvfp4,channel", "--for", "vllm")
    err = said(capsys, "compress", "-m", EXAMPLE, "-o", out, "--fit", "6bits", *named)
    assert "--fit: scoring 16 units in nvfp4, channel with " in err
    groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
    assert {group["format"] for group in groups.values()} == {"nvfp4-pack-quantized", "float-quantized"}
