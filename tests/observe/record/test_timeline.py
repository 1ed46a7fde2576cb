"""A timeline stays small however long the run."""

from __future__ import annotations

import itertools

from penstock.observe.record.timeline import Timeline, TimelinePoint


def test_a_full_timeline_drops_every_second_point_and_doubles_its_interval() -> None:
    timeline = Timeline(max_points=4, period_s=1.0)
    for second in range(100):
        if timeline.is_due(second):
            timeline.add(TimelinePoint(at_s=second))
    times = [point.at_s for point in timeline.points()]
    assert times[0] == 0
    assert len(times) <= 4
    assert {later - earlier for earlier, later in itertools.pairwise(times)} == {timeline.period_s}
    assert timeline.period_s == 32
