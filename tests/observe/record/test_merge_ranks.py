"""Records of several ranks become one: counts side by side, what was held at the same time added up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.core.stats import LoaderStatistics, StageTimes
from penstock.observe.meters.host_memory import HostMemory
from penstock.observe.record import run_record
from penstock.observe.record.merge_ranks import merge_ranks, merge_timelines
from penstock.observe.record.run_record import LoaderRecord, RunRecord
from penstock.observe.record.timeline import TimelinePoint
from penstock.observe.report import text_report
from penstock.observe.report.write_html import render_html


def rank(started: str, *, samples: int = 10, exit_code: int | None = 0, error: str | None = None) -> RunRecord:
    counted = LoaderStatistics(
        batches=5, samples=samples, stages=StageTimes(wait_s=1.0, step_s=4.0), worker_type="process"
    )
    return RunRecord(
        command=("train.py",),
        started=f"2026-01-01T00:00:{started}+00:00",
        wall_s=10.0,
        exit_code=exit_code,
        error=error,
        memory=HostMemory(peak_pss_nbytes=100, processes=2),
        loaders=(LoaderRecord(name="Images", settings={"batch_size": 2}, statistics=counted),),
        timeline=(
            TimelinePoint(at_s=1.0, samples=samples // 2, host_nbytes=50),
            TimelinePoint(at_s=9.0, samples=samples),
        ),
    )


def test_ranks_stay_apart_and_are_added_up() -> None:
    both = merge_ranks({0: rank("00.500"), 1: rank("01.000", samples=30)}, {})
    assert [loader.rank for loader in both.loaders] == [0, 1]
    assert [one.samples for one in both.ranks] == [10, 30]
    assert both.wall_s == pytest.approx(10.5)
    assert both.memory.peak_pss_nbytes == 200
    assert (both.exit_code, both.error) == (0, None)
    assert run_record.as_json(both)["totals"]["samples_per_s"] == pytest.approx(10 / 5 + 30 / 5)
    assert run_record.from_json(run_record.as_json(both)) == both


def test_missing_ranks_are_named_with_the_reason() -> None:
    both = merge_ranks(
        {1: rank("00.000", exit_code=3, error="ValueError: x")}, {0: "it never started", 2: "it was killed"}
    )
    assert (both.exit_code, both.error) == (3, "rank 1: ValueError: x")
    text = text_report.render(both)
    assert "rank 0: no batch (it never started)" in text
    assert "rank 2: no batch (it was killed)" in text
    assert "rank 1: 10 samples in 5 batches, 2 samples/s, waited for data 20 % of the time, exit code 3" in text


def test_the_rank_that_ended_first_is_why_the_run_ended() -> None:
    records = {
        0: replace(rank("00.000", error="it was killed"), wall_s=9.5, exit_code=None),  # by torchrun
        1: replace(rank("00.000", exit_code=1, error="RuntimeError: connection closed by peer"), wall_s=9.2),
        2: replace(rank("01.000", exit_code=3, error="ValueError: x"), wall_s=8.1),
    }
    merged = merge_ranks(records, {0: "it was killed"})
    assert (merged.exit_code, merged.error) == (3, "rank 2: ValueError: x")


def test_of_64_ranks_the_report_has_those_that_failed_and_those_that_waited_most() -> None:
    records = {number: rank("00.000") for number in range(63)}
    slow = LoaderStatistics(batches=5, samples=10, stages=StageTimes(wait_s=3.0, step_s=2.0), worker_type="process")
    records[40] = replace(records[40], loaders=(LoaderRecord(name="Images", settings={}, statistics=slow),))
    records[7] = rank("00.000", exit_code=3)
    merged = merge_ranks(records, {63: "it was killed"})
    text = text_report.render(merged)
    assert "rank 7: 10 samples in 5 batches, 2 samples/s, waited for data 20 % of the time, exit code 3" in text
    assert "rank 40: 10 samples in 5 batches, 2 samples/s, waited for data 60 % of the time" in text
    assert "rank 63: no batch (it was killed)" in text
    assert "48 other ranks: see run.json" in text
    assert text.count("\n  rank ") == 16
    page = render_html(merged)
    assert len(page) < 200 << 10
    assert len(run_record.as_json(merged)["ranks"]) == 64


def test_no_exit_code_is_known_when_a_rank_was_killed() -> None:
    assert merge_ranks({0: rank("00.000")}, {1: "it was killed"}).exit_code is None


def test_the_merged_timeline_is_the_sum_over_ranks_at_each_time() -> None:
    first = (
        TimelinePoint(at_s=0.0, samples=1, device_nbytes=300),
        TimelinePoint(at_s=2.0, samples=2),
        TimelinePoint(at_s=4.0, samples=3, device_utilization=0.5),
    )
    second = (TimelinePoint(at_s=1.0, samples=10), TimelinePoint(at_s=2.0, samples=20))
    both = merge_timelines([(0.0, first), (1.0, second)])
    assert [(point.at_s, point.samples) for point in both] == [(0.0, 1), (2.0, 12), (4.0, 23)]
    assert both[-1].device_utilization == 0.5
    assert both[0].device_nbytes == 300
    assert merge_timelines([(0.0, ()), (0.0, ())]) == ()
