"""Forks beside worker threads."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

import pytest
import torch
from torch.utils.data import Subset

import penstock
from penstock.loader.workers import thread_gate
from penstock.loader.workers.thread_gate import ThreadGate

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


class Guarded(torch.utils.data.Dataset[int]):
    """Makes a sample at a time, in each process that has it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> int:
        with self.lock:
            time.sleep(0.002)
        return index


@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, penstock.DataLoader])
def test_a_loader_that_forks_while_threads_make_samples_gets_no_lock_that_is_held(
    kind: type[torch.utils.data.DataLoader[int]],
) -> None:
    dataset = Guarded()
    batches = iter(penstock.DataLoader(dataset, batch_size=8, num_workers=4, worker_type="thread"))
    for _ in range(4):
        next(batches)
        validation = kind(Subset(dataset, range(8)), batch_size=4, num_workers=2, timeout=10)
        assert [batch.tolist() for batch in validation] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert next(batches).tolist() == [*range(32, 40)]
    batches._shutdown_workers()


class Forking(Guarded):
    """Forks in each sample, with its lock."""

    def __getitem__(self, index: int) -> int:
        with self.lock:
            process = multiprocessing.get_context("fork").Process(target=os.getpid)
            process.start()
            process.join()
            process.close()
        return index


def test_a_sample_may_fork_while_another_waits_for_its_lock() -> None:
    loader = penstock.DataLoader(Subset(Forking(), range(16)), batch_size=2, num_workers=3, worker_type="thread")
    assert [batch.tolist() for batch in loader] == [[at, at + 1] for at in range(0, 16, 2)]


def test_a_fork_leaves_a_gate_as_it_was_and_one_of_its_own_in_the_child() -> None:
    gate = ThreadGate()
    gate.close()
    pid = os.fork()
    if not pid:
        os._exit(int(gate.is_closed))
    assert os.waitpid(pid, 0)[1] == 0
    assert gate.is_closed
    gate.open()
    assert not gate.is_closed


def _fork_and_end() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)


def test_a_fork_does_not_wait_forever_for_a_sample_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_gate, "_PATIENCE_S", 0.01)
    gate, is_inside, may_leave = ThreadGate(), threading.Event(), threading.Event()

    def make_sample() -> None:
        gate.enter()
        is_inside.set()
        may_leave.wait()
        gate.leave()

    thread = threading.Thread(target=make_sample)
    thread.start()
    is_inside.wait()
    try:
        with pytest.warns(UserWarning, match="forks while a worker thread"):
            _fork_and_end()
    finally:
        may_leave.set()
        thread.join()
    assert not gate.is_closed
