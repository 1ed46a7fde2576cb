"""The panel shows every figure of a snapshot, and never more than the terminal is wide."""

from __future__ import annotations

import re

import pytest

from penstock.core.stats import StageTimes
from penstock.observe.live import live_text, panel
from penstock.observe.live.live_snapshot import LiveSnapshot, as_json, from_json
from penstock.observe.record.timeline import TimelinePoint

SNAPSHOT = LiveSnapshot(
    pid=7,
    command=("train.py",),
    now=TimelinePoint(
        at_s=90.0,
        batches=520,
        ready=3,
        workers=4,
        working=2,
        slots_nbytes=80 << 20,
        host_nbytes=3 << 30,
        device_nbytes=12 << 30,
        device_peak_nbytes=13 << 30,
        device_reserved_nbytes=14 << 30,
        device_utilization=0.87,
    ),
    loader="Images",
    epoch=2,
    batch=120,
    length=400,
    window_s=5.0,
    samples_per_s=12345.0,
    batches_per_s=20.0,
    stall_fraction=0.125,
    stages=StageTimes(fetch_s=4.0, collate_s=0.1, transport_s=0.05, wait_s=0.625, step_s=4.3),
    eta_s=14.0,
    starting=1,
    restarts=2,
    processes=5,
)


def plain(drawn: list[str]) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in drawn]


def test_four_rows_hold_all_figures() -> None:
    shown = plain(panel.render(SNAPSHOT, columns=120, rows=4))
    for row, expected in enumerate(
        (
            ("Images", "epoch 2, batch 120/400", "0:14 left"),
            ("12 345 samples/s", "waited for data 12 %", "3 ready", "2 work, 1 waits, 1 starting, 2 replaced"),
            ("read+decode 40.0", "collate 1.0", "transport 0.5", "wait 6.2", "step 43.0"),
            (
                "host 3.0 GiB in 5 processes",
                "slots 80.0 MiB",
                "GPU 12.0 GiB, peak 13.0 GiB",
                "14.0 GiB res",
                "GPU 87 % busy",
            ),
        )
    ):
        assert all(text in shown[row] for text in expected), shown[row]


@pytest.mark.parametrize("columns", [5, 30, 72, 80, 200])
def test_no_line_is_as_wide_as_the_terminal(columns: int) -> None:
    rows = panel.rows_for(columns, 24)
    shown = plain(panel.render(SNAPSHOT, columns=columns, rows=rows))
    assert len(shown) == rows == (4 if columns >= 72 else 1)
    assert all(len(line) < columns for line in shown)


def test_a_low_terminal_gets_one_row() -> None:
    assert panel.rows_for(200, 12) == 1


@pytest.mark.parametrize("snapshot", [LiveSnapshot(pid=1, now=TimelinePoint(at_s=0.0)), SNAPSHOT])
def test_a_snapshot_reads_back_equal(snapshot: LiveSnapshot) -> None:
    assert from_json(as_json(snapshot)) == snapshot


def test_before_the_first_batch_the_panel_shows_that_there_is_none() -> None:
    snapshot = LiveSnapshot(pid=1, now=TimelinePoint(at_s=0.0))
    assert "no batch yet" in plain(panel.render(snapshot, columns=100, rows=4))[0]
    assert live_text.progress_line(snapshot) == "no batch yet"


def test_a_stale_snapshot_shows_its_age() -> None:
    assert "no news for 60 s" in plain(panel.render(SNAPSHOT, columns=150, rows=4, age_s=60))[3]
    assert "no news" not in plain(panel.render(SNAPSHOT, columns=150, rows=4, age_s=1))[3]
