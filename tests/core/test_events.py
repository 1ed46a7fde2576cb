"""A trace keeps a run's beginning and its end, however long the run."""

from __future__ import annotations

import pytest

from penstock.core.events import Event, Recorder


@pytest.mark.parametrize("events", [0, 1, 500, 999, 1000, 1001, 5000])
def test_the_first_half_and_the_last_are_kept_in_order_and_the_rest_is_counted(events: int) -> None:
    recorder = Recorder(max_records=1000)
    for stamp in range(events):
        recorder.add_step(stamp, stamp + 1, 0, stamp)
    stamps = list(range(events))
    kept = stamps if events <= 1000 else stamps[:500] + stamps[-500:]
    assert [event.began_ns for event in recorder.events()] == kept
    assert recorder.dropped == events - len(kept)


def test_a_turn_of_the_loop_is_the_step_before_it_and_the_next_batch() -> None:
    recorder = Recorder(max_records=2)
    recorder.add_turn(0, 10, 11, 3, 0)
    recorder.add_turn(11, 15, 16, 3, 1)
    assert recorder.events() == (
        Event("next", 10, 11, 3, 0),
        Event("step", 11, 15, 3, 0),
        Event("next", 15, 16, 3, 1),
    )
    assert recorder.dropped == 0
    recorder.add_turn(16, 20, 21, 3, 2)
    assert [event.batch for event in recorder.events()] == [0, 1, 2]
    assert recorder.dropped == 2


def test_a_batch_that_the_loop_made_is_part_of_its_turn_and_of_no_other() -> None:
    recorder = Recorder(max_records=2)
    recorder.made = 11, 3, 1, 32
    recorder.add_turn(0, 10, 16, 0, 0)
    recorder.add_turn(16, 20, 21, 0, 1)
    make = Event("make", 11, 15, 0, 0, fetch_ns=3, collate_ns=1, samples=32)
    assert recorder.events()[:2] == (make, Event("next", 10, 16, 0, 0))
    assert [event.kind for event in recorder.events()[2:]] == ["step", "next"]
    assert recorder.dropped == 0
