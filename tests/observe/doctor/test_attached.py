"""`penstock doctor --pid`: what the stacks of a running program show."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from penstock import cli
from penstock.core.errors import ExtraError, PenstockError
from penstock.observe.doctor.attached import render, summarize
from penstock.observe.doctor.probes import process_stacks
from penstock.observe.doctor.probes.process_stacks import parse_stacks, sample_stacks

_TORCH = "/venv/lib/python3.12/site-packages/torch/utils/data"
_OPENED = "MainThread;<module> (/home/me/train.py:9)"
_MAIN = f'process 7:"python train.py";thread (7): {_OPENED}'
_NEXT = f"_BaseDataLoaderIter.__next__ ({_TORCH}/dataloader.py:725)"
_WORKER = f'process 7:"python train.py";process {{0}}:"python train.py";thread ({{0}}): {_OPENED}'
_LOOP = f"_worker_loop ({_TORCH}/_utils/worker.py:349)"
_FETCH = f"_MapDatasetFetcher.fetch ({_TORCH}/_utils/fetch.py:54)"
_QUEUE = "Queue.get (/usr/lib/python3.12/multiprocessing/queues.py:113)"


def _stacks(*lines: str) -> str:
    return "\n".join(lines) + "\n"


def _worker(pid: int, *frames: str) -> str:
    return ";".join([_WORKER.format(pid), _LOOP, *frames])


def test_busy_workers_are_told_from_the_step_with_the_lines_that_take_the_time() -> None:
    text = _stacks(
        f"{_MAIN};{_NEXT};{_QUEUE} 90",
        f"{_MAIN};step (/home/me/train.py:12);Linear.forward (/venv/lib/python3.12/site-packages/torch/nn.py:3) 10",
        f"{_MAIN.replace('(7): MainThread', '(8): Feeder')};step (/home/me/train.py:99) 100",
        _worker(20, _FETCH, "Images.__getitem__ (/home/me/data.py:30)", "open (/usr/lib/python3.12/gzip.py:9)") + " 80",
        _worker(20, _QUEUE) + " 20",
        _worker(21, _FETCH, "Images.__getitem__ (/home/me/data.py:31)") + " 95",
        _worker(21, _QUEUE) + " 5",
        'process 7:"python train.py";process 30:"tracker";thread (30): MainThread;main (/usr/lib/python3.12/x.py:1) 9',
    )
    seen = summarize(tuple(parse_stacks(text)))
    assert (seen.pid, seen.workers, seen.samples, seen.wait_fraction) == (7, 2, 100, 0.9)
    assert seen.busy_fraction == pytest.approx(175 / 200)
    assert [line.where for line in seen.step_lines] == ["train.py:12 (step)"]
    assert [line.where for line in seen.loading_lines] == [
        "data.py:31 (Images.__getitem__)",
        "data.py:30 (Images.__getitem__)",
    ]
    assert "process 7: loading is the bottleneck: its workers are busy" in render(seen)


@pytest.mark.parametrize(
    ("waits", "makes", "words"),
    [
        (5, 5, "bound by its own work"),
        (60, 5, "while its workers do too"),
        (0, 50, "asked no loader"),
    ],
)
def test_the_conclusion_follows_from_who_waits(waits: int, makes: int, words: str) -> None:
    text = _stacks(
        f"{_MAIN};step (/home/me/train.py:12) {100 - waits}",
        *([f"{_MAIN};{_NEXT};{_QUEUE} {waits}"] if waits else []),
        _worker(20, _FETCH, "Images.__getitem__ (/home/me/data.py:30)") + f" {makes}",
        _worker(20, _QUEUE) + f" {100 - makes}",
    )
    assert words in render(summarize(tuple(parse_stacks(text))))


def test_a_loop_without_workers_shows_the_lines_of_its_dataset() -> None:
    text = _stacks(
        f"{_MAIN};{_NEXT};{_FETCH};Images.__getitem__ (/home/me/data.py:30) 70",
        f"{_MAIN};step (/home/me/train.py:12) 30",
    )
    seen = summarize(tuple(parse_stacks(text)))
    assert [(line.where, line.fraction) for line in seen.loading_lines] == [("data.py:30 (Images.__getitem__)", 0.7)]
    assert "in the training process itself" in render(seen)


_HANGING = """
import threading
from torch.utils.data import DataLoader, Dataset

class Hanging(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        print("here", flush=True)
        threading.Event().wait()  # forever

for batch in DataLoader(Hanging(), num_workers=1):
    pass
"""


def test_workers_that_stand_still_are_named_with_their_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], preloaded_python: None
) -> None:
    if not (Path(sysconfig.get_path("scripts")) / "py-spy").exists() and shutil.which("py-spy") is None:
        pytest.skip("py-spy is not installed")
    (tmp_path / "hanging.py").write_text(_HANGING)
    command = [sys.executable, str(tmp_path / "hanging.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as program:
        try:
            assert program.stdout is not None
            program.stdout.readline()
            try:
                assert cli.main(["doctor", "--pid", str(program.pid), "--seconds", "1", "--json"]) == 0
            except PenstockError as error:
                pytest.skip(str(error))
        finally:
            os.killpg(program.pid, signal.SIGKILL)  # its worker too: it would wait forever
    seen = json.loads(capsys.readouterr().out)
    assert seen["wait_fraction"] == 1.0
    ((_, calls),) = seen["stuck"]
    assert any("hanging.py:10 (Hanging.__getitem__)" in call for call in calls)


def test_what_cannot_be_looked_into_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--pid", "1", "train.py"]) == 2
    assert "leave out the other program" in capsys.readouterr().err
    monkeypatch.setattr(process_stacks.shutil, "which", lambda name: None)
    monkeypatch.setattr(process_stacks.sysconfig, "get_path", lambda name: "/nowhere")
    with pytest.raises(ExtraError, match=r"penstock\[doctor\]"):
        sample_stacks(1, 1.0)
    monkeypatch.setattr(process_stacks, "_program", lambda: "false")
    with pytest.raises(PenstockError, match="SYS_PTRACE"):
        sample_stacks(1, 1.0)
