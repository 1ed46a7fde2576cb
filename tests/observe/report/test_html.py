"""The page is one file that asks nobody for anything, and shows every word as it was written."""

from __future__ import annotations

import dataclasses
import html.parser
import re
from pathlib import Path

import made_runs
import pytest

from penstock.core.errors import OptionError
from penstock.observe.record.baseline import Baseline
from penstock.observe.record.time_series import build_time_series
from penstock.observe.report.figures import figures
from penstock.observe.report.write_html import render_html, write_html

RUNS = {
    "ordinary": made_runs.ordinary,
    "inline": made_runs.inline,
    "no loader": made_runs.empty,
    "failed": made_runs.failed,
    "hostile": made_runs.hostile,
}


class _Parsed(html.parser.HTMLParser):
    """What tags there are and what their attributes ask for; void elements are not waited for."""

    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_every_element_is_closed_and_none_comes_from_elsewhere(run) -> None:
    parsed = _Parsed(render_html(run()))
    assert not parsed.open
    assert not {tag for tag, _ in parsed.tags} & {"img", "iframe", "object", "form", "a", "b"}
    for _, attributes in parsed.tags:
        assert not {name for name in attributes if name.startswith("on")}
        assert all(not (attributes.get(name) or "").startswith("http") for name in ("src", "href"))


def test_hostile_names_are_shown_and_not_run() -> None:
    page = render_html(made_runs.hostile())
    assert "<script>window.pwned" not in page
    assert "&lt;script&gt;window.pwned=1&lt;/script&gt;" in page


def test_every_figure_has_a_description_for_readers_who_do_not_see_it() -> None:
    parsed = _Parsed(render_html(made_runs.ordinary()))
    images = [attributes for _, attributes in parsed.tags if attributes.get("role") == "img"]
    assert len(images) == 10
    assert all(len(attributes["aria-label"] or "") > 30 for attributes in images)


def test_figures_are_there_only_where_there_is_data_for_them() -> None:
    def names(run) -> list[str]:
        return re.findall(r'id="plot-(\w+)"', render_html(run))

    assert names(made_runs.ordinary()) == ["time", "rate", "workers", "queue", "memory", "gpu", "device"]
    assert names(made_runs.inline()) == ["time", "rate", "workers", "queue", "memory"]
    assert names(made_runs.empty()) == names(made_runs.failed()) == []


def test_a_page_of_hours_can_be_mailed() -> None:
    assert len(render_html(made_runs.ordinary(points=1200, wall_s=40_000.0))) < 120_000


def test_the_areas_of_a_stack_end_where_the_next_one_begins() -> None:
    run = made_runs.ordinary()
    (time, *_) = figures(run, build_time_series(run.timeline))
    outside = time.traces[-1]
    assert outside.is_stacked
    assert re.findall(r"[,V]([^HVZ]+)", outside.path) == ["100", "0"]  # all that is added up, in every span


def test_hundreds_of_loaders_are_folded_away() -> None:
    assert "288 more loaders" in render_html(made_runs.hostile())


def test_the_page_says_what_the_baseline_showed() -> None:
    run = dataclasses.replace(made_runs.ordinary(), baseline=Baseline(warmup_batches=10, problem="it was too short"))
    assert "Compared with torch&#x27;s own loader: no comparison: it was too short." in render_html(run)


def test_a_page_that_cannot_be_written_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be written: No such file or directory; pass another --html FILE"):
        write_html(made_runs.empty(), tmp_path / "no" / "report.html")
