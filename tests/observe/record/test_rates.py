"""Rates follow from counters."""

from __future__ import annotations

import pytest

from penstock.core.stats import LoaderStatistics, RingCounts, StageTimes
from penstock.observe.record import rates

STEPPING = LoaderStatistics(
    batches=10,
    samples=100,
    worker_type="process",
    first_batch_s=0.5,
    stages=StageTimes(fetch_s=8, collate_s=1, transport_s=1, wait_s=2, step_s=7),
    skipped=1,
    skipped_indices=(4,),
    ring=RingCounts(copied_out=1, segments=1),
)


def test_with_workers_their_work_is_no_part_of_the_loop() -> None:
    assert STEPPING.loop_s == 10
    assert STEPPING.samples_per_s == 10
    assert STEPPING.stall_fraction == pytest.approx(0.3)


def test_without_workers_the_dataset_is_what_the_step_waits_for() -> None:
    inline = LoaderStatistics(worker_type="inline", samples=9, stages=StageTimes(fetch_s=2, collate_s=1, step_s=6))
    assert inline.loop_s == 9
    assert inline.stall_fraction == pytest.approx(1 / 3)


def test_before_the_first_batch_every_rate_is_zero() -> None:
    assert LoaderStatistics().samples_per_s == LoaderStatistics().stall_fraction == 0


def test_the_difference_of_two_snapshots_is_what_was_counted_between_them() -> None:
    recent = rates.statistics_between(STEPPING, rates.combine_statistics([STEPPING, STEPPING]))
    assert (recent.batches, recent.samples, recent.stages) == (10, 100, STEPPING.stages)


def test_combined_statistics_sum_counters_and_keep_the_rest() -> None:
    both = rates.combine_statistics([STEPPING, STEPPING])
    assert (both.batches, both.samples, both.skipped, both.skipped_indices) == (20, 200, 2, (4, 4))
    assert (both.first_batch_s, both.worker_type, both.ring.copied_out, both.ring.segments) == (0.5, "process", 2, 1)
    assert both.samples_per_s == STEPPING.samples_per_s
