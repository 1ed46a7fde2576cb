"""Each number of a run has one definition: the terminal's report, the page, run.json and the findings agree."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from itertools import pairwise

import made_runs
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.stats import LoaderStatistics, StageTimes
from penstock.observe.doctor.causes import findings_of_run
from penstock.observe.record import run_record
from penstock.observe.record.formatting import percent_text, percent_texts, ratio_text
from penstock.observe.record.run_record import LoaderRecord, RunRecord
from penstock.observe.record.time_parts import Part, bars
from penstock.observe.report import text_report
from penstock.observe.report.write_html import render_html

SECONDS = st.floats(0, 100).map(lambda seconds: round(seconds, 3))
STAGES = st.builds(
    StageTimes,
    fetch_s=SECONDS,
    collate_s=SECONDS,
    transport_s=SECONDS,
    workers_s=SECONDS,
    wait_s=SECONDS,
    step_s=SECONDS,
)
COUNTED = st.builds(
    LoaderStatistics,
    batches=st.just(10),
    samples=st.just(640),
    epochs=st.integers(1, 3),
    first_batch_s=SECONDS,
    stages=STAGES,
    worker_type=st.sampled_from(["inline", "process", "thread"]),
    workers=st.integers(1, 4),
)
LOADERS = st.builds(
    LoaderRecord,
    name=st.just("Images"),
    made_at=st.sampled_from(["train.py:12", "train.py:40"]),
    settings=st.just({"num_workers": 2}),
    statistics=COUNTED,
    iterator=st.sampled_from(["replaced", "own"]),
)
RUNS = st.lists(LOADERS, min_size=1, max_size=3).map(
    lambda loaders: RunRecord(
        command=("train.py",),
        started="2026-01-01T00:00:00+00:00",
        wall_s=10 + sum(one.statistics.loop_s for one in loaders),
        cpus=4,
        loaders=tuple(replace(one, name=f"Images #{number}") for number, one in enumerate(loaders, 1)),
    )
)


def _words(page: str) -> str:
    """Return what the page shows, without its style and script, and with ordinary spaces."""
    body = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", " ", body)).replace("\N{NO-BREAK SPACE}", " ")


def _value(text: str) -> float:
    """Return the number of a share, as in "under 0.1 %"; what is too small to be shown is 0."""
    number = float(re.search(r"[\d.]+", text)[0])
    return 0.0 if "under" in text else 100.0 if "over" in text else number


SHARE = r"((?:under |over )?[\d.]+ %)"


@settings(max_examples=examples(120), deadline=None)
@given(run=RUNS)
def test_how_much_was_waited_is_the_same_in_every_output(run: RunRecord) -> None:
    run = replace(run, findings=findings_of_run(run))
    data, terminal, page = run_record.as_json(run), text_report.render(run), _words(render_html(run))
    waited = percent_text(data["totals"]["stall_fraction"])
    for text in (page, terminal):
        shown = re.findall(rf"waiting for data\s+{SHARE}|waiting for data +[\d.]+ s +{SHARE}", text)
        assert waited in {one or other for one, other in shown} or not data["totals"]["loading_s"]
    if data["totals"]["loop_s"]:
        assert f"your step waited for data {waited} of the time" in page.replace("Y", "y")
        assert re.search(rf"waited for data\s+{waited}\s+of the time in loops", page)
        assert f"waited for data {waited} of the time in loops" in terminal
    for loader in data["loaders"]:
        assert "stall_fraction" not in loader["statistics"]  # one definition, one place


@settings(max_examples=examples(120), deadline=None)
@given(run=RUNS)
def test_what_a_finding_says_of_its_loader_is_what_the_report_says_of_it(run: RunRecord) -> None:
    found = [finding for finding in findings_of_run(run) if finding.loader]
    page, terminal = _words(render_html(run)), text_report.render(run)
    for finding in found:
        assert "train.py:" in finding.loader
        share = re.search(rf"waited for data {SHARE} of", finding.evidence)
        assert share is not None
        assert f"{finding.loader}: " in terminal
        line = next(line for line in terminal.splitlines() if line.startswith(f"  {finding.loader}: "))
        assert f"waited for data {share[1]} of the time" in line
        assert finding.loader in page


@settings(max_examples=examples(120), deadline=None)
@given(run=RUNS)
def test_parts_that_are_shown_together_add_up_and_both_reports_show_them(run: RunRecord) -> None:
    terminal, page = text_report.render(run), _words(render_html(run))
    for bar in bars(run):
        assert _sum(bar.parts) == pytest.approx(100) or _has_tiny(bar.parts)
        for part in bar.parts:
            assert not part.parts or _sum(part.parts) == pytest.approx(_value(part.share)) or _has_tiny(part.parts)
            for shown in (part, *part.parts):
                assert re.search(rf"{re.escape(shown.label)}\s+{shown.share}\s+{shown.text}", page)
                if len(run.loaders) == 1:
                    assert re.search(rf"{re.escape(shown.label)} +{shown.amount:.2f} s +{shown.share}", terminal)


def _sum(parts: tuple[Part, ...]) -> float:
    return sum(_value(part.share) for part in parts)


def _has_tiny(parts: tuple[Part, ...]) -> bool:
    """Return whether a part is shown as "under 0.1 %", which cannot be added up."""
    return any("under" in part.share or "over" in part.share for part in parts)


@settings(deadline=None)
@given(fractions=st.lists(st.integers(0, 1000), min_size=1, max_size=6).filter(any))
def test_rounded_shares_add_up(fractions: list[int]) -> None:
    texts = percent_texts([fraction / sum(fractions) for fraction in fractions])
    if not any("under" in text or "over" in text for text in texts):
        assert sum(map(_value, texts)) == pytest.approx(100)
    for fraction, text in zip(fractions, texts, strict=True):
        assert _value(text) == pytest.approx(100 * fraction / sum(fractions), abs=1)


@pytest.mark.parametrize("step_s", [85.0, 65.0])
def test_what_takes_the_smaller_part_of_the_time_is_not_called_the_bottleneck(step_s: float) -> None:
    stages = StageTimes(fetch_s=80.0, wait_s=100 - step_s, step_s=step_s)
    run = replace(made_runs.empty(), wall_s=100.0, loaders=(made_runs.loader("Images", 10, stages),), cpus=8)
    run = replace(run, findings=findings_of_run(run))
    assert "bottleneck" not in text_report.render(run) + _words(render_html(run))


def test_the_gain_of_a_finding_is_no_larger_than_the_most_that_the_headline_promises() -> None:
    stages = StageTimes(fetch_s=80.0, wait_s=30.0, step_s=70.0)
    run = replace(made_runs.empty(), wall_s=100.0, loaders=(made_runs.loader("Images", 10, stages),), cpus=8)
    (finding,) = findings_of_run(run)
    assert f"the loop would run at {ratio_text(finding.gain)} its speed" in _words(render_html(run))


def test_no_more_workers_are_drawn_busy_than_there_are() -> None:
    run = made_runs.ordinary()
    busy = [replace(point, stages=replace(point.stages, fetch_s=point.at_s * 4.4)) for point in run.timeline]
    page = render_html(replace(run, timeline=tuple(busy)))
    path = re.search(r'data-label="collating" d="M([^"]*)"', page)
    assert path is not None
    assert max(float(value) for value in re.findall(r"[,V]([^HVZ]+)", path[1])) <= 4
    most = re.search(r"At most ([\d.]+) workers of (\d+) were busy", _words(page))
    assert most is not None
    assert float(most[1]) <= int(most[2])


def test_the_areas_of_the_time_figure_add_up_in_every_interval() -> None:
    page = render_html(made_runs.ordinary())
    tops = [
        [
            float(value)
            for value in re.findall(r"[,V]([^HVZ]+)", re.search(rf'data-label="{label}" d="M([^"]*)"', page)[1])
        ]
        for label in ("step", "waiting for data", "outside of loops")
    ]
    assert tops[-1] == [100.0, 0.0]
    assert all(max(below) <= max(above) for below, above in pairwise(tops))
