"""Worker threads."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import pytest
import torch

from penstock import DataLoader, Sim


class Dropping(torch.utils.data.Dataset[int]):
    """Drops the iterator that it is read by, in the worker, when the program has its first batch."""

    def __init__(self) -> None:
        self.iterators: list[object] = []
        self.has_first, self.is_dropped = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 1:
            self.has_first.wait()
            self.iterators.clear()
            gc.collect()
            self.is_dropped.set()
        return index


def test_an_iterator_may_die_in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    dataset = Dropping()
    iterator = iter(DataLoader(dataset, batch_size=1, num_workers=2, worker_type="thread"))
    dataset.iterators.append(iterator)
    next(iterator)
    del iterator
    dataset.has_first.set()
    dataset.is_dropped.wait()
    monkeypatch.undo()
    assert not ignored


def as_they_are(samples: list[int]) -> Any:
    """Collate to what cannot be pickled, with one object in two places."""
    shared = [*samples]
    return {"lock": threading.Lock(), "call": lambda: samples[0], "one": shared, "two": shared, "x": torch.ones(2, 3)}


def test_a_batch_that_a_thread_has_made_is_handed_over_as_the_object_itself() -> None:
    made: list[Any] = []

    def collate(samples: list[int]) -> Any:
        made.append(as_they_are(samples))
        return made[-1]

    batches = list(DataLoader(range(8), batch_size=4, num_workers=2, worker_type="thread", collate_fn=collate))
    assert [id(batch) for batch in batches] == [id(one) for one in sorted(made, key=lambda one: one["call"]())]
    assert all(batch["one"] is batch["two"] for batch in batches)


def test_the_slot_of_a_batch_that_was_handed_over_itself_is_free_at_once() -> None:
    loader = DataLoader(range(64), batch_size=4, num_workers=2, worker_type="thread", collate_fn=as_they_are)
    nbytes = 0
    for batch in loader:
        nbytes += batch["x"].nbytes
        ring = loader.statistics().ring
        assert (ring.held, ring.ready) == (0, 0)
    assert loader.statistics().nbytes == nbytes == 16 * 24


class Large(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of 256 KiB, which are collated row by row."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((256, 256), float(index))


def test_rows_that_the_default_collate_writes_lie_in_a_slot_that_is_reused() -> None:
    loader = DataLoader(Large(), batch_size=2, num_workers=2, worker_type="thread")
    for number, batch in enumerate(loader):
        assert batch[:, 0, 0].tolist() == [2 * number, 2 * number + 1]
        assert loader.statistics().ring.held == 1
        del batch


def test_batches_of_tensors_lie_in_page_locked_slots_whoever_has_collated_them() -> None:
    device = Sim()
    loader = DataLoader(
        Large(), batch_size=2, num_workers=2, worker_type="thread", collate_fn=torch.stack, pin_memory=device
    )
    batch = next(iter(loader))
    assert loader.statistics().ring.held == 1
    assert batch[1, 0, 0] == 1


class Transformed(torch.utils.data.Dataset[torch.Tensor]):
    """Draws as torch's transforms do, several times for a sample."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([torch.rand(2, generator=torch.thread_safe_generator()) for _ in range(3)])


@pytest.mark.skipif(not hasattr(torch, "thread_safe_generator"), reason="torch 2.13 has it first")
def test_torchs_generator_for_threads_is_seeded_for_each_sample() -> None:
    once, again = (
        torch.cat(list(DataLoader(Transformed(), 2, num_workers=workers, worker_type="thread", seed=5)))
        for workers in (1, 4)
    )
    assert torch.equal(once, again)
    assert len(once.unique()) == once.numel()
    assert torch.thread_safe_generator() is None
