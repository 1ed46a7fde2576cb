"""On the simulated device, hypothesis chooses what runs when: no byte is ever wrong, and every guard is needed.

The last test takes out one guard after the other and demands that the same property then fails.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from penstock.device import Sim
from penstock.device.base import CompletedEvent
from penstock.loader.counters import Counters
from penstock.loader.to_device.prefetch import Prefetcher
from penstock.loader.to_device.prefetch_depth import DepthTrial
from penstock.loader.transport.ring import Ring
from penstock.loader.transport.shared_segment import PrivateSegment

pytestmark = pytest.mark.slow

NBYTES = 4096
Draw = Callable[[int], int]


class Producer:
    """Host batches of one tensor each, filled with their number, in slots of a ring that are used again at once."""

    def __init__(self, ring: Ring, draw: Draw, batches: int) -> None:
        self._ring, self._draw, self._left = ring, draw, batches
        self.number = 0

    def next_batch(self) -> dict[str, torch.Tensor]:
        if not self._left:
            raise StopIteration
        self._left -= 1
        self.number += 1
        slot = self._ring.acquire(2)
        assert slot is not None
        np.frombuffer(slot.memory, np.uint8)[:NBYTES] = self.number
        self._ring.commit(slot, NBYTES)
        return {"x": torch.from_numpy(self._ring.lend(slot)[:NBYTES])}

    def try_next(self) -> tuple[dict[str, torch.Tensor]] | None:
        return (self.next_batch(),) if self._draw(3) else None


class AnyDepth(DepthTrial):
    """Copies none, one or two batches ahead, as it likes."""

    def step(self, settle: Callable[[], object]) -> None:
        self.depth = int(self._clock()) % 3


def shuffle(sim: Sim, draw: Draw) -> None:
    """Let the device get on with its work, in some order, for a while."""
    for _ in range(draw(6)):
        runnable = sim.runnable()
        if runnable:
            sim.step(runnable[draw(len(runnable) - 1)])


def drive_prefetch(draw: Draw, sim_type: type[Sim], prefetcher_type: type[Prefetcher]) -> None:
    """Run epochs, some broken off, with a consumer whose kernels lag behind; check every byte that a kernel read."""
    sim = sim_type(by_hand=True, eager=False)
    ring = Ring(PrivateSegment, 1 << 30, pin=sim.register)
    read: list[tuple[int, int]] = []

    def kernel(tensor: torch.Tensor, number: int) -> Callable[[], None]:
        address = tensor.data_ptr()  # as a kernel has it: an address, which keeps nothing alive
        return lambda: read.append((number, max(ctypes.string_at(address, NBYTES)) if address else 0))

    for _ in range(2):
        producer = Producer(ring, draw, batches=1 + draw(5))
        prefetcher = prefetcher_type(
            producer,
            sim,
            budget_nbytes=draw(2) * NBYTES,
            counters=Counters(),
            trial=AnyDepth(2, lambda: float(draw(3))),
        )
        number, last = 0, draw(7)
        while number != last:
            try:
                batch = prefetcher.next_batch()
            except StopIteration:
                break
            number += 1
            sim.launch(kernel(batch["x"], number))
            del batch
            shuffle(sim, draw)
        prefetcher.close()
        del prefetcher, producer
        gc.collect(0)
        scratch = sim.empty_like_batch() if draw(1) else None
        if scratch is not None:
            sim.launch(kernel_write(scratch, 99))
            sim.launch(kernel(scratch, 99))
            del scratch
        shuffle(sim, draw)
    sim.synchronize()
    assert all(number == value for number, value in read), read
    ring.close()


def kernel_write(tensor: torch.Tensor, value: int) -> Callable[[], None]:
    address = tensor.data_ptr()
    return lambda: ctypes.memset(address, value, NBYTES) and None


def drive_user_copies(draw: Draw, sim_type: type[Sim], prefetcher_type: type[Prefetcher]) -> None:
    """Have the user copy pinned batches on streams of their own, and drop them at once; check what arrives."""
    sim = sim_type(by_hand=True, eager=False)
    ring = Ring(PrivateSegment, 1 << 30, pin=sim.register, fence=sim.fence)
    streams = [sim.consumer, sim.stream("a"), sim.stream("b")]
    producer = Producer(ring, draw, batches=8)
    arrived: list[tuple[int, torch.Tensor]] = []
    for number in range(1, 9):
        batch = producer.next_batch()
        arrived += [(number, sim.to(batch["x"], streams[draw(2)])) for _ in range(1 + draw(1))]
        del batch
        sim.capturing = draw(3) == 0
        shuffle(sim, draw)
    sim.capturing = False
    sim.synchronize()
    assert all(bool((tensor == number).all()) for number, tensor in arrived)
    ring.close()


class BatchSim(Sim):
    """A simulator that a user allocates memory of a batch's size from."""

    def empty_like_batch(self) -> torch.Tensor:
        from penstock.device import TensorSpec

        return self.empty(TensorSpec.of(torch.empty(NBYTES, dtype=torch.uint8)))


