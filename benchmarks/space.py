"""What the static Space downloads, how long its first plan takes, and how much memory its browser needs.

    python benchmarks/make_checkpoint.py qwen3-30b-a3b --headers-only DIR
    python benchmarks/space.py DIR

Chromium and playwright must be here, and npm for Pyodide. A server on this machine stands in for the Hub.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import CHROMIUM  # noqa: E402
from support.loopback_hub import LoopbackHub  # noqa: E402
from support.loopback_jobs import SpaceServer  # noqa: E402


class UnhashedHub(LoopbackHub):
    """Tells sizes of files without reading them."""

    def describe(self, path: str, content: Path) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": path, "size": content.stat().st_size, "oid": "0" * 40}
        lfs = {"oid": "0" * 64, "size": entry["size"], "pointerSize": 0}
        return entry | ({"lfs": lfs} if path.endswith(".safetensors") else {})


def renderer_peak() -> int:
    """The largest resident memory of a renderer process of Chromium, in bytes."""
    peaks = [0]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"--type=renderer" in (folder / "cmdline").read_bytes():
                line = next(one for one in (folder / "status").read_text().splitlines() if one.startswith("VmHWM"))
                peaks.append(1024 * int(line.split()[1]))
        except (OSError, StopIteration):
            continue
    return max(peaks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="directory of a checkpoint, whose headers alone are read")
    given = parser.parse_args()
    from playwright.sync_api import sync_playwright

    spec = importlib.util.spec_from_file_location("space_build", ROOT / "space" / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    with tempfile.TemporaryDirectory() as folder, UnhashedHub(Path(folder) / "hub") as hub:
        hub.repositories["org/model"] = given.model.resolve()
        out = Path(folder) / "out"
        build.build(out, Path.home() / ".cache" / "openquant" / "npm", hub.endpoint)
        files = [path for path in out.rglob("*") if path.is_file() and path.name not in ("LICENSE", "README.md")]
        sizes = [(path.stat().st_size, len(gzip.compress(path.read_bytes()))) for path in files]
        print(f"page: {sum(size for size, _ in sizes):,} bytes, {sum(packed for _, packed in sizes):,} compressed")
        with SpaceServer(out) as server, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page()
            for turn in ("first", "second"):
                began = time.monotonic()
                page.goto(server.address)
                page.wait_for_selector("#options label", state="attached", timeout=120_000)
                ready = time.monotonic()
                page.fill("#repo", "org/model")
                page.fill("#gpu", "2x4090")
                page.click("#show")
                page.wait_for_selector("#result:not([hidden])", timeout=120_000)
                end = time.monotonic()
                print(f"{turn} visit: ready in {ready - began:.1f} s, plan and table in {end - ready:.1f} s more")
            print(f"headers: {hub.sent // 2:,} bytes; memory of the page at most {renderer_peak():,} bytes")
            browser.close()


if __name__ == "__main__":
    main()
