"""Forks beside worker threads."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

import penstock
from penstock.loader.dataloader import runtime_of
from penstock.loader.workers import thread_gate
from penstock.loader.workers.thread_gate import ThreadGate, stopped_between_samples
from penstock.tune.tuned_loop import ManualWorkers

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


def test_workers_that_are_forked_while_threads_make_samples_get_no_lock_that_is_held() -> None:
    dataset = Guarded()
    batches = iter(penstock.DataLoader(dataset, batch_size=8, num_workers=4, worker_type="thread"))
    for _ in range(4):
        next(batches)
        validation = penstock.DataLoader(Subset(dataset, range(8)), batch_size=4, num_workers=2, timeout=10)
        assert [batch.tolist() for batch in validation] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert next(batches).tolist() == [*range(32, 40)]
    batches._shutdown_workers()


def test_workers_that_are_added_meanwhile_get_none_either() -> None:
    dataset = Guarded()
    batches = iter(penstock.DataLoader(dataset, batch_size=8, num_workers=4, worker_type="thread"))
    next(batches)
    validation = penstock.DataLoader(
        Subset(dataset, range(40)), batch_size=4, num_workers=1, dispatch="demand", timeout=10
    )
    runtime_of(validation).auto_workers = policy = ManualWorkers(workers=1, most=4)
    policy.wanted = 4
    assert [batch.tolist() for batch in validation] == [[*range(at, at + 4)] for at in range(0, 40, 4)]
    assert validation.statistics().workers == 4
    batches._shutdown_workers()


class Iterated(torch.utils.data.IterableDataset[int]):
    """Has its lock while a pass begins."""

    def __init__(self, has_begun: threading.Event | None = None) -> None:
        self.lock, self.has_begun = threading.Lock(), has_begun

    def __iter__(self) -> Iterator[int]:
        with self.lock:
            if self.has_begun is not None:
                self.has_begun.set()
            time.sleep(0.3)
        yield from range(4)

    def __getstate__(self) -> dict[str, object]:
        raise AssertionError("it is forked")


def test_a_stream_that_begins_counts_as_a_sample() -> None:
    has_begun = threading.Event()
    stream = Iterated(has_begun)
    batches = iter(penstock.DataLoader(stream, batch_size=2, num_workers=1, worker_type="thread"))
    has_begun.wait()
    other = penstock.DataLoader(stream, batch_size=2, num_workers=1, timeout=10)
    assert [batch.tolist() for batch in other] == [[0, 1], [2, 3]]
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3]]


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


def test_a_closed_gate_opens_for_all_where_a_fork_fails() -> None:
    gate = ThreadGate()
    with suppress(KeyboardInterrupt), stopped_between_samples():
        assert gate.is_closed
        assert ThreadGate().is_closed, "one that is made meanwhile"
        raise KeyboardInterrupt
    assert not gate.is_closed


def test_a_forked_process_has_nobody_inside_its_gates() -> None:
    gate = ThreadGate()
    with _thread_inside(gate):
        pid = os.fork()
        if not pid:
            os._exit(not gate.pause())
        assert os.waitpid(pid, 0)[1] == 0


def test_a_fork_waits_for_a_sample_for_a_moment_only_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_gate, "PATIENCE_S", 0.01)
    gate = ThreadGate()
    warns = pytest.warns(UserWarning, match="while a worker thread has been making")
    with _thread_inside(gate), warns, stopped_between_samples():
        assert gate.is_closed
    assert not gate.is_closed


@contextmanager
def _thread_inside(gate: ThreadGate) -> Iterator[None]:
    is_inside, may_leave = threading.Event(), threading.Event()

    def make_sample() -> None:
        gate.enter()
        is_inside.set()
        may_leave.wait()
        gate.leave()

    thread = threading.Thread(target=make_sample)
    thread.start()
    is_inside.wait()
    try:
        yield
    finally:
        may_leave.set()
        thread.join()


def test_threads_of_a_paused_pool_can_be_closed() -> None:
    batches: Any = iter(penstock.DataLoader(Guarded(), batch_size=8, num_workers=2, worker_type="thread"))
    next(batches)
    batches.pipeline.thread_gate.pause()
    batches._shutdown_workers()
