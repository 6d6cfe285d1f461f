"""Builds the static Space: a directory to upload to huggingface.co.

    python space/build.py OUT [--cache DIR]
    hf upload you/openquant OUT . --repo-type space

It holds the page, openquant's wheel, which the page's planner and the visitor's job both run, and Pyodide, which npm
delivers. Nothing is fetched from elsewhere when the page is open. It needs an installed openquant, setuptools and
setuptools-scm.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from openquant.version import __version__

HERE = Path(__file__).parent
ROOT = HERE.parent
HUB = "https://huggingface.co"
# Where the Hub redirects requests for files.
STORAGE = "https://*.hf.co https://*.huggingface.co"
# Packages of npm, with the digests of their archives as `npm view NAME@VERSION dist.integrity` prints them.
PYODIDE = (
    "pyodide-314.0.7",
    "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A==",
)
# Those of its files that a page needs.
PYODIDE_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
FETCHED = (*(f"pyodide/{name}" for name in (*PYODIDE_FILES[2:], "pyodide-lock.json")), "planner.py", "without_numpy.py")
_PAGE = ("README.md", "index.html", "style.css", "app.js", "hub.js", "job.js", "signin.js", "worker.js")
FILES = (*_PAGE, "planner.py", "without_numpy.py", "overrides.txt")


def npm_archive(package: tuple[str, str], cache: Path) -> Path:
    """Fetch a package of npm into a directory, unless it is there, and compare it with its digest.

    Args:
        package: name and version, "pyodide-314.0.7", and the SHA-512 of its archive in base64.
        cache: the directory; it is created.

    Returns:
        The archive.

    Raises:
        SystemExit: npm is missing or fails, or the archive has another digest.
    """
    name, digest = package
    archive = cache / f"{name}.tgz"
    cache.mkdir(parents=True, exist_ok=True)
    if not archive.exists():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            wanted = "@".join(name.rsplit("-", 1))
            try:
                subprocess.run(["npm", "pack", "--silent", wanted], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            except (OSError, subprocess.CalledProcessError) as error:
                raise SystemExit(f"npm pack {wanted} failed: {error}") from None
            (Path(folder) / archive.name).replace(archive)
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != digest:
        raise SystemExit(f"{archive} is not the package that was checked: SHA-512 {found}, not {digest}")
    return archive


def build_wheel(out: Path) -> Path:
    """Build openquant's wheel into a directory, and return its path. Nothing is fetched."""
    with tempfile.TemporaryDirectory() as folder:
        # A copy, since setuptools writes into the tree that it builds.
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT / "openquant", tree / "openquant", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE", "compress_fp8.py"):
            shutil.copy(ROOT / name, tree)
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), "."]
        # The copy has no git.
        settings = {**os.environ, "SETUPTOOLS_SCM_PRETEND_VERSION": __version__}
        subprocess.run(command, cwd=tree, env=settings, check=True)
    (wheel,) = out.glob("*.whl")
    return wheel


def build(out: Path, cache: Path, hub: str = HUB) -> None:
    """Build the Space.

    Args:
        out: the directory, which must be missing or empty.
        cache: directory for Pyodide's archive.
        hub: address of the Hub, which the page may then send requests to.

    Raises:
        SystemExit: `out` has files, or something that the Space needs cannot be had.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SystemExit(f"{out} is not an empty directory")
    archive = npm_archive(PYODIDE, cache)
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copy(HERE / name, out)
    shutil.copy(ROOT / "LICENSE", out)
    page = out / "index.html"
    page.write_text(page.read_text().replace("{hub}", f"{hub} {STORAGE}"))
    (out / "pyodide").mkdir()
    with tarfile.open(archive) as packed:
        lock = json.load(packed.extractfile("package/pyodide-lock.json") or sys.exit("no pyodide-lock.json"))
        for name in PYODIDE_FILES:
            (out / "pyodide" / name).write_bytes((packed.extractfile(f"package/{name}") or sys.exit(name)).read())
    # The list of packages, of which the page loads none.
    (out / "pyodide" / "pyodide-lock.json").write_text(json.dumps({**lock, "packages": {}}))
    wheel = build_wheel(out)
    # What worker.js fetches: the module of Pyodide's loader is part of the page.
    fetched = [wheel, *(out / name for name in FETCHED)]
    nbytes = sum(path.stat().st_size for path in fetched)
    (out / "build.json").write_text(json.dumps({"hub": hub, "wheel": wheel.name, "bytes": nbytes}) + "\n")


def main() -> None:
    """Read the command line and build the Space."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write: missing or empty")
    cache = Path.home() / ".cache" / "openquant" / "npm"
    parser.add_argument("--cache", type=Path, default=cache, help="directory for Pyodide's archive")
    given = parser.parse_args()
    build(given.out, given.cache)


if __name__ == "__main__":
    main()
