"""Rates follow from counters."""

from __future__ import annotations

import pytest

from penstock.core.stats import LoaderStatistics, RingCounts, StageTimes
from penstock.observe import rates

STEPPING = LoaderStatistics(
    batches=10,
    samples=100,
    body="process",
    first_batch_s=0.5,
    stages=StageTimes(fetch_s=8, collate_s=1, transport_s=1, wait_s=2, step_s=7),
    skipped=1,
    skipped_indices=(4,),
    ring=RingCounts(copied_out=1, slabs=1),
)


def test_with_workers_their_work_is_no_part_of_the_loop() -> None:
    assert rates.loop_s(STEPPING) == 10
    assert rates.samples_per_s(STEPPING) == 10
    assert rates.waited_share(STEPPING) == pytest.approx(0.3)


def test_without_workers_the_dataset_is_what_the_step_waits_for() -> None:
    inline = LoaderStatistics(body="inline", samples=9, stages=StageTimes(fetch_s=2, collate_s=1, step_s=6))
    assert rates.loop_s(inline) == 9
    assert rates.waited_share(inline) == pytest.approx(1 / 3)


def test_before_the_first_batch_every_rate_is_zero() -> None:
    assert rates.samples_per_s(LoaderStatistics()) == rates.waited_share(LoaderStatistics()) == 0


def test_since_is_what_was_counted_between_two_snapshots() -> None:
    recent = rates.since(STEPPING, rates.together([STEPPING, STEPPING]))
    assert (recent.batches, recent.samples, recent.stages) == (10, 100, STEPPING.stages)


def test_together_adds_what_adds_up_and_keeps_the_rest() -> None:
    both = rates.together([STEPPING, STEPPING])
    assert (both.batches, both.samples, both.skipped, both.skipped_indices) == (20, 200, 2, (4, 4))
    assert (both.first_batch_s, both.body, both.ring.copied_out, both.ring.slabs) == (0.5, "process", 2, 1)
    assert rates.samples_per_s(both) == rates.samples_per_s(STEPPING)
