"""A timeline stays small however long the run."""

from __future__ import annotations

import itertools

from penstock.observe.timeline import Moment, Timeline


def test_a_full_timeline_keeps_every_second_moment_and_looks_half_as_often() -> None:
    timeline = Timeline(most=4, period_s=1.0)
    for second in range(100):
        if timeline.is_due(second):
            timeline.add(Moment(at_s=second))
    times = [moment.at_s for moment in timeline.moments()]
    assert times[0] == 0
    assert len(times) <= 4
    assert {later - earlier for earlier, later in itertools.pairwise(times)} == {timeline.period_s}
    assert timeline.period_s == 32
