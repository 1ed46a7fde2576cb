"""Large batches are made where they are made faster, also when that changes."""

from __future__ import annotations

import pytest

from penstock.loader.scheduling.direct import SlotTrial


def after(trial: SlotTrial, batches: int, *, in_slots: float, fresh: float) -> bool:
    for _ in range(batches):
        trial.add(in_slots if trial.uses_slots else fresh)
    return trial.uses_slots


@pytest.mark.parametrize(("in_slots", "uses_slots"), [(50.0, True), (98.0, False), (200.0, False)])
def test_slots_are_used_where_they_were_clearly_faster(in_slots: float, uses_slots: bool) -> None:
    trial = SlotTrial()
    trial.look(2 << 20, by_rows=False)
    assert trial.uses_slots
    assert after(trial, 40, in_slots=in_slots, fresh=100.0) is uses_slots


def test_short_epochs_have_no_slots() -> None:
    for epoch, uses_slots in ((16, False), (1000, True), (None, True)):
        trial = SlotTrial()
        trial.look(2 << 20, by_rows=False, epoch=epoch)
        assert (trial.is_wanted, trial.uses_slots) == (uses_slots, uses_slots)


def test_small_batches_are_not_tried_in_slots() -> None:
    trial = SlotTrial()
    trial.look(1000, by_rows=False)
    assert (trial.is_wanted, trial.uses_slots) == (False, False)


def test_the_way_is_changed_when_the_heap_begins_to_give_new_pages_for_each_batch() -> None:
    trial = SlotTrial()
    trial.look(2 << 20, by_rows=False)
    assert not after(trial, 40, in_slots=100.0, fresh=70.0)
    assert after(trial, 100, in_slots=100.0, fresh=300.0)


def test_two_ways_that_are_equally_noisy_are_changed_ever_more_rarely() -> None:
    trial = SlotTrial()
    trial.look(2 << 20, by_rows=False)
    changes, before = 0, trial.uses_slots
    for number in range(20_000):
        trial.add(100.0 if number // 50 % 2 else 200.0)
        changes, before = changes + (trial.uses_slots is not before), trial.uses_slots
    assert changes < 12
