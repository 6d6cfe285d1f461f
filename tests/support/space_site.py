"""A built Space, the Hub and the Jobs API on loopback, and a Chromium that records its requests."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

from .browser import CHROMIUM
from .loopback_hub import LoopbackHub
from .loopback_jobs import TOKEN, LoopbackJobs, SpaceServer

SPACE = Path(__file__).parents[2] / "space"


def module(name: str) -> ModuleType:
    """A module of space/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"space_{name}", SPACE / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


@dataclass
class Site:
    """All servers of a visit."""

    hub: LoopbackHub
    jobs: LoopbackJobs
    address: str
    directory: Path


@dataclass
class Visit:
    """A visitor's window, and what it did.

    Attributes:
        page: playwright's page.
        requests: (method, address, headers, body) of all requests, of workers too.
        said: the console's messages.
    """

    page: object
    site: Site
    requests: list = field(default_factory=list)
    said: list = field(default_factory=list)

    def open(self) -> None:
        self.page.goto(self.site.address)
        self.ready()

    def ready(self) -> None:
        """Wait for the planner."""
        self.page.wait_for_selector("#options label", state="attached")

    def plan(self, repo: str, **given: str) -> None:
        for name, value in {"repo": repo, "gpu": "4090", **given}.items():
            fill = self.page.select_option if name == "scheme" else self.page.fill
            fill(f"#{name}", value)
        self.page.click("#show")
        self.page.wait_for_selector("#result:not([hidden]), #problem > *")
        self.planned()

    def planned(self) -> None:
        """Wait until the page has done all of a plan: at its end it takes the focus, so keys pressed before are lost."""
        self.page.wait_for_selector("#show:enabled")

    def sign_in(self) -> None:
        self.page.click("#sign-in")
        self.page.wait_for_selector("#sign-in:has-text('Sign out')")
        self.ready()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Servers of this module's tests. What a test changes of them, it undoes."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    build = module("build")
    folder = tmp_path_factory.mktemp("space")
    with LoopbackHub(folder / "hub", token=TOKEN) as hub:
        cache = Path.home() / ".cache" / "openquant" / "npm"
        build.build(folder / "out", cache, hub.endpoint)
        with SpaceServer(folder / "out") as server:
            yield Site(hub, LoopbackJobs(hub), server.address, folder / "out")


@pytest.fixture(scope="module")
def browser(site):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"]
        with playwright.chromium.launch(executable_path=CHROMIUM, args=arguments) as launched:
            yield launched


@pytest.fixture
def visit(browser, site) -> Callable[..., Visit]:
    """Opens windows, each with a storage of its own. At the end no request may have gone to another host."""
    visits = []

    def begin(**settings) -> Visit:
        context = browser.new_context(reduced_motion="reduce", **settings)
        # A busy machine is slow, not wrong.
        context.set_default_timeout(120_000)
        page = context.new_page()
        made = Visit(page, site)
        variables = '{"OAUTH_CLIENT_ID": "client", "OAUTH_SCOPES": "openid profile contribute-repos write-repos jobs"}'
        page.add_init_script(f"window.huggingface = {{variables: {variables}}}")
        context.on("request", lambda sent: made.requests.append((sent.method, sent.url, sent.headers, sent.post_data)))
        page.on("console", lambda message: made.said.append(message.text))
        page.on("pageerror", lambda error: made.said.append(str(error)))
        visits.append((made, context))
        return made

    yield begin
    for made, context in visits:
        context.close()
        hosts = {url.split("/")[2] for _, url, _, _ in made.requests if not url.startswith("data:")}
        assert hosts <= {site.address.split("/")[2], site.hub.endpoint.split("/")[2], f"localhost:{site.hub.port}"}
        assert [text for text in made.said if "Failed to load resource" not in text] == []
