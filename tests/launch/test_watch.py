"""`penstock watch` looks on from outside, and leaves the run alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch.programs import SLOW, OnTerminal, is_given_back, penstock, script, shows_panel

pytestmark = pytest.mark.usefixtures("preloaded_python")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Return a run that has shown itself."""
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "run", "--quiet", script(tmp_path, SLOW).name, "1000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while process.stdout.readline() != "epoch 1\n":
        pass
    yield process
    process.terminate()
    process.communicate(timeout=60)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_the_only_run_is_watched_and_left_alone(
    on_terminal: OnTerminal, running: subprocess.Popen[str], number: signal.Signals, code: int
) -> None:
    watching = on_terminal("watch")
    watching.until(shows_panel)
    watching.process.send_signal(number)
    assert watching.end() == ([], code)
    assert is_given_back(watching.screen)
    assert running.poll() is None


def test_its_numbers_are_one_line_of_json(tmp_path: Path, running: subprocess.Popen[str]) -> None:
    line = penstock(tmp_path, "watch", str(running.pid), "--json").stdout
    data = json.loads(line)
    assert line.count("\n") == 1
    assert (data["pid"], data["loader"]) == (running.pid, "Slow")
    assert data["now"]["batches"] > 0


def test_watching_ends_with_the_run(tmp_path: Path, running: subprocess.Popen[str]) -> None:
    watching = subprocess.Popen(
        [sys.executable, "-m", "penstock", "watch"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert watching.stdout is not None
    assert watching.stdout.readline().startswith("Slow (train.py:13): epoch ")
    running.kill()
    assert watching.communicate(timeout=60)[0].splitlines()[-1] == f"penstock: run {running.pid} is over"
    assert watching.returncode == 0


def test_a_pid_that_is_no_run_is_one_line(tmp_path: Path, running: subprocess.Popen[str]) -> None:
    done = penstock(tmp_path, "watch", str(os.getpid()))
    assert done.returncode == 2
    assert done.stderr.startswith(f"penstock: process {os.getpid()} is not a run of yours; running:")
    assert f"{running.pid} (train.py 1000)" in done.stderr


def test_without_a_run_the_error_is_one_line(tmp_path: Path) -> None:
    done = penstock(tmp_path, "watch")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "you have no run on this machine" in done.stderr
