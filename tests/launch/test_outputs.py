"""What `penstock run` writes at its end and serves meanwhile, and what `penstock report` makes of saved runs."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import made_runs
import pytest
from scripts import written
from test_run import TRAINING, penstock, script

from penstock import cli
from penstock.observe.record import run_record
from penstock.observe.record.perfetto_trace import read_trace

pytestmark = pytest.mark.usefixtures("preloaded_python")

SERVED = """
    import sys, urllib.request
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.arange(40.0)), batch_size=8)
    for number, _ in enumerate(loader):
        if number == 2:
            print(urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/metrics", timeout=20).read().decode())
"""


def test_a_run_leaves_its_report_beside_run_json(tmp_path: Path) -> None:
    run = penstock(tmp_path, "run", "--quiet", str(script(tmp_path, TRAINING)))
    assert run.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["penstock-runs", "train.py"]
    assert "train.py" in written(tmp_path, "report.html").read_text()
    saved = run_record.load(written(tmp_path))
    assert saved.machine["cores"] >= 1
    assert saved.started_unix_ns > 1_700_000_000 * 10**9


def test_a_second_run_keeps_the_files_of_the_first_and_is_the_one_that_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, TRAINING)
    first = penstock(tmp_path, "run", str(path))
    second = penstock(tmp_path, "run", str(path), "--epochs", "1")
    folders = sorted((tmp_path / "penstock-runs").iterdir())
    assert len(folders) == 2
    for run, folder in zip((first, second), folders, strict=True):
        assert run.stderr.splitlines()[-1] == f"  report: penstock-runs/{folder.name}/report.html"
    monkeypatch.chdir(tmp_path)
    cli.main(["report"])
    assert "40 samples in 5 batches" in capsys.readouterr().out
    cli.main(["report", str(folders[0])])
    assert "80 samples in 10 batches" in capsys.readouterr().out


def test_where_there_is_no_run_the_command_asks_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report"]) == 2
    assert "there is no run in penstock-runs/; give a file" in capsys.readouterr().err


def test_a_traced_run_names_every_batch_of_every_process(tmp_path: Path) -> None:
    run = penstock(tmp_path, "run", "--quiet", "--trace", "t.json", str(script(tmp_path, TRAINING)), "--epochs", "3")
    assert run.returncode == 0
    events = read_trace(tmp_path / "t.json").events
    handed = [event["args"] for event in events if event["name"].startswith("next batch")]
    assert handed == [{"epoch": epoch, "batch": batch} for epoch in range(3) for batch in range(5)]
    made = [event for event in events if event["name"].startswith("make batch")]
    assert sum(event["args"]["samples"] for event in made) == 3 * 40
    assert len({event["pid"] for event in made}) >= 2


def test_a_report_that_cannot_be_written_is_one_line_and_the_runs_own_exit_code(tmp_path: Path) -> None:
    (tmp_path / "no").mkdir()
    path = script(tmp_path, "import os, sys; os.rmdir('no'); sys.exit(3)")
    run = penstock(tmp_path, "run", "--quiet", "--html", "no/report.html", "--json", "no/run.json", str(path))
    assert run.returncode == 3
    lines = run.stderr.splitlines()
    assert [re.search(r"pass another --\w+ FILE", line)[0] for line in lines] == [
        "pass another --json FILE",
        "pass another --html FILE",
    ]


@pytest.mark.usefixtures("fresh_python")
def test_nothing_that_is_only_needed_at_the_end_is_imported_before_the_program(tmp_path: Path) -> None:
    heavy = ("rich", "torch", "tensorboard", "prometheus_client", "selenium")
    path = script(tmp_path, f"import sys; print([name for name in {heavy} if name in sys.modules])")
    assert penstock(tmp_path, "run", "--quiet", str(path)).stdout == "[]\n"


def test_a_run_serves_its_numbers_to_the_machine_it_runs_on(tmp_path: Path, free_port: int) -> None:
    path = script(tmp_path, SERVED)
    run = penstock(tmp_path, "run", "--prometheus", str(free_port), str(path), str(free_port))
    assert f"penstock: live numbers at http://127.0.0.1:{free_port}/metrics" in run.stderr
    assert 'penstock_batches_total{loader="TensorDataset (train.py:6)"} 3.0' in run.stdout
    assert run.returncode == 0


def test_a_run_whose_port_is_taken_does_not_begin(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        path = script(tmp_path, "print('ran')")
        run = penstock(tmp_path, "run", "--prometheus", str(taken.getsockname()[1]), str(path))
    assert (run.returncode, run.stdout) == (2, "")
    assert "give another --prometheus PORT" in run.stderr


def test_a_saved_run_is_written_for_every_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_record.save(made_runs.ordinary(), tmp_path / "a.json")
    html, trace, logs = (str(tmp_path / name) for name in ("r.html", "t.json", "logs"))
    assert _report(tmp_path, "a.json", "--html", html, "--trace", trace, "--tensorboard", logs) == 0
    assert capsys.readouterr().out == ""
    assert "Your step waited for data" in (tmp_path / "r.html").read_text()
    assert read_trace(tmp_path / "t.json").events
    assert list((tmp_path / "logs").iterdir())


def test_two_saved_runs_are_compared_in_text_and_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_record.save(made_runs.ordinary(), tmp_path / "a.json")
    run_record.save(made_runs.inline(), tmp_path / "b.json")
    assert _report(tmp_path, "a.json", "b.json") == 0
    text = capsys.readouterr().out
    assert "Compare with care" in text
    assert "different numbers of usable cores: 8 and 4" in text
    assert _report(tmp_path, "a.json", "b.json", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "penstock.comparison/1"
    assert data["run"]["samples_per_s"] > data["reference"]["samples_per_s"] > 0
    assert _report(tmp_path, "a.json", "b.json", "--html", str(tmp_path / "r.html")) == 2
    assert "leave out --html, or the second run" in capsys.readouterr().err


def test_a_trace_to_merge_needs_a_file_to_be_merged_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_record.save(made_runs.empty(), tmp_path / "a.json")
    assert _report(tmp_path, "a.json", "--merge", "p.json") == 2
    assert "give --trace FILE as well" in capsys.readouterr().err


def _report(folder: Path, *arguments: str) -> int:
    return cli.main(["report", *(str(folder / one) if one[1:] == ".json" else one for one in arguments)])


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
