"""A whole run of the benchmark on one small configuration: it writes everything its tables need."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import scale
from benchmarks.scaling.costs import Costs, ImageCost, WorkerCost, line
from benchmarks.scaling.loop_configs import LoopConfig, RemoteBatches, loop_configs
from benchmarks.scaling.measure import time_loop
from benchmarks.table import markdown_table

COSTS = Costs(
    cores=2,
    sleep_extra_s=0.0001,
    burn_extra_s=0.0,
    handling_s=0.0002,
    result_s=0.0001,
    worker_costs={shape: WorkerCost(task_s=0.0001, row_s=0.00001) for shape in ("small", "image")},
    copy_gb_per_s=10.0,
    receive_gb_per_s=3.0,
    image=ImageCost(decode_s=0.0015, stored_nbytes=80_000),
)
CONFIG = LoopConfig(group="a row", workers=1, batch_size=2, sample_s=0.001)


def test_a_run_writes_everything_its_tables_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scale, "calibrate", lambda cores: COSTS)
    monkeypatch.setattr(scale, "loop_configs", lambda cores, quick: [CONFIG])
    file = tmp_path / "scale.json"
    monkeypatch.setattr(sys, "argv", ["scale", "--quick", "--json", str(file)])
    scale.main()
    assert capsys.readouterr().out.splitlines()[-1].startswith("scale: 1 configurations predicted, then measured;")
    report = json.loads(file.read_text())
    assert scale.costs_of(report) == COSTS
    (found,) = report["configs"]
    assert LoopConfig(**found["config"]) == CONFIG
    assert len(found["samples_per_s"]) == report["rounds"]
    for name in ("check", "costs", "plans", "stages", "uneven"):
        assert markdown_table(report, name).count("\n| ") > 2


def test_a_timed_loop_runs_the_requested_number_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr("benchmarks.scaling.measure.time.sleep", naps.append)
    found = time_loop(LoopConfig(group="", workers=1, batch_size=2, step_s=0.5), skip=3, batches=4)
    assert naps == [0.5] * 7
    assert found.batch_s > 0


def test_a_remote_batch_is_the_requested_batch() -> None:
    dataset = RemoteBatches(LoopConfig(group="", workers=1, batch_size=2, round_trip_s=1e-6, link_s=1e-6))
    batch = dataset.__getitems__([0, 3])
    assert [sample.tolist() for sample in batch] == [dataset[0].tolist(), dataset[3].tolist()]


def test_quick_configurations_use_at_most_three_workers() -> None:
    assert max(config.workers for config in loop_configs(4, quick=True)) == 3
    assert min(config.workers for config in loop_configs(1, quick=True)) == 1


def test_a_fitted_line_never_has_a_negative_cost() -> None:
    assert line((1.0, 2.0), (0.0, 5.0)) == (0.0, 5.0)
    assert line((1.0, 2.0), (5.0, 1.0)) == (5.0, 0.0)
