"""The page in a real browser: drawn, quiet, self-contained, at home on a phone and in the dark."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_runs
import pytest

from penstock.observe.page import write_html
from penstock.observe.page.palette import DARK, LIGHT
from penstock.observe.record.compare_runs import compare_runs

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="no chromium with chromedriver here (`make browser` installs them on Debian)"
    ),
]

FIGURES = ["time", "rate", "workers", "queue", "memory", "device"]
DESK, PHONE = 1200, 360


@contextlib.contextmanager
def shown(file: Path, *, width: int = DESK, dark: bool = False, scripts: bool = True) -> Iterator[Any]:
    """Open `file` in a new browser: each has a dozen processes, and a test must leave none behind."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.support.wait import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not scripts})
        browser.get(file.as_uri())
        if scripts:  # on a busy machine the driver may come back while the page before this one is still there
            there = "return location.href === arguments[0] && document.readyState === 'complete'"
            WebDriverWait(browser, 60).until(lambda _: browser.execute_script(there, file.as_uri()))
        yield browser
    finally:
        browser.quit()


@pytest.fixture
def page(tmp_path: Path) -> Path:
    other = made_runs.inline()
    run = made_runs.ordinary()
    write_html(run, tmp_path / "report.html", compare_runs(run, other, "yesterday's run.json"))
    return tmp_path / "report.html"


def test_the_figures_are_drawn_and_the_console_is_silent(page: Path) -> None:
    with shown(page) as browser:
        drawn = browser.execute_script("return document.documentElement.dataset.drawn")
        assert drawn == str(len(FIGURES)), browser.get_log("browser")
        for name in FIGURES:
            # What is painted, not what is in the document: areas and lines of some size.
            sizes = browser.execute_script(
                "return [...document.querySelectorAll(`#plot-${arguments[0]} .trace path`)]"
                ".map((path) => path.getBBox()).map((box) => box.width * Math.max(box.height, 1))",
                name,
            )
            assert max(sizes) > 500, name
        assert browser.get_log("browser") == []


def test_nothing_is_asked_of_the_network(page: Path) -> None:
    with shown(page) as browser:
        events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        asked = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
        assert page.as_uri() in asked
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("make", [made_runs.ordinary, made_runs.hostile, made_runs.failed, made_runs.empty])
def test_a_phone_shows_all_of_it_without_scrolling_sideways(tmp_path: Path, make) -> None:
    run = make()
    name = made_runs.HOSTILE + "W" * 300
    write_html(run, tmp_path / "report.html", compare_runs(run, made_runs.inline(), name))
    with shown(tmp_path / "report.html", width=PHONE) as browser:
        browser.execute_script("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        assert browser.execute_script("return document.documentElement.scrollWidth") == PHONE
        assert browser.execute_script("return window.pwned") is None
        assert browser.get_log("browser") == []


@pytest.mark.parametrize(("dark", "colours"), [(False, LIGHT), (True, DARK)], ids=["light", "dark"])
def test_page_and_figures_follow_the_readers_colours(page: Path, dark: bool, colours: dict[str, str]) -> None:
    with shown(page, dark=dark) as browser:
        ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert ground == _rgb(colours["ground"])
        fills = browser.execute_script(
            "return [...document.querySelectorAll('#plot-time .js-fill')].map((path) => getComputedStyle(path).fill)"
        )
        assert {_rgb(colours[role]) for role in ("step", "waiting", "transport", "outside")} == set(fills)


def test_figures_change_their_colours_when_the_reader_changes_the_scheme(page: Path) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    with shown(page) as browser:
        scheme = [{"name": "prefers-color-scheme", "value": "dark"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        fill = "return getComputedStyle(document.querySelector('#plot-time .js-fill')).fill"
        dark = {_rgb(colour) for colour in DARK.values()}
        WebDriverWait(browser, 30).until(lambda _: browser.execute_script(fill) in dark)


def test_the_page_does_not_move_when_it_is_drawn(page: Path) -> None:
    heights = []
    for scripts in (False, True):
        with shown(page, scripts=scripts) as browser:
            heights.append(browser.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]["height"])
    assert heights[0] == heights[1] > 3000


def test_zooming_into_one_figure_zooms_into_all(page: Path) -> None:
    with shown(page) as browser:
        ranges = browser.execute_async_script(
            "const done = arguments[0]; const nodes = [...document.querySelectorAll('.plot')];"
            "let waiting = nodes.length - 1;"
            "nodes.slice(1).forEach((node) => node.on('plotly_relayout', () => { if (--waiting === 0) "
            "done(nodes.map((one) => one.layout.xaxis.range)); }));"
            "Plotly.relayout(nodes[0], {'xaxis.range[0]': 10, 'xaxis.range[1]': 20})"
        )
        assert ranges == [[10, 20]] * len(FIGURES)


def _rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[k : k + 2], 16)) for k in (1, 3, 5))})"
