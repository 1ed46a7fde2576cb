"""`--baseline` runs the beginning with torch's own loader first, and says what is gained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch.programs import penstock, python, script
from scripts import written

pytestmark = pytest.mark.usefixtures("preloaded_python")

LOOP = """
    import os, sys, time, torch
    from torch.utils.data import DataLoader, Dataset

    class Items(Dataset):
        def __len__(self):
            return int(sys.argv[1]) * 4

        def __getitem__(self, index):
            return torch.full((4,), index)

    with open("starts", "a") as log:
        print("a start", file=log)
    print(sys.stdin.read(), DataLoader.__module__ == "torch.utils.data.dataloader")
    for epoch in range(int(sys.argv[3])):
        for batch in DataLoader(Items(), batch_size=4, num_workers=1):
            time.sleep(float(sys.argv[2]))
    with open("ends", "a") as log:
        print("an end", file=log)
"""


def test_the_same_batches_of_both_loaders_are_compared(tmp_path: Path) -> None:
    run = penstock(tmp_path, "run", "--baseline", script(tmp_path, LOOP).name, "30", "0.01", "1")
    assert "running the beginning of train.py with torch's own loader first" in run.stderr
    assert "batches 11 to 30 of each" in run.stderr
    baseline = json.loads(written(tmp_path).read_text())["baseline"]
    for way in ("torch", "penstock"):
        assert (baseline[way]["batches"], baseline[way]["samples"]) == (20, 80)
        assert baseline[way]["seconds"] >= 20 * 0.01
        assert 0 < baseline[way]["loading_s"] < baseline[way]["seconds"]
        assert baseline[way]["batch_quartiles_s"] == sorted(baseline[way]["batch_quartiles_s"])
    verdict = run.stderr.partition("compared with torch's own loader: ")[2].partition("\n")[0]
    assert f"compared with torch's own loader: {verdict}\n" in penstock(tmp_path, "report").stdout
    assert "torch's loader" in verdict


def test_the_program_starts_twice_and_ends_once_with_its_own_output_only(tmp_path: Path) -> None:
    path = script(tmp_path, LOOP)
    run = penstock(tmp_path, "run", "--quiet", "--baseline", path.name, "200", "0", "2")
    assert (tmp_path / "starts").read_text().count("a start") == 2
    assert (tmp_path / "ends").read_text().count("an end") == 1
    assert (run.stdout, run.stderr) == (" False\n", "")
    assert json.loads(written(tmp_path).read_text())["baseline"]["torch"]["batches"] == 200
    assert python(tmp_path, path.name, "1", "0", "1").stdout == " True\n"


def test_a_program_too_short_to_be_compared_is_reported_so(tmp_path: Path) -> None:
    run = penstock(tmp_path, "run", "--baseline", script(tmp_path, LOOP).name, "5", "0", "2")
    assert run.returncode == 0
    assert "no comparison: the program is too short: torch's DataLoader had 0 batches after the first 10" in run.stderr


def test_a_program_that_fails_is_run_all_the_same(tmp_path: Path) -> None:
    run = penstock(tmp_path, "run", "--baseline", script(tmp_path, "raise KeyError('label')").name)
    assert run.returncode == 1
    assert "no comparison: with torch's loader the program ended with exit code 1 (KeyError: 'label')" in run.stderr


def test_the_stopwatch_restores_the_loaders_when_it_has_finished(tmp_path: Path) -> None:
    text = LOOP + "\n    print(DataLoader.__iter__.__qualname__, DataLoader.__next__ if 0 else '')\n"
    run = penstock(tmp_path, "run", "--quiet", "--baseline", script(tmp_path, text).name, "200", "0", "2")
    assert "DataLoader.__iter__" in run.stdout
    assert "wrapped" not in run.stdout
