"""Worker threads."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch

from penstock import DataLoader


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