def holds(
    drive: Callable[[Draw, type[Sim], type[Prefetcher]], None],
    sim_type: type[Sim] = BatchSim,
    prefetcher_type: type[Prefetcher] = Prefetcher,
    *,
    examples: int = 300,
    phases: tuple[Phase, ...] = tuple(Phase),
) -> None:
    """Assert that `drive` finds no wrong byte, whatever hypothesis tries."""

    @settings(
        max_examples=examples,
        phases=phases,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(st.data())
    def whatever_happens(data: Any) -> None:
        drive(lambda most: data.draw(st.integers(0, most)), sim_type, prefetcher_type)

    whatever_happens()


def test_no_byte_is_wrong_and_no_slot_is_used_early() -> None:
    holds(drive_prefetch)


def test_no_copy_that_the_user_started_is_overtaken() -> None:
    holds(drive_user_copies)


# ── mutants: each takes out one guard ───────────────────────────────────────────────────────────────────────


class UploadDoesNotWait(BatchSim):
    """Overwrites memory that earlier kernels, or the poison, still use."""

    def upload(self, copies: Any, after: Any) -> Any:
        return super().upload(copies, CompletedEvent())


class ConsumerDoesNotWait(BatchSim):
    """Hands out a batch that has not arrived."""

    def wait_event(self, event: Any) -> None:
        pass


class NoFence(BatchSim):
    """Frees a slot when its last view dies."""

    def fence(self) -> Any:
        return CompletedEvent()


class FenceOfOneStream(BatchSim):
    """Fences the consumer's stream alone."""

    def fence(self) -> Any:
        return self._record(self.consumer)


class DropsHostBatchAtOnce(Prefetcher):
    """Lets a slot go while its copy still reads it."""

    def _drop_finished(self) -> None:
        self._leaving.clear()


class DropsWhatArrives(Prefetcher):
    """Gives back memory at the end of a broken epoch without waiting for what is still written to it."""

    def close(self) -> None:
        self._arriving.clear()
        self._reserved = None
        while self._leaving:
            self._leaving.popleft()[1].synchronize()


@pytest.mark.parametrize(
    ("drive", "sim_type", "prefetcher_type"),
    [
        pytest.param(drive_prefetch, UploadDoesNotWait, Prefetcher, id="upload does not wait for the consumer"),
        pytest.param(drive_prefetch, ConsumerDoesNotWait, Prefetcher, id="consumer does not wait for the upload"),
        pytest.param(drive_prefetch, BatchSim, DropsHostBatchAtOnce, id="host batch dropped before its copy"),
        pytest.param(drive_prefetch, BatchSim, DropsWhatArrives, id="destination dropped before its copy"),
        pytest.param(drive_user_copies, NoFence, Prefetcher, id="no fence"),
        pytest.param(drive_user_copies, FenceOfOneStream, Prefetcher, id="a fence of one stream"),
    ],
)
def test_without_any_one_guard_a_wrong_byte_is_found(
    drive: Callable[..., None], sim_type: type[Sim], prefetcher_type: type[Prefetcher]
) -> None:
    with pytest.raises(AssertionError):
        holds(drive, sim_type, prefetcher_type, examples=2000, phases=(Phase.generate,))
