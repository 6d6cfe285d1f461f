"""The page in a real browser, against a Hub on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright import sync_api as api

from conftest import EXAMPLE, ROOT
from openquant.files.checkpoint import open_checkpoint
from support.browser import CHROMIUM
from support.loopback_hub import LoopbackHub

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")

TOKEN = "hf_visitorSecretOfTheFirstPage"
HOSTILE = "<img src=x onerror=window.hit=1>${window.hit=1}{{window.hit=1}}"


class Outside:
    """A proxy that only counts: whoever asks for something beyond this machine comes here."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        while True:
            try:
                connection = self.listener.accept()[0]
            except OSError:
                return
            with connection:
                self.asked.append(connection.recv(200))


class Server:
    """`openquant web` in a directory of its own."""

    def __init__(self, directory: Path, hub: LoopbackHub, outside: Outside) -> None:
        self.root, self.hub, self.log = directory / "root", hub, directory / "server.log"
        self.root.mkdir()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
            **{"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(directory / "hf"), "HF_HUB_DISABLE_XET": "1"},
            **{"http_proxy": outside.address, "https_proxy": outside.address, "no_proxy": "127.0.0.1"},
            **{"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]), "PYTHONUNBUFFERED": "1"},
        }
        self.environment["HF_TOKEN"] = TOKEN
        self.start()

    def start(self, port: int = 0) -> None:
        words = ["web", "--json", "--port", str(port), "--root", str(self.root), "--root", str(EXAMPLE)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "openquant", *words],
                cwd=self.root,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        ready = json.loads(self.process.stdout.readline())
        assert ready["roots"] == [str(self.root), str(EXAMPLE)]
        self.address = ready["address"]
        self.port = int(self.address.rpartition(":")[2])

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def commands(self) -> list[int]:
        """The ids of the commands that its runs have begun."""
        listed = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True).stdout
        return [int(line) for line in listed.split()]


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    counted = Outside()
    yield counted
    counted.listener.close()
    # The server and its runs asked nobody but the Hub.
    assert counted.asked == []


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    with LoopbackHub(tmp_path_factory.mktemp("hub"), token=TOKEN) as served:
        served.repositories["org/tiny-qwen3"] = EXAMPLE
        served.create("user/hidden-model", private=True)
        for path in sorted(EXAMPLE.iterdir()):
            served.commit("user/hidden-model", "main", "add", {path.name: served.store(path.read_bytes())}, [])
        yield served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, hub: LoopbackHub, outside: Outside) -> Iterator[Server]:
    served = Server(tmp_path_factory.mktemp("web"), hub, outside)
    yield served
    served.stop()
    # No token in any file or log.
    for path in served.root.parent.rglob("*"):
        assert not path.is_file() or b"SecretOf" not in path.read_bytes(), path
    log = served.log.read_text()
    assert "Traceback" not in log, log


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visitor:
    """A browser of somebody, with one page.

    Attributes:
        requests: addresses that the page asked for.
    """

    def __init__(self, browser: Any, server: Server, **settings: Any) -> None:
        self.server, self.requests = server, []
        self.context = browser.new_context(**settings)
        self.context.set_default_timeout(300_000)
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.open()

    def open(self) -> None:
        self.page = self.context.new_page()
        self.page.goto(self.server.address)
        self.page.wait_for_selector("#matches label")

    def write(self, field: str, text: str) -> None:
        self.page.locator(f"#{field} :is(input, textarea)").first.fill(text)

    def tick(self, label: str) -> None:
        self.page.get_by_label(label, exact=False).first.check()

    def pick(self, model: str) -> str:
        self.page.locator("#matches").get_by_text(model, exact=True).click()
        self.page.wait_for_selector("#plan-sections table")
        self.page.wait_for_selector("#plan:enabled")
        # Another one can be chosen.
        assert self.page.locator("#matches").is_visible()
        return self.text("plan-sections")

    def plan(self, model: str, section: str = "plan-sections", found: str = "table") -> str:
        self.write("model", model)
        self.page.locator("#plan").click()
        self.page.wait_for_selector(f"#{section} {found}")
        return self.text(section)

    def value(self, field: str) -> str:
        return str(self.page.locator(f"#{field} :is(input, textarea)").first.input_value())

    def straight_to(self, name: str) -> None:
        self.page.get_by_label("Straight into a repository", exact=False).check()
        self.write("name", name)

    def runs(self) -> int:
        return int(self.page.locator("#runs label").count())

    def convert(self, until: str) -> None:
        before = self.runs()
        self.page.locator("#convert").click()
        # What is shown until then is of an earlier run.
        self.page.wait_for_function("n => document.querySelectorAll('#runs label').length > n", arg=before)
        self.wait(until)

    def wait(self, text: str, section: str = "status") -> None:
        try:
            self.page.locator(f"#{section}").get_by_text(text).first.wait_for()
        except api.TimeoutError:
            shown = {one: self.text(one) for one in ("status", "problem", "run-section")}
            raise AssertionError(f"{text!r} is not shown, but {shown}") from None

    def text(self, section: str) -> str:
        return str(self.page.locator(f"#{section}").inner_text())


