"""Recipes: an output says what it was made with, and the same can be asked for again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import EXAMPLE, Run, tree
from openquant import OpenQuantError, compress, dequantize, verify
from openquant.errors import UsageError
from openquant.fields import values_for
from openquant.options import CalibrationTexts, Recipe
from openquant.recipes import read_recipe, recipe_command, recipe_of

FULL: dict[str, Any] = {
    "scheme": "int4",
    "group_size": "32",
    "asymmetric": True,
    "no_search": True,
    "ignore": ["**.layers.0.**", "-- odd | `name`"],
    "scheme_for": {"**.down_proj": "channel"},
    "tp": 1,
    "smooth": 0.25,
    "samples": 7,
    "dataset": "org/texts:train",
}


def recipe_in(out: Path) -> Any:
    return json.loads((out / ".openquant.json").read_text())["recipe"]


MIXED = {"model.layers.{0,1}.mlp.*": "int8", "**.o_proj": "int4"}
GIVEN: list[dict[str, Any]] = [
    {},
    {"scheme": "channel", "scheme_for": MIXED, "group_size": "64"},
    {"scheme": "none", "kv_cache": "fp8"},
]


def test_a_recipe_gives_the_same_bytes(subtests: pytest.Subtests, run: Run, tmp_path: Path) -> None:
    for number, options in enumerate(GIVEN):
        with subtests.test(options=options):
            first = tmp_path / str(number)
            compress(EXAMPLE, first, **options)
            found = recipe_in(first)
            assert found["options"] == {"scheme": "tensor", **options}
            place = first / ".openquant.json" if number else first
            done = run("-m", EXAMPLE, "-o", "again", "--overwrite", "--recipe", place)
            assert done.returncode == 0, done.stderr
            assert tree(tmp_path / "here" / "again") == tree(first)
            assert verify(first).problems == ()
            command = f"openquant compress -m {EXAMPLE.name} {recipe_command(found['options'])}"
            assert f"\n```\n{command}\n```\n" in (first / "README.md").read_text()


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    made = recipe_of(Recipe(**values_for(Recipe, FULL)), CalibrationTexts(**values_for(CalibrationTexts, FULL)))
    assert made["options"] == FULL
    (tmp_path / "alone.json").write_text(json.dumps(made))
    assert read_recipe(tmp_path / "alone.json") == FULL
    # Python's None stands for an option that is not given.
    assert CalibrationTexts(text=None) == CalibrationTexts()
    assert (
        recipe_command({"scheme": "int4", "ignore": ["**.a b"], "gptq": True})
        == "--scheme int4 --ignore '**.a b' --gptq"
    )


def test_a_recipe_holds_nothing_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    texts = CalibrationTexts(text=[tmp_path / "mine.jsonl"])
    local = CalibrationTexts(dataset=f"{tmp_path / 'texts'}:train", samples=3)
    recipe = Recipe("int8", calibration=tmp_path / "c.safetensors", smooth=0.5)
    assert recipe_of(recipe, texts)["options"] == {
        "scheme": "int8", "smooth": 0.5, "text": ["mine.jsonl"], "calibrate": True
    }  # fmt: skip
    assert recipe_of(recipe, local)["options"]["dataset"] == "texts:train"
    compress(EXAMPLE, tmp_path / "out", "tensor")
    dequantize(tmp_path / "out", tmp_path / "plain")
    assert str(tmp_path) not in json.dumps(recipe_in(tmp_path / "out"))
    assert "recipe" not in json.loads((tmp_path / "plain" / ".openquant.json").read_text())


def test_options_beside_a_recipe_override_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(recipe_of(Recipe("channel", ignore=["**.o_proj"]), CalibrationTexts())))
    words = ("-m", EXAMPLE, "--recipe", tmp_path / "r.json", "--dry-run", "--json")
    assert json.loads(run(*words).stdout)["schemes"] == {"channel": 24}
    assert json.loads(run(*words, "--scheme", "int8").stdout)["schemes"] == {"int8": 24}
    assert json.loads(run(*words, "-w", "128").stdout)["schemes"] == {"block": 24}
    assert json.loads(run(*words, "--ignore", "**.k_proj").stdout)["schemes"] == {"channel": 16}


BROKEN: list[tuple[object, str]] = [
    ([], "{} holds no recipe"),
    ({"digest": "x"}, "{} holds no recipe"),
    ({"format": 1, "options": []}, "{} holds no recipe"),
    ({"format": 2, "openquant": "9", "options": {}}, "{} holds no recipe"),
    ({"format": 1, "options": {"push": "org/name"}}, "{} has 'push', which is no option of compress that a recipe has"),
    ({"format": 1, "options": {"calibration": "/etc/passwd"}}, "{} has 'calibration', which is no option of compress"),
    ({"format": 1, "options": {"scheme": ["tensor"]}}, "{}: scheme is of type list, not a text"),
    ({"format": 1, "options": {"ignore": [1]}}, "{}: ignore is of type int, not a text or a path"),
    ({"format": 1, "options": {"scheme_for": {"a": 1}}}, "{}: scheme_for has what is no text"),
    ({"format": 1, "options": {"scheme_for": ["a"]}}, "{}: --scheme-for: a is not PATTERN=SCHEME"),
    ({"format": 1, "options": {"scheme": "int1"}}, "{}: --scheme: int1 is none of tensor, "),
    ({"format": 1, "options": {"tp": "many"}}, "{}: --tp: 'many' is not a number"),
]


def test_what_is_no_recipe_is_refused(subtests: pytest.Subtests, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for held, message in BROKEN:
        with subtests.test(message):
            path.write_text(json.dumps(held))
            with pytest.raises(UsageError) as caught:
                read_recipe(path)
            assert caught.value.message.startswith(message.format(path))


def test_a_recipe_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{")
    for path in (tmp_path / "nowhere", tmp_path / "r.json", tmp_path):
        with pytest.raises(OpenQuantError, match=str(path)):
            read_recipe(path)
