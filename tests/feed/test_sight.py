"""A look at a loop from another thread says which batches are ready and what the workers do."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import Dataset

from penstock import DataLoader
from penstock.feed.sight import LoopSight, look


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
    """Return six pipes. Whatever a test does, nobody waits at one of them for ever."""
    pipes = [os.pipe() for _ in range(6)]
    yield pipes
    for taken, given in pipes:
        os.write(given, b"..")
        os.close(taken)
        os.close(given)


def until(loader: DataLoader, **wanted: int) -> LoopSight:
    """Look until the loop is as it is wanted."""
    deadline = time.monotonic() + 30
    sight = None
    while time.monotonic() < deadline:
        sight = look(loader._counters)
        if sight is not None and all(getattr(sight, name) == value for name, value in wanted.items()):
            return sight
    raise AssertionError(f"{sight} never became {wanted}")


@pytest.mark.parametrize("body", ["process", "thread"])
def test_ready_batches_and_working_workers_are_counted(body: str, gates: list[tuple[int, int]]) -> None:
    dataset = Gated([taken for taken, _ in gates])
    loader = DataLoader(dataset, batch_size=2, num_workers=2, workers=body, dispatch="round_robin")
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
    assert look(loader._counters) == LoopSight()


def test_a_loop_without_workers_has_slots_and_nothing_ready() -> None:
    loader = DataLoader(torch.zeros(8, 100_000), batch_size=4)
    assert look(loader._counters) == LoopSight()
    iterator = iter(loader)
    batch = next(iterator)
    sight = look(loader._counters)
    assert sight is not None
    assert (sight.workers, sight.ready, sight.held) == (0, 0, 1)
    assert sight.slots_nbytes >= batch.nbytes


def test_looking_does_not_disturb_a_loop() -> None:
    loader = DataLoader(torch.arange(4000), batch_size=4, num_workers=2)
    over = threading.Event()

    def stare() -> None:
        while not over.is_set():
            look(loader._counters)

    thread = threading.Thread(target=stare)
    thread.start()
    try:
        for _ in range(2):
            assert torch.cat(list(loader)).tolist() == list(range(4000))
    finally:
        over.set()
        thread.join()