@pytest.fixture
def visitor(chromium: Any, server: Server) -> Iterator[Visitor]:
    found = Visitor(chromium, server)
    yield found
    # Whatever a test leaves, the next one waits for no run.
    if found.page.locator("#stop").is_visible():
        found.page.locator("#stop").click()
        found.wait("The run was stopped.")
    found.context.close()
    for path in server.root.glob("*-INT8*"):
        shutil.rmtree(path)
    assert {
        request.split("?")[0] for request in found.requests if not request.startswith(server.address + "/")
    } == set()
    assert not any("SecretOf" in request for request in found.requests)


@pytest.fixture
def slow(hub: LoopbackHub) -> Iterator[None]:
    """The Hub sends weights so slowly that a run can be watched."""
    hub.rate = 400_000
    yield
    hub.rate = None


def test_from_a_repository_to_a_repository(visitor: Visitor, hub: LoopbackHub, server: Server, slow: None) -> None:
    visitor.plan("org/tiny-qwen3")
    for text in ("Qwen3ForCausalLM", "8.39 MB before, 5.27 MB after", "vLLM and SGLang"):
        assert text in visitor.text("plan-sections")
    visitor.straight_to("user/made")
    visitor.convert("compressing")
    visitor.wait("of 5.27 MB")
    assert "openquant compress -m org/tiny-qwen3 --scheme int8-weights --stream" in visitor.text("status")
    # A page that is closed and opened again finds the run.
    visitor.page.close()
    visitor.open()
    visitor.wait("compressing")
    hub.rate = None
    visitor.wait("The run is done.")
    assert f"Published: {hub.endpoint}/user/made/commit/" in visitor.text("result")
    assert visitor.value("serve-vLLM") == "vllm serve user/made"
    assert "model.safetensors.index.json" in hub.files("user/made")
    assert not list(server.root.rglob("*.safetensors"))
    assert TOKEN not in visitor.page.content()


