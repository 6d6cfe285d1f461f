"""openquant fit --search: mixtures of all sizes measured, in a table, as JSON and on a page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import openquant
from conftest import EXAMPLE, run_openquant
from openquant.errors import UsageError
from openquant.files.checkpoint import open_checkpoint
from openquant.fit.result import Point, SearchResult
from openquant.report.fit import frontier_text


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which a search of the example has run: found.json, page.html and the scores."""
    root = tmp_path_factory.mktemp("searched")
    # 2 GB are the engine's, 8 % are left free; of 2.1784 GB four megabytes are for weights.
    words = ("--search", "--candidates", "nvfp4,int8-weights", "--for", "vllm", "--gpu", "2.1784GB", "--context", "1")
    words += ("--report", "page.html", "--json")
    done = run_openquant("fit", EXAMPLE, *words, cwd=root)
    assert done.returncode == 0, done.stderr
    (root / "found.json").write_text(done.stdout)
    return root


def test_single_schemes_and_mixtures_of_half_bits_are_measured(searched: Path) -> None:
    assert sorted(path.name for path in searched.iterdir()) == ["found.json", "page.html", "tiny-qwen3.scores.json"]
    found = json.loads((searched / "found.json").read_text())
    points = found["points"]
    assert [point["name"] for point in points] == [
        "nvfp4",
        "5bits",
        "fits 2.1784GB",
        *(f"{bits}bits" for bits in ("5.5", "6", "6.5", "7", "7.5", "8")),
        "int8-weights",
    ]
    for key in ("bytes", "bits"):
        values = [point[key] for point in points]
        assert values == sorted(values)
    kls = [point["kl"] for point in points]
    assert kls == sorted(kls, reverse=True)
    assert all(point["interval"][0] <= point["kl"] <= point["interval"][1] for point in points)
    assert all(sum(point["shares"].values()) == pytest.approx(1) for point in points)
    assert points[0]["shares"] == {"nvfp4": 1.0} and points[5]["shares"].keys() == {"nvfp4", "int8-weights"}
    assert found["source_bytes"] == sum(info.nbytes for info in open_checkpoint(EXAMPLE).tensors.values())


def test_the_command_of_a_point_makes_it(searched: Path, tmp_path: Path) -> None:
    points = json.loads((searched / "found.json").read_text())["points"]
    point = next(point for point in points if point["name"] == "5.5bits")
    words = point["command"].split()
    assert words[:2] == ["openquant", "compress"]
    # The scores are read again.
    done = run_openquant(*words[1:], "-o", searched / "made", cwd=searched)
    assert done.returncode == 0, done.stderr
    assert "--fit: scores of 16 units from " in done.stderr
    assert f"--fit: the mixture: KL {point['kl']:.4f} " in done.stderr
    stored = sum(info.nbytes for info in open_checkpoint(searched / "made").tensors.values())
    assert stored == point["bytes"]


def test_the_page_shows_the_frontier(searched: Path) -> None:
    page = (searched / "page.html").read_text()
    assert "Size and distance from the source" in page
    # Once in each picture, and in the table.
    assert page.count(">5.5bits<") == 3
    assert "predicted KL" in page and re.search(r"nvfp4 \d+\.\d %, ?int8-weights|int8-weights \d+\.\d %, nvfp4", page)


def test_the_table_says_what_fits_a_gpu(searched: Path) -> None:
    found = json.loads((searched / "found.json").read_text())
    points = tuple(Point(**point) for point in found["points"])
    lines = frontier_text(SearchResult(**{**found, "points": points})).splitlines()
    assert lines[2] == "2.1784GB leaves 4.13 MB for weights"
    fits = {line.split()[0]: line.split()[-1] for line in lines if line.endswith(("  yes", "  no"))}
    assert fits["nvfp4"] == fits["5bits"] == fits["fits"] == "yes" and fits["6bits"] == fits["int8-weights"] == "no"
    command = next(line for line in lines if line.startswith("  openquant compress"))
    assert command.endswith("--fit 2.1784GB --context 1 --for vllm --candidates nvfp4,int8-weights")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--candidates", "int4"), "--candidates is for --search"),
        (("--text", "x.txt"), "--text is for --search"),
        (("--device", "cuda"), "--device is for --search"),
        (("--report", "page.html"), "--report is for --search"),
        (("--search", "--candidates", "int4,int4"), "--candidates names a scheme twice"),
        (("--search", "--candidates", "int5", "--for", "sglang"), "SGLang does not load int5 of this model: "),
        (("--search", "--text", "missing.txt"), "missing.txt"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = run_openquant("fit", EXAMPLE, *words, cwd=tmp_path)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert not list(tmp_path.iterdir())


def test_the_function_says_what_is_wrong() -> None:
    with pytest.raises(UsageError, match="^candidates names tensor, whose `fp8` config"):
        openquant.search_mixtures(EXAMPLE, candidates=["tensor"])
