"""The static Space in a browser: plans, sign-in and jobs, against the Hub and the Jobs API on loopback."""

import json
import re
import tarfile
from pathlib import Path

import pytest

from openquant.files.checkpoint import open_checkpoint
from openquant.fit.table import fit_table
from openquant.formats.schemes import SCHEMES
from openquant.plan.plan import make_plan
from openquant.web.view import fit_html, plan_html
from support.loopback_hub import COMMIT, Fault
from support.loopback_jobs import TOKEN
from support.space_site import browser, module, site, visit

__all__ = ["browser", "site", "visit"]  # fixtures

AXE = ("axe-core-4.14.1", "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==")
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(autouse=True)
def repositories(site, example, tmp_path):
    """A repository to convert, one that nothing is known of, one with hostile names, and a private one."""
    hub, config = site.hub, json.loads((example / "config.json").read_text())
    for name, architecture in (("unknown", "BertForMaskedLM"), ("hostile", HOSTILE)):
        (tmp_path / name).mkdir()
        for path in example.iterdir():
            (tmp_path / name / path.name).symlink_to(path)
        (tmp_path / name / "config.json").unlink()
        (tmp_path / name / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
        hub.repositories[f"org/{name}"] = tmp_path / name
    hub.repositories["org/tiny"] = example
    hub.stored.clear()
    hub.create("user/secret", private=True)
    content = {path.name: path.read_bytes() for path in example.iterdir()}
    hub.commit("user/secret", "main", "x", {name: hub.store(data) for name, data in content.items()}, [])
    yield
    hub.repositories.clear()
    hub.faults.clear()
    site.jobs.jobs.clear()
    site.jobs.denied, hub.storage = False, None


def same(page, selector, html):
    """Whether an element has this HTML, as the browser understands it."""
    script = "([selector, html]) => { const box = document.createElement('div'); box.innerHTML = html; "
    return page.evaluate(
        script + "return box.innerHTML === document.querySelector(selector).innerHTML }", [selector, html]
    )


def accessible(page):
    """Refuse serious findings of axe-core."""
    archive = module("build").npm_archive(AXE, Path.home() / ".cache" / "openquant" / "npm")
    with tarfile.open(archive) as packed:
        page.evaluate(packed.extractfile("package/axe.min.js").read().decode())
    found = page.evaluate("axe.run()")["violations"]
    assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_plans_problems_and_hostile_names(visit, site, example):
    visitor = visit(viewport={"width": 1280, "height": 900})
    page, identity = visitor.page, f"org/tiny@{COMMIT}"
    # Until the planner is there, the page says how much of it is.
    held = []
    page.route("**/pyodide/*.wasm", lambda route: held.append(route))
    page.goto(site.address)
    page.wait_for_selector("#progress:has-text('MB')")
    assert re.fullmatch(r"Loading the planner: [0-4] of 13 MB", page.inner_text("#progress"))
    held[0].continue_()
    visitor.ready()
    assert page.inner_text("#progress") == ""
    page.type("#repo", "org/ti")
    page.wait_for_selector("#repos option", state="attached")
    assert page.eval_on_selector_all("#repos option", "all => all.map(one => one.value)") == ["org/tiny"]
    visitor.plan("org/tiny", scheme="int4")
    plan = make_plan(open_checkpoint(example), SCHEMES["int4"])
    assert same(page, "#plan", plan_html(plan, identity))
    assert same(
        page, "#table", fit_html(fit_table(example, "4090", context="8k"), "int4").replace(str(example), "org/tiny")
    )
    command = f"openquant compress -m org/tiny --revision {COMMIT} --scheme int4 --stream --push-only"
    assert page.inner_text("#command") == f"{command} --push-to-hub=tiny-INT4"
    page.wait_for_selector("#forecast:not(:empty)", state="attached")
    assert "CPU Basic (2 vCPU, 16 GB). About 60 seconds and less than $0.01; it is stopped after" in page.inner_text(
        "#forecast"
    )
    accessible(page)
    # Headers alone were read: less than all of the repository.
    assert any(
        "Range" in name or "range" in name for _, url, sent, _ in visitor.requests for name in sent if "resolve" in url
    )
    # Options are those of the command line.
    page.evaluate("document.querySelector('details').open = true")
    page.fill("#option-ignore", "**.o_proj")
    page.check("#option-quantize_lm_head")
    visitor.plan("org/tiny", scheme="int4")
    assert "'--ignore=**.o_proj'" in page.inner_text("#command")
    assert "--quantize-lm-head" in page.inner_text("#command")
    page.fill("#option-ignore", "")
    # So are the rows of the table.
    page.locator("#table tr", has_text="int3").locator("td").last.click()
    page.wait_for_selector("#table [aria-pressed=true][value=int3]")
    assert "--scheme int3" in page.inner_text("#command")
    # What is wrong is said as on the command line.
    for repo, given, message in (
        ("org/unknown", {}, "BertForMaskedLM"),
        ("org/tiny", {"gpu": "abacus"}, "abacus"),
        ("org/missing", {}, "There is no such repository, or it is private or gated: sign in for those."),
        ("user/secret", {}, "There is no such repository, or it is private or gated: sign in for those."),
        ("not a name", {}, "Give a repository such as Qwen/Qwen3-8B."),
        ("org/hostile", {}, HOSTILE),
        (HOSTILE, {}, "Give a repository"),
    ):
        visitor.plan(repo, **given)
        assert message in page.inner_text("#problem"), repo
        assert page.is_hidden("#result")
    assert page.query_selector("img") is None
    # The page stays alive while the planner works.
    page.fill("#repo", "org/tiny")
    page.fill("#gpu", "4090")
    ticks = (
        "new Promise(done => { let n = 0; const t = setInterval(() => n++, 5); document.getElementById('show').click();"
    )
    ticks += "const look = setInterval(() => { if (!document.getElementById('result').hidden) { clearInterval(t);"
    assert page.evaluate(ticks + "clearInterval(look); done(n) } }, 5) })") > 5
    visitor.planned()
    # Without the Hub the page names what it cannot reach, as soon as something is typed.
    page.route(f"{site.hub.endpoint}/**", lambda route: route.abort())
    page.locator("#repo").press_sequentially("x")
    unreachable = f"{site.hub.endpoint.removeprefix('http://')} cannot be reached. Check the connection and try again."
    page.wait_for_selector(f"#problem:has-text('{unreachable}')")
    visitor.plan("org/hostile")
    assert page.inner_text("#problem") == unreachable


def test_a_job_from_sign_in_to_the_model(visit, site):
    """A private repository of one's own is planned and converted; the token is nowhere but where it must be."""
    visitor = visit(viewport={"width": 400, "height": 800}, color_scheme="dark")
    visitor.open()
    page, jobs = visitor.page, site.jobs
    visitor.sign_in()
    assert page.url == site.address
    (asked,) = jobs.authorized[-1:]
    assert (asked["client_id"], asked["redirect_uri"], asked["response_type"]) == ("client", site.address, "code")
    assert asked["scope"] == "openid profile contribute-repos write-repos jobs"
    visitor.plan("user/secret", scheme="int8-weights")
    assert page.is_visible("#convert"), page.inner_text("#problem")
    page.check("#private")
    page.fill("#target", "secret-small")
    page.wait_for_selector("#forecast:not(:empty)", state="attached")
    page.click("#start")
    page.wait_for_selector("#job:not([hidden])")
    (job,) = jobs.jobs
    job.turn("RUNNING")
    job.add("pushed to it")
    job.turn("COMPLETED")
    page.wait_for_selector("#done a")
    built = json.loads((site.directory / "build.json").read_text())
    commit = site.hub.snapshot("user/secret", "main")[0]
    words = [
        "compress",
        "-m",
        "user/secret",
        "--revision",
        commit,
        "--scheme",
        "int8-weights",
        "--stream",
        "--push-only",
    ]
    assert job.payload == {
        "command": [
            *("uvx", "--from", site.address + built["wheel"], "--with", "numba"),
            *("--overrides", f"{site.address}overrides.txt", "openquant", *words),
            *("--push-to-hub=secret-small", "--private"),
        ],
        "arguments": [],
        "environment": {},
        "secrets": {"HF_TOKEN": TOKEN},
        "flavor": "cpu-basic",
        "timeoutSeconds": 1800,
        "attempts": 2,
        "labels": {"name": "openquant-secret-small", "openquant": "convert", "seconds": "60"},
        "dockerImage": "ghcr.io/astral-sh/uv:python3.12-bookworm",
    }
    assert page.get_attribute("#done a", "href") == f"{site.hub.endpoint}/user/secret-small"
    assert "pushed to" in page.inner_text("#log")
    assert page.inner_text("#stage").startswith("The job is finished.")
    accessible(page)
    # The token is in headers to the Hub, and in the payload.
    for method, url, headers, body in visitor.requests:
        assert TOKEN not in url
        assert TOKEN not in (body or "") or (method, url) == ("POST", f"{site.hub.endpoint}/api/jobs/user")
        at_hub = url.startswith(site.hub.endpoint)
        assert at_hub or TOKEN not in json.dumps(headers)
    kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, history.state, location.href])"
    assert page.evaluate(kept) == json.dumps([{}, {}, "", None, site.address], separators=(",", ":"))
    assert TOKEN not in page.content() + "".join(visitor.said) + "".join(job.lines)
    assert page.evaluate("caches.keys().then((found) => found.length + 0)") == 0