def test_an_output_that_is_kept_is_measured_and_published(
    chromium: Any, visitor: Visitor, hub: LoopbackHub, server: Server
) -> None:
    assert visitor.value("gpu") == "RTX 4090"
    text = visitor.pick(str(EXAMPLE))
    assert "1 RTX 4090 of" in text and "Closest, 0.005 nats, computed in 16 bits" in text
    # A row of the table is a choice.
    for scheme, size in (("int4", "3.73 MB"), ("int8-weights", "5.27 MB")):
        visitor.page.get_by_role("row", name=scheme).get_by_text(size).click()
        visitor.page.wait_for_selector(f"#plan-sections [aria-pressed=true][value={scheme}]")
        assert visitor.value("scheme").startswith(f"{scheme}: ")
        assert f"8.39 MB before, {size} after" in visitor.text("plan-sections")
    visitor.tick("Measure what is lost")
    visitor.convert("The run is done.")
    output = server.root / "tiny-qwen3-INT8-W8A16"
    assert open_checkpoint(output).config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert json.loads((output / "eval.json").read_text())["verdict"]
    # The page ends with where it is, what `verify` says, and the commands that serve it.
    assert f"The files are in {output}." in visitor.text("result")
    assert "openquant verify: no problems" in visitor.text("result")
    assert visitor.value("serve-SGLang") == f"python -m sglang.launch_server --model-path {output}"
    visitor.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visitor.page.locator("#serve-vLLM button").click()
    assert visitor.page.evaluate("navigator.clipboard.readText()") == f"vllm serve {output}"
    places = [visitor.page.locator(f"#{one}").bounding_box()["y"] for one in ("status", "result", "serve-SGLang")]
    assert places == sorted(places)
    report = visitor.page.frame_locator("#result iframe").locator("body")
    report.get_by_text("mean KL").first.wait_for()
    assert "Texts side by side" in report.inner_text()
    visitor.page.get_by_text("The model card as it will be published").click()
    assert "library_name: vllm" in visitor.text("result")
    visitor.page.get_by_text("Publish on the Hub").click()
    visitor.write("publish-name", "user/kept")
    visitor.page.locator("#publish").click()
    visitor.wait("openquant push")
    visitor.wait("The run is done.")
    assert f"Published: {hub.endpoint}/user/kept/commit/" in visitor.text("result")
    assert (
        "mean KL" in hub.files("user/kept")["README.md"].read_text()
        or "KL to the source" in hub.files("user/kept")["README.md"].read_text()
    )
    # A run that fails says it in the same place, and another run is another action.
    visitor.write("publish-name", "org/tiny-qwen3")
    visitor.page.locator("#publish").click()
    visitor.wait("The run failed.")
    visitor.wait("error:", "problem")
    visitor.page.locator("#runs label").nth(1).click()
    visitor.wait("The run is done.")
    assert visitor.page.locator("[role=alert]").count() == 0
    # Another choice does not replace it: it gets a name.
    visitor.tick("Calibrate with GPTQ")
    refused = visitor.plan(str(EXAMPLE), "problem", "[role=alert]")
    assert "holds the output of another run" in refused
    visitor.write("output", "second")
    visitor.plan(str(EXAMPLE))


def test_a_run_that_was_stopped_continues(visitor: Visitor, server: Server, hub: LoopbackHub, slow: None) -> None:
    visitor.plan("org/tiny-qwen3")
    visitor.straight_to("user/continued")
    visitor.convert("of 5.27 MB")
    assert not visitor.page.locator("#result-section").is_visible()
    visitor.page.locator("#stop").click()
    visitor.wait("The run was stopped.")
    assert server.commands() == []
    # The command that runs ends with its server.
    visitor.convert("of 5.27 MB")
    [command] = server.commands()
    server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(command, 0)
    # The next server knows nothing of it. The same button goes on.
    hub.rate = None
    server.start(server.port)
    visitor.page.close()
    visitor.open()
    assert not visitor.page.locator("#run-section, #result-section, #plan-sections").filter(visible=True).count()
    visitor.plan("org/tiny-qwen3")
    visitor.straight_to("user/continued")
    visitor.convert("The run is done.")
    assert "model.safetensors.index.json" in hub.files("user/continued")
    assert not list(server.root.rglob("*.safetensors"))


