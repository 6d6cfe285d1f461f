"""openquant fit --search: mixtures of all sizes measured, in a table, as JSON and on a page."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from conftest import EXAMPLE
from openquant.cli.commands import main
from openquant.files.checkpoint import open_checkpoint
from openquant.fit import session
from openquant.fit.menu import find_frontier
from openquant.fit.table import Point, SearchResult
from openquant.report.fit import frontier_text


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in which a search of the example has run: found.json, page.html and the scores."""
    root = tmp_path_factory.mktemp("searched")
    # 2 GB are the engine's, 8 % are left free; of 2.1784 GB four megabytes are for weights.
    words = ["--search", "--candidates", "nvfp4,int8-weights", "--for", "vllm", "--gpu", "2.1784GB", "--context", "1"]
    words += ["--report", "page.html", "--json"]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        # Fewer texts than usual.
        patch.setattr(session, "COMPARED", (6, 128))
        patch.chdir(root)
        assert main(["fit", str(EXAMPLE), *words]) == 0
        (root / "found.json").write_text(out.getvalue())
        yield root


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


def test_the_command_of_a_point_makes_it(searched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = json.loads((searched / "found.json").read_text())["points"]
    point = next(point for point in points if point["name"] == "5.5bits")
    words = point["command"].split()
    assert words[:2] == ["openquant", "compress"]
    # The scores are read again.
    assert main([*words[1:], "-o", str(searched / "made")]) == 0
    err = capsys.readouterr().err
    assert "--fit: scores of 16 units from " in err
    assert f"--fit: the mixture: KL {point['kl']:.4f} " in err
    stored = sum(info.nbytes for info in open_checkpoint(searched / "made").tensors.values())
    shutil.rmtree(searched / "made")
    assert stored == point["bytes"]


def test_the_page_shows_the_frontier(searched: Path) -> None:
    page = (searched / "page.html").read_text()
    assert "Size and distance from the source" in page
    assert re.search(r"\d: 5.5bits", page)
    assert page.count(">5.5bits<") == 1
    assert "predicted KL" in page and re.search(r"nvfp4 \d+\.\d %, ?int8-weights|int8-weights \d+\.\d %, nvfp4", page)


def test_the_table_says_what_fits_a_gpu(searched: Path) -> None:
    found = json.loads((searched / "found.json").read_text())
    points = tuple(Point(**point) for point in found["points"])
    lines = frontier_text(SearchResult(**{**found, "points": points})).splitlines()
    assert lines[0].endswith(": Qwen3ForCausalLM, for vLLM")
    assert lines[2] == "2.1784GB leaves 4.13 MB for weights"
    fits = {line.split()[0]: line.split()[-1] for line in lines if line.endswith(("  yes", "  no"))}
    assert fits["nvfp4"] == fits["5bits"] == fits["fits"] == "yes" and fits["6bits"] == fits["int8-weights"] == "no"
    command = next(line for line in lines if line.startswith("  openquant compress"))
    assert command.endswith("--fit 2.1784GB --context 1 --for vllm --candidates nvfp4,int8-weights")

    # Without a GPU, and with one whose memory is not known.
    anywhere = tuple(replace(point, fits=None) for point in points)
    plain = SearchResult(**{**found, "points": anywhere, "limit": None})
    lines = frontier_text(plain).splitlines()
    assert (
        lines[2]
        == "how much memory a CPU has for weights is not known: name their size with compress --fit size=12.5GB"
    )
    assert not any(line.endswith(("  yes", "  no", "fits")) for line in lines)
    assert "leaves" not in frontier_text(replace(plain, gpu=None))


def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for words, message in [
        (("--candidates", "int4"), "--candidates is for --search"),
        (("--text", "x.txt"), "--text is for --search"),
        (("--report", "page.html"), "--report is for --search"),
        (("--search", "--candidates", "int4,int4"), "--candidates names a scheme twice"),
        (("--search", "--candidates", "int5", "--for", "sglang"), "SGLang does not load int5 of this model: "),
        (("--search", "--text", "missing.txt"), "missing.txt"),
    ]:
        with subtests.test(words=words, message=message):
            monkeypatch.chdir(tmp_path)
            assert main(["fit", str(EXAMPLE), *words]) == 2
            assert message in capsys.readouterr().err
            assert not list(tmp_path.iterdir())


def made_up(seed: int, units: int, choices: int) -> list[list[tuple[int, float]]]:
    chance = random.Random(seed)
    return [[(chance.randint(1, 40), round(chance.random(), 3)) for _ in range(choices)] for _ in range(units)]


def test_it_is_what_trying_all_mixtures_finds(subtests: pytest.Subtests) -> None:
    for seed in range(4):
        with subtests.test(seed=seed):
            units = made_up(seed, 6, 4)
            mixtures = [
                (sum(size for size, _ in mixture), sum(kl for _, kl in mixture))
                for mixture in itertools.product(*units)
            ]
            frontier = find_frontier(units)
            for limit in range(0, 250, 7):
                fitting = [kl for size, kl in mixtures if size <= limit]
                index = frontier.within(limit)
                assert (index is None) == (not fitting)
                if index is not None:
                    chosen = [unit[choice] for unit, choice in zip(units, frontier.choices(index), strict=True)]
                    assert frontier.kl[index] == pytest.approx(min(fitting))
                    assert (sum(size for size, _ in chosen), sum(kl for _, kl in chosen)) == (
                        frontier.nbytes[index],
                        pytest.approx(frontier.kl[index]),
                    )
            for kl in (0.0, 0.5, 1.0, 2.0, 9.0):
                fitting = [size for size, loses in mixtures if loses <= kl]
                index = frontier.at_most(kl)
                assert (index is None) == (not fitting)
                if index is not None:
                    assert frontier.nbytes[index] == min(fitting)


def test_hundreds_of_units_of_an_equal_size_are_exact() -> None:
    units = [[(64_000_000, 0.001 * (n % 7 + 1)), (120_000_000, 0.0001), (256_000_000, 0.0)] for n in range(400)]
    frontier = find_frontier(units)
    index = frontier.within(400 * 64_000_000 + 56_000_000 * 10)
    assert index is not None
    chosen = frontier.choices(index)
    assert [n % 7 for n, choice in enumerate(chosen) if choice] == [6] * 10
    assert np.all(np.diff(frontier.nbytes) > 0) and np.all(np.diff(frontier.kl) < 0)


def test_with_a_limit_it_is_nearly_as_good() -> None:
    units = made_up(3, 40, 5)
    exact, limited = find_frontier(units), find_frontier(units, most=200)
    assert len(limited.kl) <= 201 < len(exact.kl)
    for limit in range(int(limited.nbytes[0]), int(exact.nbytes[-1]), 50):
        best, found = exact.within(limit), limited.within(limit)
        assert best is not None and found is not None
        assert limited.kl[found] <= exact.kl[best] * 1.05 + 0.05
