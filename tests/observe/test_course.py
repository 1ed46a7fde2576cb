"""A timeline becomes stretches that add up, whatever it looks like."""

from __future__ import annotations

import itertools

import made_runs
import pytest

from penstock.core.stats import StageTimes
from penstock.observe.course import course_of
from penstock.observe.timeline import Moment


@pytest.mark.parametrize("run", [made_runs.ordinary(moments=1200), made_runs.inline()], ids=["long", "inline"])
def test_stretches_follow_one_another_and_their_shares_make_a_whole(run) -> None:
    spans = course_of(run.timeline).spans
    assert 2 <= len(spans) <= 260
    assert spans[0].from_s == 0
    assert spans[-1].to_s == run.timeline[-1].at_s
    assert all(one.to_s == other.from_s for one, other in itertools.pairwise(spans))
    for span in spans:
        assert span.step + span.waiting + span.transport + span.outside == pytest.approx(1.0)


def test_no_sample_is_lost_between_the_stretches() -> None:
    run = made_runs.ordinary(moments=1199)
    samples = sum(span.samples_per_s * (span.to_s - span.from_s) for span in course_of(run.timeline).spans)
    assert samples == pytest.approx(run.timeline[-1].samples)


def test_a_step_longer_than_the_looks_are_apart_is_spread_over_its_own_time() -> None:
    moments = [
        Moment(at_s=second, batches=second // 5, stages=StageTimes(step_s=5.0 * (second // 5)))
        for second in range(1, 21)
    ]
    assert {(span.to_s - span.from_s, span.step) for span in course_of(moments).spans} == {(5, 1.0)}


@pytest.mark.parametrize("moments", [(), (Moment(at_s=1.0, batches=1),)], ids=["none", "one"])
def test_too_few_moments_make_no_course(moments: tuple[Moment, ...]) -> None:
    course = course_of(moments)
    assert (course.spans, course.moments) == ((), ())


def test_moments_of_the_same_time_are_no_division_by_zero() -> None:
    course = course_of([Moment(at_s=1.0, batches=1), Moment(at_s=1.0, batches=2), Moment(at_s=2.0, batches=3)])
    assert [span.to_s for span in course.spans] == [1.0, 2.0]
