"""A trace keeps a run's beginning and its end, however long the run."""

from __future__ import annotations

import pytest

from penstock.core.events import Recorder


@pytest.mark.parametrize("events", [0, 1, 500, 999, 1000, 1001, 5000])
def test_the_first_half_and_the_last_are_kept_in_order_and_the_rest_is_counted(events: int) -> None:
    recorder = Recorder(max_events=1000)
    for stamp in range(events):
        recorder.add("step", stamp, stamp + 1)
    stamps = list(range(events))
    kept = stamps if events <= 1000 else stamps[:500] + stamps[-500:]
    assert [event.began_ns for event in recorder.events()] == kept
    assert recorder.dropped == events - len(kept)
