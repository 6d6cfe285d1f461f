"""What is published: the wheel and the source archive, built from what git tracks, and the wheel used elsewhere.

An editable install has every file of the checkout, so it shows no package that is missing.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import EXAMPLE, ROOT
from openquant.version import CITED, DISTRIBUTION, NEWEST, install_hint, public_release
from support.loopback_hub import LoopbackHub

BUILD = "import sys; from setuptools import build_meta as b; d = sys.argv[1]; b.build_wheel(d); b.build_sdist(d)"
REPOSITORY = "https://example.org/owner/name"
TOKEN = "hf_secretsecret"
# The fixture builds what has no git, and so no tag.
NAME = f"{DISTRIBUTION.replace('-', '_')}-{NEWEST}"


@dataclass(frozen=True)
class Built:
    """What a build made: the checkout it was made from, the wheel and the source archive."""

    checkout: Path
    wheel: Path
    archive: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    root = tmp_path_factory.mktemp("packaging")
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no git checkout: there is no telling what belongs to it")
    done = subprocess.run(["git", "archive", "--format=tar", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        # 3.11.4 and 3.10.12 are the first that have filters.
        tar.extractall(root / "checkout", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    call([sys.executable, "tools/for_the_index.py", REPOSITORY, "v1.2.3"], cwd=root / "checkout")
    made = root / "made"
    made.mkdir()
    call([sys.executable, "-c", BUILD, made], cwd=root / "checkout")
    return Built(root / "checkout", made / f"{NAME}-py3-none-any.whl", made / f"{NAME}.tar.gz")


@pytest.fixture(scope="module")
def scripts(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands of an environment are that holds the wheel, and sees what the tests' own has."""
    root = tmp_path_factory.mktemp("elsewhere")
    venv.create(root / "env", with_pip=False)
    python = root / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index"]
    call([*install, "--disable-pip-version-check", built.wheel], cwd=root)
    # A directory named here has its own .pth files left alone, an editable install's among them.
    others = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    [site] = (root / "env" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text("\n".join(others))
    found = call([python, "-c", "import openquant, compress_fp8; print(openquant.__file__)"], cwd=root)
    assert Path(found.strip()).is_relative_to(site)
    return python.parent


def call(command: list[object], cwd: Path, **environment: str) -> str:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nothing_installs_the_name_that_another_project_has_on_the_index() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no git checkout: there is no telling what belongs to it")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # After the verb of an installer and its options, or with an extra anywhere.
    named = re.compile(rb"""(install|add|uvx)( +-\S+)* +['"]?openquant(?![\w-])|openquant\[\w""")
    files = [ROOT / name for name in listed.split("\0") if name]
    found = [
        f"{path.relative_to(ROOT)}: {line.decode(errors='replace')}"
        for path in files
        if path.is_file()
        for line in path.read_bytes().splitlines()
        if named.search(line)
    ]
    assert found == []
    assert install_hint("report") == "pip install 'openquant-llm[report]'"


def test_the_project_has_one_name() -> None:
    written = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^name = "(.+)"$', written, re.MULTILINE)[1] == DISTRIBUTION
    # Extras that hints name are there.
    for path in (ROOT / "openquant").rglob("*.py"):
        for extra in re.findall(r'install_hint\("(\w+)"\)', path.read_text()):
            assert re.search(rf"^{extra} = \[", written, re.MULTILINE), extra


def test_versions_are_said_alike() -> None:
    written = (ROOT / "pyproject.toml").read_text()
    assert f'\nfallback_version = "{NEWEST}"\n' in written
    # Before the first release the changelog says which it will be.
    changes = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d.*?)\]", changes, re.MULTILINE)
    [expected] = released[:1] or re.findall(r"The first release will be (.+)\.$", changes, re.MULTILINE)
    assert expected == NEWEST
    pythons = re.findall(r"Python :: (3\.\d+)", written)
    assert f'requires-python = ">={pythons[0]}"' in written
    tested = re.search(r"python: \[(.+)\]", (ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert tested and re.findall(r"3\.\d+", tested[1]) == pythons
    assert f"vllm/vllm-openai:v{CITED['vLLM']}" in (ROOT / "Dockerfile.vllm").read_text()


def test_outputs_name_the_release_and_no_commit(subtests: pytest.Subtests) -> None:
    for version, release in [
        ("1.2.3", "1.2.3"),
        ("1.2.3.post1.dev4+g1a2b3c4.d20261126", "1.2.3"),
        ("2.0.0rc1", "2.0.0rc1"),
        ("2.0.0rc1.post1.dev2+gabc", "2.0.0rc1"),
        ("main", NEWEST),
    ]:
        with subtests.test(version=version, release=release):
            assert public_release(version) == release


def test_the_wheel_holds_every_package_and_no_tests(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert f"{NAME}.dist-info/licenses/LICENSE" in wheel.namelist()
    package = [path for path in (built.checkout / "openquant").rglob("*") if path.is_file()]
    expected = {path.relative_to(built.checkout).as_posix() for path in package} | {"compress_fp8.py"}
    assert {"openquant/py.typed", "openquant/report/page.html"} <= expected
    assert found == expected


def test_the_index_shows_links_that_lead_somewhere(built: Built) -> None:
    """The index shows the README, and no file beside it."""
    with zipfile.ZipFile(built.wheel) as wheel:
        written = wheel.read(f"{NAME}.dist-info/METADATA").decode()
    assert f"Project-URL: Source, {REPOSITORY}\n" in written
    assert f"git clone {REPOSITORY} openquant" in written and "URL openquant" not in written
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", written)
    assert len(links) == len(re.findall(r"\]\(", (ROOT / "README.md").read_text()))
    for picture, link in links:
        place = f"{REPOSITORY}/{'raw' if picture else 'blob'}/v1.2.3/"
        assert link.startswith(place) and (ROOT / link.removeprefix(place).partition("#")[0]).is_file(), link


def test_the_source_archive_holds_what_it_is_built_and_read_from(built: Built) -> None:
    with tarfile.open(built.archive) as tar:
        found = {name.removeprefix(f"{NAME}/") for name in tar.getnames()}
    documents = {path.relative_to(built.checkout).as_posix() for path in built.checkout.glob("docs/*.md")}
    assert len(documents) >= 3
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "compress_fp8.py", *documents} <= found
    assert {"openquant/py.typed", "tests/conftest.py", "tools/names_file.py"} <= found


def test_every_command_knows_its_version_and_helps(subtests: pytest.Subtests, scripts: Path, tmp_path: Path) -> None:
    for number, command in enumerate(["openquant", "hf-openquant", "compress-fp8", "-m openquant", "-m compress_fp8"]):
        with subtests.test(command=command):
            here = tmp_path / str(number)
            here.mkdir()
            words = command.split()
            start = [scripts / "python", *words] if words[0] == "-m" else [scripts / words[0]]
            assert call([*start, "--version"], cwd=here).split()[1] == NEWEST
            assert call([*start, "--help"], cwd=here).startswith("usage: ")


def test_every_verb_works_from_the_wheel(scripts: Path, tmp_path: Path) -> None:
    openquant = scripts / "openquant"
    call([openquant, "compress", "-m", EXAMPLE, "-o", "made", "-w", "128", "-q"], cwd=tmp_path)
    report = json.loads(call([openquant, "verify", "made", "--source", EXAMPLE, "--full", "--json"], cwd=tmp_path))
    assert report["problems"] == []
    call([openquant, "dequantize", "made", "-o", "plain", "-q"], cwd=tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    call([openquant, "eval", "made", "--source", EXAMPLE, "--samples", "2", "--length", "16"], cwd=tmp_path)
    assert json.loads((tmp_path / "made" / "eval.json").read_text())["versions"]["openquant"] == NEWEST
    call([openquant, "calibrate", EXAMPLE, "--out", "calibration", "--samples", "2", "--length", "16"], tmp_path)
    for words in (["fit", EXAMPLE, "--gpu", "4090"], ["diagnose", EXAMPLE], ["explain", EXAMPLE, "lm_head"]):
        assert json.loads(call([openquant, *words, "--json"], cwd=tmp_path)), words
    assert json.loads(call([openquant, "env", "--json"], cwd=tmp_path))["openquant"] == NEWEST
    call([openquant, "web", "--help"], cwd=tmp_path)
    assert "openquant" in call([openquant, "completion", "bash"], cwd=tmp_path)
    with LoopbackHub(tmp_path / "hub", token=TOKEN) as hub:
        settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        pushed = call([openquant, "push", "made", "you/made", "--json"], tmp_path, **settings, HF_TOKEN=TOKEN)
    assert json.loads(pushed)["pushed_to"].startswith(f"{hub.endpoint}/you/made/commit/")
