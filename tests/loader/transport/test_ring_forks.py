"""Memory that a forked process may read is not written to again."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.core.shared_segment import PrivateSegment, create
from penstock.loader.transport.ring import Ring, Slot

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs shared memory")

FORK = multiprocessing.get_context("fork")


class Child:
    """A forked process that does something, and then lives until it is let go."""

    def __init__(self, work: Callable[[], Any] = lambda: None) -> None:
        self._ours, theirs = FORK.Pipe()
        self._process = FORK.Process(target=self._run, args=(theirs, work))
        self._process.start()
        theirs.close()
        self.result = self._ours.recv()

    def _run(self, pipe: Any, work: Callable[[], Any]) -> None:
        self._ours.close()
        pipe.send(work())
        pipe.recv()

    def end(self) -> None:
        self._ours.send(None)
        self._ours.close()
        self._process.join()


def held_slot(ring: Ring) -> tuple[Slot, np.ndarray]:
    slot = ring.acquire(1)
    assert slot is not None
    ring.commit(slot, 100)
    return slot, ring.lend(slot)


def test_a_slot_that_was_held_at_a_fork_is_not_used_again() -> None:
    ring = Ring(create, 1 << 20)
    slot, memory = held_slot(ring)
    memory[:100] = 5
    child = Child()
    del memory
    assert all(ring.acquire(1) is not slot for _ in range(3))
    child.end()
    assert ring.acquire(1) is not slot
    ring.close()


def test_a_process_that_was_forked_still_reads_the_batch_that_its_parent_has_dropped() -> None:
    ring = Ring(create, 1 << 20)
    _, memory = held_slot(ring)
    memory[:100] = 5
    is_dropped, found = FORK.Event(), FORK.SimpleQueue()

    def read(batch: np.ndarray) -> None:
        is_dropped.wait()
        found.put(batch[:100].tolist())

    process = FORK.Process(target=read, args=(memory,))
    process.start()
    del memory
    for _ in range(8):  # all that there is, and the segment of the slot is dropped with its last one
        slot = ring.acquire(1)
        if slot is not None:
            np.frombuffer(slot.memory, np.uint8)[:100] = 7
    ring.close()
    is_dropped.set()
    assert found.get() == [5] * 100
    process.join()


def test_a_slot_that_was_not_held_at_a_fork_is_reused_at_once() -> None:
    ring = Ring(create, 1 << 20)
    slot, memory = held_slot(ring)
    del memory
    assert ring.acquire(1) is slot
    child = Child()
    ring.release(slot)
    assert ring.acquire(1) is slot
    child.end()
    ring.close()


def test_a_slot_whose_batch_had_died_before_the_fork_is_reused_at_once() -> None:
    ring = Ring(create, 1 << 20)
    slot, memory = held_slot(ring)
    del memory
    child = Child()
    assert ring.acquire(1) is slot, "nobody had asked for a slot between the two, and seen that this one is free"
    child.end()
    ring.close()


def test_private_memory_is_reused_at_once() -> None:
    ring = Ring(PrivateSegment, 1 << 20)
    slot, memory = held_slot(ring)
    child = Child()
    del memory
    assert ring.acquire(1) is slot
    child.end()
    ring.close()


def test_a_forked_process_fills_slots_of_its_own() -> None:
    ring = Ring(create, 1 << 20)
    slot, memory = held_slot(ring)
    del memory
    ring.acquire(1)
    ring.release(slot)

    def fill() -> int:
        mine = ring.acquire(1)
        assert mine is not None
        np.frombuffer(mine.memory, np.uint8)[:] = 7
        ring.release(mine)
        return mine.nbytes

    child = Child(fill)
    child.end()
    assert child.result > 0
    assert not np.frombuffer(slot.memory, np.uint8)[:100].any()
    ring.close()
