"""A snapshot of a loop from another thread counts ready batches and working workers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import Dataset

from penstock import DataLoader
from penstock.loader.dataloader import runtime_of
from penstock.observe.live.loop_snapshot import LoopSnapshot, take_snapshot


class Gated(Dataset):
    """Twelve samples; those of batch k (of two) wait until pipe k has a byte for each."""

    def __init__(self, gates: list[int]) -> None:
        self.gates = gates

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        os.read(self.gates[index // 2], 1)
        return torch.full((10_000,), index)


@pytest.fixture
def gates() -> Iterator[list[tuple[int, int]]]:
    """Return six pipes. Whatever a test does, no sample waits for one of them for ever."""
    pipes = [os.pipe() for _ in range(6)]
    yield pipes
    for taken, given in pipes:
        os.write(given, b"..")
        os.close(taken)
        os.close(given)


def until(loader: DataLoader, **wanted: int) -> LoopSnapshot:
    """Take snapshots until one is as wanted."""
    deadline = time.monotonic() + 30
    snapshot = None
    while time.monotonic() < deadline:
        snapshot = take_snapshot(runtime_of(loader).counters)
        if snapshot is not None and all(getattr(snapshot, name) == value for name, value in wanted.items()):
            return snapshot
    raise AssertionError(f"{snapshot} never became {wanted}")


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_ready_batches_and_working_workers_are_counted(worker_type: str, gates: list[tuple[int, int]]) -> None:
    dataset = Gated([taken for taken, _ in gates])
    loader = DataLoader(dataset, batch_size=2, num_workers=2, worker_type=worker_type, errors="skip")  # not split
    iterator = iter(loader)
    until(loader, workers=2, working=2, ready=0)
    for _, given in gates[:2]:
        os.write(given, b"..")
    until(loader, working=2, ready=2)
    for _, given in gates[2:4]:
        os.write(given, b"..")
    until(loader, working=0, ready=4, held=0)
    batch = next(iterator)
    assert until(loader, ready=3, working=1).held == 1
    del batch
    for _, given in gates[4:]:
        os.write(given, b"..")
    assert [len(each) for each in iterator] == [2] * 5
    assert take_snapshot(runtime_of(loader).counters) == LoopSnapshot()


def test_a_loop_without_workers_has_slots_and_nothing_ready() -> None:
    loader = DataLoader(torch.zeros(8, 100_000), batch_size=4, errors="skip")
    assert take_snapshot(runtime_of(loader).counters) == LoopSnapshot()
    iterator = iter(loader)
    batch = next(iterator)
    snapshot = take_snapshot(runtime_of(loader).counters)
    assert snapshot is not None
    assert (snapshot.workers, snapshot.ready, snapshot.held) == (0, 0, 1)
    assert snapshot.slots_nbytes >= batch.nbytes


def test_snapshots_do_not_disturb_a_loop() -> None:
    loader = DataLoader(torch.arange(4000), batch_size=4, num_workers=2, dispatch="demand")
    over = threading.Event()

    def take_snapshots() -> None:
        while not over.is_set():
            take_snapshot(runtime_of(loader).counters)

    thread = threading.Thread(target=take_snapshots)
    thread.start()
    try:
        for _ in range(2):
            assert torch.cat(list(loader)).tolist() == list(range(4000))
    finally:
        over.set()
        thread.join()
