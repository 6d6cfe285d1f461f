"""The report as people see it, in a browser without a window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from openquant.report.html import render_page
from support.browser import CHROMIUM, Browser
from support.evaluation_files import evaluation, hostile, several, with_tasks

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
LAYERS = "[...document.querySelector('table.sorts tbody').rows].map(row => row.cells[0].textContent)"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "eval.html"
    path.write_text(render_page([evaluation()]))
    return path.as_uri()


def test_it_asks_for_nothing_and_complains_of_nothing(browser: Browser, address: str) -> None:
    browser.see_as(1200, "light")
    browser.open(address)
    assert browser.value("document.querySelectorAll('svg').length") == 4
    assert browser.complaints == []
    assert [asked for asked in browser.requests if asked != "data:,"] == [address]


def test_it_fits_a_phone_and_a_screen_in_both_themes(subtests, browser, address):
    for width, theme in ((400, "dark"), (1200, "light")):
        with subtests.test(theme=theme, width=width):
            browser.see_as(width, theme)
            browser.open(address)
            assert browser.value(OVERFLOW) == 0
            assert browser.value(BACKGROUND) == ("rgb(255, 255, 255)" if theme == "light" else "rgb(22, 24, 27)")
            # What is ink in a chart is the page's.
            ink = browser.value("getComputedStyle(document.querySelector('svg text')).fill")
            assert ink == browser.value("getComputedStyle(document.body).color")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "several.html"
    path.write_text(render_page([with_tasks(one) for one in several()]))
    return path.as_uri()


def test_several_outputs_fit_a_phone_and_a_screen(subtests: pytest.Subtests, browser: Browser, compared: str) -> None:
    for width in [400, 1280]:
        with subtests.test(width=width):
            browser.see_as(width, "light")
            browser.open(compared)
            assert browser.value(OVERFLOW) == 0
            # One picture is seen, and the details of each output are folded.
            pictures = "[...document.querySelectorAll('figure svg')].filter(svg => svg.checkVisibility())"
            assert browser.value(f"{pictures}.length") == 1
            assert browser.value(f"{pictures}[0].getBoundingClientRect().width") > 0.9 * min(width, 800) - 32
            assert browser.value("document.querySelectorAll('details.output:not([open])').length") == 3
            # Nothing has to be moved sideways to be read.
            cut = "[...document.querySelectorAll('.wide')].filter(wide => wide.scrollWidth > wide.clientWidth).length"
            browser.value("document.querySelectorAll('details').forEach(details => { details.open = true; })")
            assert browser.value(cut) == 0
            assert browser.complaints == []
            assert [asked for asked in browser.requests if asked != "data:,"] == [compared]


def test_a_click_sorts_a_table(browser: Browser, address: str) -> None:
    browser.open(address)
    click = "document.querySelectorAll('table.sorts thead button')[{}].click()"
    names = [f"model.layers.{number}" for number in range(4)]
    assert browser.value(LAYERS) == names
    browser.value(click.format(1))
    assert browser.value(LAYERS) == names[::-1]
    assert browser.value("document.querySelector('th[aria-sort]').ariaSort") == "descending"
    browser.value(click.format(1))
    assert browser.value(LAYERS) == names
    browser.value(click.format(0))
    assert browser.value(LAYERS) == names[::-1]
    assert browser.complaints == []


def test_nothing_that_others_wrote_runs_or_is_fetched(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "evil.html").write_text(render_page([hostile()]))
    browser.open((tmp_path / "evil.html").as_uri())
    assert browser.value("typeof window.pwned") == "undefined"
    assert browser.complaints == []
    assert [asked for asked in browser.requests if asked != "data:,"] == [(tmp_path / "evil.html").as_uri()]
    assert browser.value("document.scripts.length") == 1
    assert browser.value("document.querySelectorAll('img, iframe, a, [onclick], [onerror]').length") == 0


def test_the_policy_stops_what_would_have_come_through(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "evil.html").write_text(render_page([evaluation()]))
    text = (tmp_path / "evil.html").read_text()
    planted = '<script>window.pwned = 1</script><img src="http://127.0.0.1:9/x" onerror="window.pwned = 1">'
    (tmp_path / "evil.html").write_text(text.replace("<h1>", f"{planted}<h1>"))
    browser.open((tmp_path / "evil.html").as_uri())
    assert browser.value("typeof window.pwned") == "undefined"
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)
