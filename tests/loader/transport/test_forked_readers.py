"""Memory that a forked process may read is not written to, and comes back when the process has ended."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.core.shared_segment import PrivateSegment, create
from penstock.loader.transport.forked_readers import ForkedReaders
from penstock.loader.transport.ring import Ring
from penstock.loader.transport.slot import Slot, SlotState

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


def test_a_slot_that_was_held_at_a_fork_is_free_when_all_who_may_read_it_have_ended() -> None:
    ring = Ring(create, 1 << 20)
    slot, memory = held_slot(ring)
    children = [Child(), Child()]
    del memory
    for child in children:
        assert ring.acquire(1) is not slot
        assert slot.state is SlotState.HELD
        child.end()
    assert ring.acquire(1) is slot
    ring.close()


def test_a_slot_that_is_held_through_several_forks_waits_for_all_of_them() -> None:
    ring = Ring(create, 1 << 20)
    slot, memory = held_slot(ring)
    first = Child()
    assert slot.is_read_by_forks()  # who is forked from now on joins others
    second = Child()
    del memory
    first.end()
    assert ring.acquire(1) is not slot
    second.end()
    assert ring.acquire(1) is slot
    ring.close()


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


def test_readers_are_told_apart_by_when_they_were_forked() -> None:
    nobody = ForkedReaders()
    assert nobody.have_gone()
    child = Child()  # too late to be one of them
    assert nobody.have_gone()
    child.end()
