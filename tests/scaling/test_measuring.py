"""A whole run of the benchmark on one small configuration: what it writes is what its tables are made of."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import scale
from benchmarks.scaling.costs import Costs, Making, Picture, line
from benchmarks.scaling.laps import lap
from benchmarks.scaling.points import Distant, Point, points
from benchmarks.table import markdown_table

COSTS = Costs(
    cores=2,
    sleep_extra_s=0.0001,
    burn_extra_s=0.0,
    handling_s=0.0002,
    report_s=0.0001,
    making={shape: Making(piece_s=0.0001, row_s=0.00001) for shape in ("small", "picture")},
    copy_gb_per_s=10.0,
    receive_gb_per_s=3.0,
    picture=Picture(decode_s=0.0015, stored_nbytes=80_000),
)
POINT = Point(row="a row", workers=1, batch_size=2, sample_s=0.001)


def test_a_run_writes_what_its_tables_are_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scale, "calibrate", lambda cores: COSTS)
    monkeypatch.setattr(scale, "points", lambda cores, quick: [POINT])
    file = tmp_path / "scale.json"
    monkeypatch.setattr(sys, "argv", ["scale", "--quick", "--json", str(file)])
    scale.main()
    assert capsys.readouterr().out.splitlines()[-1].startswith("scale: 1 configurations predicted, then measured;")
    report = json.loads(file.read_text())
    assert scale.costs_of(report) == COSTS
    (found,) = report["points"]
    assert Point(**found["point"]) == POINT
    assert len(found["samples_per_s"]) == report["rounds"]
    for name in ("check", "costs", "plans", "legs", "uneven"):
        assert markdown_table(report, name).count("\n| ") > 2


def test_a_lap_takes_the_batches_that_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr("benchmarks.scaling.laps.time.sleep", naps.append)
    found = lap(Point(row="", workers=1, batch_size=2, step_s=0.5), skip=3, batches=4)
    assert naps == [0.5] * 7
    assert found.batch_s > 0


def test_a_batch_from_afar_is_the_batch_that_was_asked_for() -> None:
    dataset = Distant(Point(row="", workers=1, batch_size=2, trip_s=1e-6, link_s=1e-6))
    batch = dataset.__getitems__([0, 3])
    assert [sample.tolist() for sample in batch] == [dataset[0].tolist(), dataset[3].tolist()]


def test_quick_points_take_no_more_than_three_workers() -> None:
    assert max(point.workers for point in points(4, quick=True)) == 3
    assert min(point.workers for point in points(1, quick=True)) == 1


def test_a_line_never_says_that_something_costs_less_than_nothing() -> None:
    assert line((1.0, 2.0), (0.0, 5.0)) == (0.0, 5.0)
    assert line((1.0, 2.0), (5.0, 1.0)) == (5.0, 0.0)
