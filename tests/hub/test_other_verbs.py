"""Repositories are verified, calibrated, evaluated and mixed as directories are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from conftest import EXAMPLE, change_json
from openquant import calibrate, compress
from openquant.fit import session
from openquant.weights.statistics import read_calibration
from support import small_checkpoints
from support.evaluation_files import evaluate
from support.hub_site import Site
from support.loopback_hub import COMMIT
from support.starting import finish

TEXTS = ("--samples", "2", "--length", "32")
MODES = {"cached": (), "streamed": ("--stream",)}


def at(root: Path) -> Site:
    """A Hub whose commands run in the directory of the site."""
    site = Site(root, token=None)
    site.cwd = root
    return site


def shards(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.glob("*.safetensors")}


def test_a_repository_is_calibrated_through_a_few_shards_and_gives_the_bytes_of_a_directory(subtests, tmp_path):
    expected = calibrate(EXAMPLE, tmp_path / "expected", samples=2, length=32)
    compress(EXAMPLE, tmp_path / "local", activation_scheme="static", calibration=expected)
    for mode, stream in MODES.items():
        with subtests.test(mode), at(tmp_path / mode) as site:
            site.hub.repositories["org/name"] = EXAMPLE
            site.works("calibrate", "org/name", *TEXTS, *stream, "--scratch", site.root)
            made = site.root / "name.calibration.safetensors"
            assert {path.name for path in site.root.iterdir()} == {"hub", "hf", made.name}
            found, same = read_calibration(made), read_calibration(expected)
            # Of a repository the stamp is its commit's.
            assert found.stamp != same.stamp
            assert replace(found, stamp=same.stamp).to_bytes() == same.to_bytes()
            # What is converted from there is the model that was calibrated.
            static = ("--activation-scheme", "static", "--calibration", made)
            site.works("compress", "-m", "org/name", "-o", "out", *static, *stream)
            assert bool(list((site.root / "hf").rglob("*.safetensors"))) == (not stream)
            assert not list(site.root.glob(".openquant-*"))
            assert shards(site.out) == shards(tmp_path / "local")


def test_weights_of_a_repository_are_rounded_alike(tmp_path):
    compress(EXAMPLE, tmp_path / "local", "int4", gptq=True, samples=2, length=32)
    with at(tmp_path / "site") as site:
        site.hub.repositories["org/name"] = EXAMPLE
        site.works("compress", "-m", "org/name", "-o", "made/out", "--scheme", "int4", "--gptq", *TEXTS, "--stream")
        assert not list((site.root / "hf").rglob("*.safetensors"))
        assert [path.name for path in (site.root / "made").iterdir()] == ["out"]
        assert shards(site.root / "made" / "out") == shards(tmp_path / "local")


# Mixtures are compared on fewer texts.
FEW = "from openquant.fit import session\nsession.COMPARED = (4, 96)\n"


def test_a_mixture_is_chosen_and_published_through_a_few_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "COMPARED", (4, 96))
    compress(EXAMPLE, tmp_path / "local", fit="6bits", candidates="nvfp4,int8-weights")
    here = tmp_path / "here"
    here.mkdir()
    with Site(tmp_path / "site") as site:
        site.cwd = here
        site.hub.repositories["org/name"] = EXAMPLE
        fit = ("--fit", "6bits", "--candidates", "nvfp4,int8-weights")
        words = ("compress", "-m", "org/name", *fit, "--stream", "--push-to-hub", "user/mixed", "--push-only")
        done = finish(site.begin(*words, before=FEW))
        assert done.returncode == 0, done.stderr
        published = site.held("user/mixed")
    assert not list((site.root / "hf").rglob("*.safetensors"))
    # Scores, and what is not a shard of the output.
    assert not list(here.rglob("*.safetensors"))
    assert (here / "name.scores.json").exists()
    expected = shards(tmp_path / "local")
    assert expected and expected.items() <= published.items()


def test_repositories_are_verified_as_directories_are(tmp_path):
    with at(tmp_path / "site") as site:
        source = small_checkpoints.write(site.source, "Qwen3MoeForCausalLM", shards=3)
        compress(source, site.out, "channel")
        # A repository has one too. Files in the Hub's cache are links.
        (site.out / ".gitattributes").write_text("*.safetensors filter=lfs\n")
        evaluate(site.out)
        site.hub.repositories |= {"org/source": source, "org/out": site.out}
        words = ("--source", "org/source", "--full", "--json")
        told = site.works("verify", "org/out", *words)
        here = site.works("verify", "out", "--source", "source", "--full", "--json")
        again = site.works("verify", f"org/out@{COMMIT}")
    found, expected = json.loads(told.stdout), json.loads(here.stdout)
    assert (found["problems"], found["notes"]) == ([], [])
    same = {key: value for key, value in expected.items() if key not in ("directory", "source", "seconds")}
    assert {key: value for key, value in found.items() if key in same} == same
    assert (found["directory"], found["source"]) == ("org/out", "org/source")
    assert "org/out" not in here.stdout
    # All of it lies in the cache now.
    assert again.stderr == ""


def test_verify_says_what_it_downloads_and_finds_what_is_wrong(tmp_path):
    compress(small_checkpoints.write(tmp_path / "source"), tmp_path / "out")
    change_json(tmp_path / "out" / "config.json", lambda c: c["quantization_config"].update(activation_scheme="static"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    with at(tmp_path / "site") as site:
        site.hub.repositories |= {"org/out": tmp_path / "out", "org/empty": tmp_path / "empty"}
        done = site.ask("verify", "org/out")
        assert done.returncode == 1
        assert "static" in done.stdout
        line = done.stderr.splitlines()[0]
        assert line.startswith("downloading ") and line.endswith(f" bytes of org/out@{COMMIT} to the Hub's cache")
        absent = site.ask("verify", "org/absent")
        assert absent.returncode == 2 and absent.stderr.startswith("error: ")
        for name in ("nowhere/at/all", "a b"):
            done = site.ask("verify", name)
            assert done.returncode == 2
            assert done.stderr.startswith(f"error: {name} does not exist, and is no Hub repository id either\n")
        # A repository whose model is in a pull request has none on main.
        assert site.refused("verify", "org/empty") == [
            "error: org/empty holds no model: it has no config.json",
            "hint: check the name; that of an open pull request is org/empty@refs/pr/1",
        ]
