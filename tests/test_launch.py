"""`penstock run` runs a script as Python would, and says afterwards where the time went."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

TRAINING = """
    import argparse
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--epochs", type=int, default=2)
        parser.add_argument("--start-method", default=None)
        args = parser.parse_args()
        torch.manual_seed(0)
        dataset = TensorDataset(torch.arange(40.0), torch.arange(40))
        loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2,
                            multiprocessing_context=args.start_method)
        for epoch in range(args.epochs):
            print(epoch, [labels.tolist() for _, labels in loader])

    if __name__ == "__main__":
        main()
"""


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def python(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=120)


def penstock(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "penstock", *command)


@pytest.mark.parametrize(
    ("text", "args"),
    [
        pytest.param(TRAINING, ("--epochs", "3"), id="training with arguments"),
        pytest.param(TRAINING, ("--start-method", "spawn"), id="spawned workers import the script"),
        pytest.param(TRAINING, ("--no-such-option",), id="argparse refuses"),
        pytest.param("import sys; print(sys.argv, __name__); sys.exit(3)", ("a", "--b"), id="exit code"),
        pytest.param("import sys; sys.exit('no data')", (), id="exit with words"),
        pytest.param("def f():\n    raise ValueError('x')\nf()\n", (), id="uncaught exception"),
        pytest.param("print(__file__ is not None, __spec__)", (), id="module attributes"),
        pytest.param("1 +", (), id="syntax error"),
    ],
)
def test_a_script_prints_and_ends_as_under_python(tmp_path: Path, text: str, args: tuple[str, ...]) -> None:
    path = script(tmp_path, text)
    plain = python(tmp_path, path.name, *args)
    run = penstock(tmp_path, "run", "--quiet", path.name, *args)
    assert run.stdout == plain.stdout
    assert run.stderr == plain.stderr
    assert run.returncode == plain.returncode


def test_a_module_runs_as_under_python_m(tmp_path: Path) -> None:
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").touch()
    script(package, "import sys; from project import __name__ as n; print(n, __name__, sys.argv[1:])", "train.py")
    plain = python(tmp_path, "-m", "project.train", "--lr", "1")
    run = penstock(tmp_path, "run", "--quiet", "-m", "project.train", "--lr", "1")
    assert (run.stdout, run.stderr, run.returncode) == (plain.stdout, plain.stderr, 0)


def test_an_interrupted_script_ends_by_sigint(tmp_path: Path) -> None:
    path = script(tmp_path, "import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "run", "--quiet", path.name],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert error.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode == -signal.SIGINT


def test_the_scripts_dataloader_is_penstocks(tmp_path: Path) -> None:
    path = script(
        tmp_path, "import torch.utils.data as d, torch.utils.data.dataloader as e; print(d.DataLoader, e.DataLoader)"
    )
    assert penstock(tmp_path, "run", path.name).stdout.count("penstock.feed.loader.DataLoader") == 2


def test_the_report_and_run_json_say_where_the_time_went(tmp_path: Path) -> None:
    path = script(tmp_path, TRAINING)
    run = penstock(tmp_path, "run", "--json", "kept.json", path.name)
    for word in (
        "TensorDataset",
        "samples/s",
        "stalled",
        "read+decode",
        "collate",
        "transport",
        "wait",
        "step",
        "peak",
    ):
        assert word in run.stderr
    data = json.loads((tmp_path / "kept.json").read_text())
    (loader,) = data["loaders"]
    assert data["exit"] == {"code": 0, "error": None}
    assert (loader["statistics"]["batches"], loader["statistics"]["samples"]) == (10, 80)
    assert loader["settings"]["num_workers"] == 2
    assert data["host"]["memory"]["peak_pss_nbytes"] > 0
    again = penstock(tmp_path, "report", "kept.json")
    assert again.stdout == run.stderr


def test_the_report_is_written_also_when_the_script_fails(tmp_path: Path) -> None:
    path = script(tmp_path, "raise KeyError('label')")
    run = penstock(tmp_path, "run", path.name)
    assert run.returncode == 1
    assert json.loads((tmp_path / "run.json").read_text())["exit"] == {"code": 1, "error": "KeyError: 'label'"}


def test_quiet_says_nothing_of_its_own(tmp_path: Path) -> None:
    run = penstock(tmp_path, "run", "--quiet", script(tmp_path, TRAINING).name)
    assert run.stderr == ""


@pytest.mark.parametrize("command", [("nope.py",), ("-m", "no.such.module"), ()])
def test_nothing_to_run_is_one_line_and_exit_code_2(tmp_path: Path, command: tuple[str, ...]) -> None:
    run = penstock(tmp_path, "run", *command)
    assert run.returncode == 2
    assert run.stderr.startswith("penstock: ")
    assert run.stderr.count("\n") == 1


def test_on_a_terminal_a_live_line_shows_progress(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import time, torch
        from torch.utils.data import DataLoader
        for epoch in range(3):
            for batch in DataLoader(torch.arange(100.0), batch_size=10):
                time.sleep(0.05)
        """,
    )
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "run", path.name],
        cwd=tmp_path,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(slave)
    shown = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            piece = os.read(master, 65536)
        except OSError:  # the terminal's other side is gone
            break
        if not piece:
            break
        shown += piece
    os.close(master)
    assert process.wait(60) == 0
    assert b"batch" in shown
    assert b"samples/s" in shown
    assert b"waited for data" in shown
