"""A repository is calibrated through a few shards of disk, and gives what a directory does."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import EXAMPLE, ROOT, run_openquant
from openquant import calibrate, compress
from openquant.weights.statistics import read_calibration
from support.loopback_hub import LoopbackHub
from support.outlier_channels import twin

WORDS = ("--samples", "2", "--length", "32")


def test_a_repository_gives_the_bytes_of_a_directory(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for number, stream in enumerate([(), ("--stream",)]):
        with subtests.test(stream=stream):
            here = tmp_path / str(number)
            here.mkdir()
            expected = calibrate(EXAMPLE, here / "expected", samples=2, length=32)
            here = here / "here"
            here.mkdir()
            with LoopbackHub(here / "hub") as hub:
                hub.repositories["org/name"] = EXAMPLE
                settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(here / "hf"), "HF_HUB_DISABLE_XET": "1"}
                environment = {**os.environ, **settings, "PYTHONPATH": str(ROOT)}

                def run(*words: object) -> None:
                    command = [sys.executable, "-m", "openquant", *map(str, words)]
                    done = subprocess.run(
                        command, cwd=here, capture_output=True, text=True, timeout=120, env=environment
                    )
                    assert done.returncode == 0, done.stderr

                run("calibrate", "org/name", *WORDS, *stream, "--scratch", here)
                assert [path.name for path in here.iterdir()] == ["name.calibration.safetensors"]
                found, same = (read_calibration(path) for path in (here / "name.calibration.safetensors", expected))
                # Of a repository the stamp is its commit's.
                assert found.stamp != same.stamp
                assert replace(found, stamp=same.stamp).to_bytes() == same.to_bytes()
                # What is converted from there is the model that was calibrated.
                static = ("--activation-scheme", "static", "--calibration", "name.calibration.safetensors")
                run("compress", "-m", "org/name", "-o", "out", *static, *stream)
            assert bool(list((here / "hf").rglob("*.safetensors"))) == (not stream)
            assert not list(here.glob(".openquant-*"))
            compress(EXAMPLE, here / "local", activation_scheme="static", calibration=expected)
            for path in (here / "local").glob("*.safetensors"):
                assert path.read_bytes() == (here / "out" / path.name).read_bytes()


def test_weights_of_a_repository_are_folded_alike(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for number, stream in enumerate([(), ("--stream",)]):
        with subtests.test(stream=stream):
            here = tmp_path / str(number)
            here.mkdir()
            source = twin(EXAMPLE, here / "twin")
            found = calibrate(source, here / "of", samples=2, length=32)
            compress(source, here / "local", "int8", smooth=0.5, calibration=found)
            with LoopbackHub(here / "hub") as hub:
                hub.repositories["org/name"] = source
                settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(here / "hf"), "HF_HUB_DISABLE_XET": "1"}
                environment = {**os.environ, **settings, "PYTHONPATH": str(ROOT)}
                words = ("compress", "-m", "org/name", "-o", "made/out", "--scheme", "int8", "--smooth", "0.5")
                command = [sys.executable, "-m", "openquant", *words, "--calibration", str(found), *stream]
                done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120, env=environment)
                assert done.returncode == 0, done.stderr
            assert "SmoothQuant 0.5: inputs are divided by powers of two in 16 of 16 smoothing mappings" in done.stdout
            assert bool(list((here / "hf").rglob("*.safetensors"))) == (not stream)
            assert [path.name for path in (here / "made").iterdir()] == ["out"]
            for path in (here / "local").glob("*.safetensors"):
                assert path.read_bytes() == (here / "made" / "out" / path.name).read_bytes()


def test_layers_of_a_streamed_repository_are_rounded_by_gptq_alike(tmp_path: Path) -> None:
    compress(EXAMPLE, tmp_path / "local", "int4", gptq=True, samples=2, length=32)
    with LoopbackHub(tmp_path / "hub") as hub:
        hub.repositories["org/name"] = EXAMPLE
        settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        environment = {**os.environ, **settings, "PYTHONPATH": str(ROOT)}
        words = ("compress", "-m", "org/name", "-o", "made/out", "--scheme", "int4", "--gptq", *WORDS, "--stream")
        command = [sys.executable, "-m", "openquant", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "hf").rglob("*.safetensors"))
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["out"]
    for path in (tmp_path / "local").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "made" / "out" / path.name).read_bytes()


def test_a_mixture_is_chosen_and_published_through_a_few_shards(tmp_path: Path) -> None:
    """From one repository to another, with what a directory gives."""
    fit = ("--fit", "6bits", "--candidates", "nvfp4,int8-weights")
    local = run_openquant("compress", "-m", EXAMPLE, "-o", tmp_path / "local", *fit)
    assert local.returncode == 0, local.stderr
    here = tmp_path / "here"
    here.mkdir()
    with LoopbackHub(tmp_path / "hub") as hub:
        hub.repositories["org/name"] = EXAMPLE
        settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        environment = {**os.environ, **settings, "HF_TOKEN": "hf_test", "PYTHONPATH": str(ROOT)}
        words = ("compress", "-m", "org/name", *fit, "--stream", "--push-to-hub", "user/mixed", "--push-only")
        command = [sys.executable, "-m", "openquant", *words]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 0, done.stderr
        published = {name: path.read_bytes() for name, path in hub.files("user/mixed").items()}
    assert not list((tmp_path / "hf").rglob("*.safetensors"))
    # Scores, and what is not a shard of the output.
    assert not list(here.rglob("*.safetensors"))
    assert (here / "name.scores.json").exists()
    shards = list((tmp_path / "local").glob("*.safetensors"))
    assert shards and all(published[path.name] == path.read_bytes() for path in shards)
