"""Building the static Space: what is refused, and what its page may do."""

import base64
import hashlib
import re

import pytest
import yaml

from support.space_site import SPACE, module


@pytest.fixture(scope="module")
def build():
    return module("build")


def test_the_space_says_what_it_is():
    settings = yaml.safe_load((SPACE / "README.md").read_text().split("---")[1])
    assert settings["sdk"] == "static"
    assert settings["hf_oauth"] is True
    assert settings["hf_oauth_scopes"] == ["contribute-repos", "write-repos", "jobs"]
    assert settings["hf_oauth_expiration_minutes"] <= 43200


def test_a_page_runs_no_script_of_others_and_asks_nobody_else():
    page = (SPACE / "index.html").read_text()
    policy = {
        part.split()[0]: part.split()[1:]
        for part in re.search('Content-Security-Policy" content="([^"]+)"', page)[1].split("; ")
    }
    assert policy["default-src"] == policy["script-src-attr"] == ["'none'"]
    assert policy["connect-src"] == ["'self'", "{hub}"]
    scripts = "".join(path.read_text() for path in SPACE.glob("*.js"))
    assert "localStorage" not in scripts and "document.cookie" not in scripts and "eval(" not in scripts
    # Nothing but plans and problems, which view.py escapes, becomes HTML.
    assert len(re.findall("innerHTML", scripts)) == 3


def test_another_archive_is_refused(build, tmp_path):
    (tmp_path / "pyodide-1.0.0.tgz").write_bytes(b"another")
    with pytest.raises(SystemExit, match=r"pyodide-1\.0\.0\.tgz is not the package that was checked"):
        build.npm_archive(("pyodide-1.0.0", "0" * 88), tmp_path)
    digest = base64.b64encode(hashlib.sha512(b"another").digest()).decode()
    assert build.npm_archive(("pyodide-1.0.0", digest), tmp_path) == tmp_path / "pyodide-1.0.0.tgz"


def test_a_directory_with_files_is_left_alone(build, tmp_path):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(SystemExit, match="is not an empty directory"):
        build.build(tmp_path, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