def test_cancel_come_back_and_continue(visit, site):
    site.hub.storage = f"http://localhost:{site.hub.port}"
    first = visit()
    first.open()
    first.plan("org/tiny", scheme="tensor")
    # Signing in keeps what was typed, and makes the plan again.
    first.page.click("#start")
    first.page.wait_for_selector("#sign-in:has-text('Sign out')")
    first.page.wait_for_selector("#convert:not([hidden])")
    first.page.wait_for_selector("#forecast:not(:empty)", state="attached")
    assert first.page.input_value("#scheme") == "tensor"
    first.page.click("#start")
    first.page.wait_for_selector("#job:not([hidden])")
    first.page.close()
    second = visit(viewport={"width": 1280, "height": 900}, color_scheme="dark")
    second.open()
    second.sign_in()
    page = second.page
    page.wait_for_selector("#job:not([hidden])")
    assert page.inner_text("#job-title") == "Job for tiny-FP8"
    assert "waiting for a machine" in page.inner_text("#stage")
    for line in ("20 % converted", HOSTILE, "40 % converted"):
        site.jobs.jobs[0].add(line)
    page.wait_for_selector("#done:not(:empty)", state="attached")
    assert page.inner_text("#done") == "40 % converted, about 6 seconds left."
    assert page.get_attribute("#bar", "value") == "40"
    assert HOSTILE in page.inner_text("#log")
    page.click("#cancel")
    page.wait_for_selector("#again:not([hidden])")
    assert page.inner_text("#stage") == "The job is cancelled. It has run 1 seconds."
    page.click("#again")
    page.wait_for_selector("#stage:has-text('waiting for a machine')")
    site.jobs.jobs[1].turn("COMPLETED")
    page.wait_for_selector("#done a")
    assert [job.stage for job in site.jobs.jobs] == ["CANCELED", "COMPLETED"]
    assert site.jobs.jobs[0].payload == site.jobs.jobs[1].payload
    # A sign-in that ends before the job would is said; so are refusals.
    page.evaluate("Date.now = () => 8.64e15 / 2")
    page.fill("#repo", "org/tiny")
    second.plan("org/tiny")
    # Files come from the Hub's storage, which gets no token.
    assert any(url.startswith(site.hub.storage) for _, url, _, _ in second.requests)
    assert site.hub.leaked == []
    page.wait_for_selector("#expires:not([hidden])")
    assert page.inner_text("#expires").startswith("Your sign-in ends at ")
    site.hub.faults.append(Fault("/api/jobs/user$", "POST", status=402, message=f"no credits {HOSTILE}"))
    page.click("#start")
    page.wait_for_selector("#problem > *")
    assert (
        page.inner_text("#problem")
        == f"Jobs need credits on your account (huggingface.co/settings/billing). no credits {HOSTILE}"
    )


@pytest.mark.parametrize("way", ["declined", "forged"])
def test_a_sign_in_that_was_not_asked_for(visit, site, way):
    visitor = visit()
    # The planner is not needed here, and never starts.
    visitor.page.route("**/pyodide/**", lambda _: None)
    site.jobs.denied = way == "declined"
    if way == "forged":
        visitor.page.goto(f"{site.address}?code=stolen&state=forged")
    else:
        visitor.page.goto(site.address)
        visitor.page.click("#sign-in")
    visitor.page.wait_for_selector("#problem > *")
    said = {"declined": "Hugging Face did not sign you in.", "forged": "This sign-in was not begun here"}[way]
    assert said in visitor.page.inner_text("#problem")
    assert visitor.page.url == site.address
    assert not [url for _, url, _, _ in visitor.requests if "/oauth/token" in url]
    assert visitor.page.inner_text("#sign-in") == "Sign in with Hugging Face"
