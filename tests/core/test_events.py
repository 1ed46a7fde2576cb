"""A trace keeps a run's beginning and its end, however long the run."""

from __future__ import annotations

import pytest

from penstock.core.events import Recorder


@pytest.mark.parametrize("batches", [0, 1, 100, 128, 500, 999, 1000, 5000])
def test_the_first_half_and_the_last_are_kept_in_order_and_the_rest_is_counted(batches: int) -> None:
    recorder = Recorder(most=1000)
    for batch in range(batches):
        recorder.add(("step", 2 * batch, 2 * batch + 1, 0, batch))
        recorder.add_last(("next", 2 * batch + 1, 2 * batch + 2, 0, batch))
        if batch == 300:
            assert len(recorder.events()) == 602  # looking changes nothing
    stamps = list(range(2 * batches))
    kept = stamps if len(stamps) <= 1000 else stamps[:500] + stamps[-500:]
    assert [event.began_ns for event in recorder.events()] == kept
    assert recorder.dropped == len(stamps) - len(kept)


def test_what_a_row_leaves_out_is_as_an_event_has_it() -> None:
    recorder = Recorder()
    recorder.add(("wait", 1, 2, 3, 4))
    (event,) = recorder.events()
    assert (event.pid, event.worker, event.samples) == (0, -1, 0)
