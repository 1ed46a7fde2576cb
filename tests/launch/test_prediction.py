"""A run says what the advice of the run before it had predicted, and what following it achieved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import made_runs
import pytest

from penstock.core.stats import StageTimes
from penstock.launch.finalize import write_outputs
from penstock.launch.outputs import Outputs
from penstock.launch.run_folder import RUNS
from penstock.observe.record.run_record import RunRecord


def _run(day: int, *, wait_s: float, num_workers: int) -> RunRecord:
    loader = made_runs.loader("Images", 10, StageTimes(step_s=5.0, wait_s=wait_s, fetch_s=18.0))
    loader = replace(
        loader,
        made_at="train.py:12",
        settings={**loader.settings, "num_workers": num_workers},
        statistics=replace(loader.statistics, workers=num_workers, first_batch_s=0.0),
    )
    return RunRecord(
        command=("train.py", str(day)), started=f"2026-01-0{day}T00:00:00+00:00", wall_s=20.0, cpus=8, loaders=(loader,)
    )


def _write(name: str, record: RunRecord) -> None:
    folder = RUNS / name
    write_outputs(record, Outputs(folder=folder, json_file=folder / "run.json"), is_last=True)


@pytest.mark.parametrize(
    ("num_workers", "words"), [(5, "Predicted 2.00×, achieved 1.60× with num_workers=5"), (3, "")], ids=["yes", "no"]
)
def test_a_run_that_followed_the_last_ones_advice_says_what_it_achieved(
    num_workers: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _write("20260101-000000-train-7", _run(1, wait_s=5.0, num_workers=2))
    _write("20260101-000001-other-8", _run(1, wait_s=0.0, num_workers=2))
    assert "Predicted" not in capsys.readouterr().err
    _write("20260102-000000-train-9", _run(2, wait_s=1.25, num_workers=num_workers))
    printed = capsys.readouterr().err
    assert words in printed
    assert ("Predicted" in printed) == bool(words)


def test_a_damaged_run_before_this_one_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    damaged = RUNS / "20260101-000000-train-7" / "run.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{")
    _write("20260102-000000-train-9", _run(2, wait_s=5.0, num_workers=2))
    assert "num_workers=5" in capsys.readouterr().err
