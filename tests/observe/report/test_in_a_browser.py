"""The page in a real browser: drawn, quiet, self-contained, at home on a phone and in the dark."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import made_runs
import pytest
from machines import HOLDERS

from penstock.observe.record.time_series import build_time_series
from penstock.observe.report.palette import DARK, LIGHT
from penstock.observe.report.write_html import write_html

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="no chromium with chromedriver here (`make browser` installs them on Debian)"
    ),
]

FIGURES = ["time", "rate", "workers", "queue", "memory", "gpu", "device"]
DESK, PHONE = 1200, 360
SERIES = build_time_series(made_runs.ordinary().timeline)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One for all tests: it is a dozen processes, and takes seconds to start."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    HOLDERS.add(driver.service.process.pid)
    yield driver
    driver.quit()
    HOLDERS.discard(driver.service.process.pid)


Show = Callable[..., contextlib.AbstractContextManager[Any]]


@pytest.fixture
def shown(browser: Any) -> Show:
    """Return what opens a file in a new tab of the browser, of a width in pixels, light or dark."""
    from selenium.webdriver.support.wait import WebDriverWait

    @contextlib.contextmanager
    def show(file: Path, *, width: int = DESK, dark: bool = False, scripts: bool = True) -> Iterator[Any]:
        first = browser.current_window_handle
        browser.switch_to.new_window("tab")
        for log in ("browser", "performance"):
            browser.get_log(log)
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
        browser.close()
        browser.switch_to.window(first)

    return show


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "report.html"
    write_html(made_runs.ordinary(), file)
    return file


def test_the_figures_are_drawn_and_the_console_is_silent(shown: Show, page: Path) -> None:
    with shown(page) as browser:
        drawn = browser.execute_script("return document.documentElement.dataset.drawn")
        assert drawn == str(len(FIGURES)), browser.get_log("browser")
        for name in FIGURES:
            # What is painted, not what is in the document: areas and lines of some size.
            sizes = browser.execute_script(
                "return [...document.querySelectorAll(`#plot-${arguments[0]} .trace`)]"
                ".map((path) => path.getBoundingClientRect()).map((box) => box.width * Math.max(box.height, 1))",
                name,
            )
            assert max(sizes) > 500, name
        assert browser.get_log("browser") == []


def test_nothing_is_asked_of_the_network(shown: Show, page: Path) -> None:
    with shown(page) as browser:
        events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        asked = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
        assert page.as_uri() in asked
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("make", [made_runs.ordinary, made_runs.hostile, made_runs.failed, made_runs.empty])
def test_a_phone_shows_all_of_it_without_scrolling_sideways(shown: Show, tmp_path: Path, make) -> None:
    write_html(make(), tmp_path / "report.html")
    with shown(tmp_path / "report.html", width=PHONE) as browser:
        browser.execute_script("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        assert browser.execute_script("return document.documentElement.scrollWidth") == PHONE
        assert browser.execute_script("return window.pwned") is None
        assert browser.get_log("browser") == []


@pytest.mark.parametrize(("dark", "colours"), [(False, LIGHT), (True, DARK)], ids=["light", "dark"])
def test_page_and_figures_follow_the_readers_colours(
    shown: Show, page: Path, dark: bool, colours: dict[str, str]
) -> None:
    with shown(page, dark=dark) as browser:
        ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert ground == _rgb(colours["ground"])
        fills = browser.execute_script(
            "return [...document.querySelectorAll('#plot-time .stacked')].map((path) => getComputedStyle(path).fill)"
        )
        assert {_rgb(colours[role]) for role in ("step", "waiting", "outside")} == set(fills)


def test_figures_change_their_colours_when_the_reader_changes_the_scheme(shown: Show, page: Path) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    with shown(page) as browser:
        scheme = [{"name": "prefers-color-scheme", "value": "dark"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        fill = "return getComputedStyle(document.querySelector('#plot-time .stacked')).fill"
        dark = {_rgb(colour) for colour in DARK.values()}
        WebDriverWait(browser, 30).until(lambda _: browser.execute_script(fill) in dark)


def test_the_page_does_not_move_when_it_is_drawn(shown: Show, page: Path) -> None:
    heights = []
    for scripts in (False, True):
        with shown(page, scripts=scripts) as browser:
            heights.append(browser.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]["height"])
    assert heights[0] == heights[1] > 2000


def test_zooming_into_one_figure_zooms_into_all_and_the_values_are_those_of_the_run(shown: Show, page: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    with shown(page) as browser:
        area = browser.find_element("css selector", "#plot-rate .area")
        width = area.size["width"]
        drag = ActionChains(browser).move_to_element_with_offset(area, -round(width / 4), 0).click_and_hold()
        drag.move_by_offset(round(width / 2), 0).release().perform()
        read = "return [...document.querySelectorAll('.plot svg')].map((one) => one.getAttribute('viewBox').split(' '))"
        boxes = browser.execute_script(read)
        assert len(boxes) == len(FIGURES)
        assert {round(float(box[0])) for box in boxes} == {30}
        assert {round(float(box[2])) for box in boxes} == {60}
        tip = browser.find_element("css selector", "#plot-time .tip")
        ActionChains(browser).move_to_element(browser.find_element("css selector", "#plot-time .area")).perform()
        at, *rows = tip.text.splitlines()
        shares = dict(re.fullmatch(r"(.*) (\S+) %", row).groups() for row in rows)
        (span,) = (one for one in SERIES.spans if one.from_s <= float(at.split()[0]) < one.to_s)
        assert float(shares["waiting for data"]) == pytest.approx(100 * span.waiting, abs=0.1)
        assert sum(map(float, shares.values())) == pytest.approx(100, abs=0.2)
        ActionChains(browser).double_click(area).perform()
        assert {tuple(box[::2]) for box in browser.execute_script(read)} == {("0", "120")}


def _rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[k : k + 2], 16)) for k in (1, 3, 5))})"