def test_a_misfit_says_in_red_what_the_command_line_says(visitor: Visitor, server: Server, tmp_path: Path) -> None:
    model = server.root / "misfit"
    shutil.copytree(EXAMPLE, model)
    (model / "model-00002-of-00003.safetensors").unlink()
    command = [sys.executable, "-m", "openquant", "compress", "-m", str(model), "--json", "--dry-run"]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout)
    try:
        text = visitor.plan("./misfit", "problem", "[role=alert]")
        assert f"error: {said['error']}" in text and f": {said['hint']}" in text
        shown = visitor.page.locator("[role=alert]")
        red, green, blue = shown.evaluate("one => getComputedStyle(one).color.match(/[0-9.]+/g).slice(0, 3)")
        assert float(red) > 5 * max(float(green), float(blue))
        # Before any answer to the next action it is gone, and the button is busy.
        before = visitor.runs()
        asked: list[Any] = []
        visitor.page.route("**/run/predict", lambda route: asked.append(route))
        visitor.page.locator("#convert").click()
        visitor.page.wait_for_selector("#convert:disabled")
        assert shown.count() == 0
        for route in asked:
            route.continue_()
        visitor.page.unroute("**/run/predict")
        # It does not become a run either.
        visitor.wait(said["error"], "problem")
        visitor.page.wait_for_selector("#convert:enabled")
        assert visitor.runs() == before
    finally:
        shutil.rmtree(model)
    assert "is outside of the directories" in visitor.plan(str(tmp_path), "problem", ":text('outside')")
    # There is no other place.
    assert shown.count() == visitor.page.locator("#problem [role=alert]").count() == 1


def test_what_a_model_says_is_text(visitor: Visitor, server: Server) -> None:
    model = server.root / re.sub("/", "_", HOSTILE)
    shutil.copytree(EXAMPLE, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": [HOSTILE]}))
    (model / "README.md").write_text(f"---\nlicense: mit\n---\n\n# {HOSTILE}\n")
    try:
        assert HOSTILE in visitor.plan(model.name, "problem", "[role=alert]")
        (model / "config.json").write_text(json.dumps(config))
        visitor.plan(model.name)
        visitor.convert("The run is done.")
        visitor.page.get_by_text("The model card as it will be published").click()
        assert HOSTILE in visitor.text("result") and HOSTILE in visitor.text("runs")
        assert visitor.page.evaluate("window.hit") is None
        assert visitor.page.locator("img[src=x]").count() == 0
    finally:
        shutil.rmtree(model)


def answer(server: Server, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> int:
    request = urllib.request.Request(server.address + path, body, method=method)
    for name, value in headers.items():
        request.add_header(name.replace("_", "-"), value)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as found:
            return int(found.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


def test_other_pages_and_other_paths_are_refused(visitor: Visitor, server: Server) -> None:
    assert answer(server, "/") == answer(server, "/config") == 200
    for refused in (
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": f"http://127.0.0.1:{server.port + 1}"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        assert answer(server, "/config", **refused) == 403, refused
    join = b'{"data": [], "fn_index": 0, "session_hash": "x"}'
    assert answer(server, "/gradio_api/run/predict", "POST", join, Origin="http://evil.example") == 403
    for method, path in (
        ("POST", "/gradio_api/upload"),
        ("GET", "/gradio_api/file=/etc/passwd"),
        ("GET", "/report/../../etc/passwd"),
        ("POST", "/gradio_api/run/plan"),
    ):
        assert answer(server, path, method) == 403, path


def test_everybody_can_use_it(chromium: Any, server: Server) -> None:
    visitor = Visitor(chromium, server, color_scheme="dark", viewport={"width": 400, "height": 900})
    visitor.pick(str(EXAMPLE))
    # A phone shows all of it without scrolling sideways.
    assert visitor.page.evaluate("document.documentElement.scrollWidth") <= 400
    visitor.page.get_by_text("Advanced options").click()
    visitor.page.get_by_text("--max-memory").wait_for()

    # An error is on the screen wherever the button is.
    visitor.write("model", "nothing")
    visitor.page.locator("#convert").click()
    visitor.page.wait_for_selector("#problem [role=alert]")
    place = visitor.page.locator("#problem [role=alert]").bounding_box()
    assert 0 <= place["y"] <= 900 - place["height"]
    visitor.context.close()
