"""A timeline becomes spans that add up to it, whatever its shape."""

from __future__ import annotations

import itertools

import made_runs
import pytest

from penstock.core.stats import StageTimes
from penstock.observe.record.time_series import build_time_series
from penstock.observe.record.timeline import TimelinePoint


@pytest.mark.parametrize("run", [made_runs.ordinary(points=1200), made_runs.inline()], ids=["long", "inline"])
def test_spans_are_consecutive_and_their_fractions_add_up_to_one(run) -> None:
    spans = build_time_series(run.timeline).spans
    assert 2 <= len(spans) <= 260
    assert spans[0].from_s == 0
    assert spans[-1].to_s == run.timeline[-1].at_s
    assert all(one.to_s == other.from_s for one, other in itertools.pairwise(spans))
    for span in spans:
        assert span.step + span.waiting + span.outside == pytest.approx(1.0)


def test_no_sample_is_lost_between_spans() -> None:
    run = made_runs.ordinary(points=1199)
    samples = sum(span.samples_per_s * (span.to_s - span.from_s) for span in build_time_series(run.timeline).spans)
    assert samples == pytest.approx(run.timeline[-1].samples)


def test_a_step_longer_than_the_interval_of_points_is_spread_over_its_own_time() -> None:
    points = [
        TimelinePoint(at_s=second, batches=second // 5, stages=StageTimes(step_s=5.0 * (second // 5)))
        for second in range(1, 21)
    ]
    assert {(span.to_s - span.from_s, span.step) for span in build_time_series(points).spans} == {(5, 1.0)}


@pytest.mark.parametrize("points", [(), (TimelinePoint(at_s=1.0, batches=1),)], ids=["none", "one"])
def test_too_few_points_make_no_series(points: tuple[TimelinePoint, ...]) -> None:
    series = build_time_series(points)
    assert (series.spans, series.points) == ((), ())


def test_points_of_the_same_time_are_no_division_by_zero() -> None:
    series = build_time_series(
        [TimelinePoint(at_s=1.0, batches=1), TimelinePoint(at_s=1.0, batches=2), TimelinePoint(at_s=2.0, batches=3)]
    )
    assert [span.to_s for span in series.spans] == [1.0, 2.0]


def test_no_more_workers_are_busy_than_there_are_and_their_work_is_not_lost() -> None:
    handed_out = ((1.0, 0.0), (2.0, 1.5), (3.0, 5.5))  # the third second's batches were made in the second one
    points = [
        TimelinePoint(at_s=at_s, batches=int(at_s), workers=2, stages=StageTimes(fetch_s=work_s))
        for at_s, work_s in handed_out
    ]
    assert [span.reading for span in build_time_series(points).spans] == [1.5, 2.0, 2.0]
