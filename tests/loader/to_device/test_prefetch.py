"""On the simulated device, hypothesis chooses what runs when: no byte is ever wrong, and every guard is needed.

The last test takes out one guard after the other and demands that the same property then fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from penstock.core.shared_segment import PrivateSegment
from penstock.device import Sim
from penstock.device.base import CompletedEvent
from penstock.loader.counters import Counters
from penstock.loader.to_device.copy_plan import CopyPlan, InSlot, is_copyable
from penstock.loader.to_device.prefetch import Prefetcher
from penstock.loader.transport import codec
from penstock.loader.transport.arena import Arena
from penstock.loader.transport.envelope_plan import EnvelopePlan
from penstock.loader.transport.ring import MOST_PENDING, Ring

pytestmark = pytest.mark.slow

NBYTES = 4096
Draw = Callable[[int], int]


def plan_of(batch: Callable[[Arena], Any], nbytes: int = 1 << 20) -> CopyPlan:
    """Return how batches like the one that `batch` makes in an arena are copied."""
    arena = Arena(np.empty(nbytes, np.uint8))
    return CopyPlan(EnvelopePlan(codec.encode(batch(arena), arena)))


PLAN = plan_of(lambda arena: {"x": arena.tensor((NBYTES,), torch.uint8)})


class Producer:
    """Host batches of one tensor each, filled with their number, in slots of a ring that are used again at once.

    Some come as they lie in their slot, some as views of it.
    """

    def __init__(self, ring: Ring, draw: Draw, batches: int) -> None:
        self._ring, self._draw, self._left = ring, draw, batches
        self.number = 0

    def next_batch(self) -> Any:
        if not self._left:
            raise StopIteration
        self._left -= 1
        self.number += 1
        slot = self._ring.acquire(2)
        assert slot is not None
        np.frombuffer(slot.memory, np.uint8)[:NBYTES] = self.number
        self._ring.commit(slot, NBYTES)
        if self._draw(1):
            return InSlot(PLAN, slot, self._ring)
        return {"x": torch.from_numpy(self._ring.lend(slot)[:NBYTES])}

    def try_next(self) -> tuple[Any] | None:
        return (self.next_batch(),) if self._draw(3) else None


def shuffle(sim: Sim, draw: Draw) -> None:
    """Let the device get on with its work, in some order, for a while."""
    for _ in range(draw(6)):
        runnable = sim.runnable()
        if runnable:
            sim.step(runnable[draw(len(runnable) - 1)])


class Programs:
    """What a program calls penstock in: threads, each with a current stream of its own; one is this thread."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._others = [ThreadPoolExecutor(1) for _ in range(1, threads)]

    def begin(self, sim: Sim) -> None:
        for number, other in enumerate(self._others):
            other.submit(setattr, sim, "consumer", sim.stream(str(number))).result()

    def call(self, number: int, function: Callable[[], Any]) -> Any:
        """Call it in thread `number`."""
        return function() if number == 0 else self._others[number - 1].submit(function).result()

    def close(self) -> None:
        for other in self._others:
            other.shutdown()


def drive_prefetch(
    draw: Draw,
    sim_type: type[Sim],
    prefetcher_type: type[Prefetcher],
    ring_type: type[Ring] = Ring,
    *,
    streams: int = 1,
    programs: Programs | None = None,
) -> None:
    """Run epochs, some broken off, with a consumer whose kernels lag behind; check every byte that a kernel read.

    With several streams, each batch is asked for and used on any of them; with several threads, in any of them, each
    with a stream of its own.
    """
    sim = sim_type(by_hand=True, eager=False)
    programs = programs or Programs(1)
    programs.begin(sim)
    consumers = [sim.consumer, *(sim.stream(str(number)) for number in range(1, streams))]
    ring = ring_type(PrivateSegment, 1 << 30, pin=sim.register)
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
        )
        number, last = 0, draw(7)
        while number != last:
            if streams > 1:
                sim.consumer = consumers[draw(streams - 1)]
            thread = draw(programs.threads - 1) if programs.threads > 1 else 0
            batch = programs.call(thread, functools.partial(next_or_none, prefetcher))
            if batch is None:
                break
            number += 1
            programs.call(thread, functools.partial(sim.launch, kernel(batch["x"], number)))
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


drive_streams = functools.partial(drive_prefetch, streams=2)


def next_or_none(prefetcher: Prefetcher) -> Any:
    try:
        return prefetcher.next_batch()
    except StopIteration:
        return None


def kernel_write(tensor: torch.Tensor, value: int) -> Callable[[], None]:
    address = tensor.data_ptr()
    return lambda: ctypes.memset(address, value, NBYTES) and None


def drive_user_copies(
    draw: Draw, sim_type: type[Sim], prefetcher_type: type[Prefetcher], ring_type: type[Ring] = Ring
) -> None:
    """Have the user copy pinned batches to two devices on streams of their own, and drop them; check what arrives."""
    sim = sim_type(by_hand=True, eager=False)
    other = Sim(beside=sim, eager=False)
    ring = ring_type(PrivateSegment, 1 << 30, pin=sim.register, fence=sim.fence)
    targets = [(sim, sim.consumer), (sim, sim.stream("a")), (sim, sim.stream("b")), (other, other.consumer)]
    producer = Producer(ring, lambda _: 0, batches=8)
    arrived: list[tuple[int, torch.Tensor]] = []
    for number in range(1, 9):
        batch = producer.next_batch()
        for _ in range(1 + draw(1)):
            device, stream = targets[draw(3)]
            arrived.append((number, device.to(batch["x"], stream)))
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
    drive: Callable[[Draw, type[Sim], type[Prefetcher], type[Ring]], object],
    sim_type: type[Sim] = BatchSim,
    prefetcher_type: type[Prefetcher] = Prefetcher,
    ring_type: type[Ring] = Ring,
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
        drive(lambda most: data.draw(st.integers(0, most)), sim_type, prefetcher_type, ring_type)

    whatever_happens()


def test_no_byte_is_wrong_and_no_slot_is_used_early() -> None:
    holds(drive_prefetch)


def test_a_batch_may_be_used_on_another_stream_than_the_one_before() -> None:
    holds(drive_streams)


class UsesAreForgotten(BatchSim):
    """Reuses memory as soon as the stream that it was allocated on is through with it."""

    def record_use(self, tensor: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize(("sim_type", "is_right"), [(BatchSim, True), (UsesAreForgotten, False)])
def test_threads_with_streams_of_their_own_may_take_turns(sim_type: type[Sim], is_right: bool) -> None:
    with contextlib.closing(Programs(2)) as programs:  # hypothesis draws in one thread only
        for seed in range(100):
            random = Random(seed)
            drive = functools.partial(drive_prefetch, functools.partial(random.randint, 0), sim_type, Prefetcher)
            try:
                drive(programs=programs)
            except AssertionError:
                assert not is_right
                return
    assert is_right


def test_no_copy_that_the_user_started_is_overtaken() -> None:
    holds(drive_user_copies)


class Broken(BatchSim):
    """A device whose context a kernel of the program has broken."""

    is_broken = False

    def upload(self, copies: Any, after: Any) -> Any:
        if self.is_broken:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        return super().upload(copies, after)

    def _record(self, stream: Any) -> Any:
        event = super()._record(stream)
        event.synchronize = self._fail_if_broken  # type: ignore[method-assign]
        return event

    def _fail_if_broken(self) -> None:
        if self.is_broken:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def test_a_broken_device_is_said_to_be_the_programs_and_everything_is_closed() -> None:
    sim = Broken(by_hand=True, eager=False)  # so that the first copy is under way until the end
    ring = Ring(PrivateSegment, 1 << 30, pin=sim.register)
    prefetcher = Prefetcher(Producer(ring, lambda most: 0, 5), sim, budget_nbytes=1 << 20, counters=Counters())
    prefetcher.next_batch()
    sim.is_broken = True
    with pytest.raises(torch.AcceleratorError) as caught:
        prefetcher.next_batch()
    assert "was started by the program before" in caught.value.__notes__[0]
    prefetcher.close()
    assert not prefetcher.in_flight.leaving
    ring.close()


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


class FenceOfOneDevice(BatchSim):
    """Fences the streams of the device that is current alone."""

    def fence(self) -> Any:
        if self.capturing:
            return None
        others = ("default", "up", "down")
        own = [stream for stream in self._engine.streams if stream.name not in others]
        return self._engine.record([self._default, self._up, self._down, *own])


class DropsHostBatchAtOnce(Prefetcher):
    """Lets a slot go while its copy still reads it."""

    def _drop_finished(self) -> None:
        self._leaving.clear()


class DropsWhatArrives(Prefetcher):
    """Gives back memory at the end of a broken epoch without waiting for what is still written to it."""

    def close(self) -> None:
        while self._arriving:
            host = self._arriving.popleft().host
            if type(host) is InSlot:
                host.ring.release(host.slot)
        self._reserved = None
        while self._leaving:
            self._leaving.popleft()[1].synchronize()


class FreesSlotsAtOnce(Ring):
    """Lets a slot go while its copy still reads it."""

    def free_after(self, slot: Any, event: Any) -> None:
        self.release(slot)


@pytest.mark.parametrize(
    ("drive", "sim_type", "prefetcher_type", "ring_type"),
    [
        pytest.param(drive_prefetch, UploadDoesNotWait, Prefetcher, Ring, id="upload does not wait for the consumer"),
        pytest.param(drive_prefetch, ConsumerDoesNotWait, Prefetcher, Ring, id="consumer does not wait for the upload"),
        pytest.param(drive_streams, UsesAreForgotten, Prefetcher, Ring, id="no use of another stream recorded"),
        pytest.param(drive_prefetch, BatchSim, DropsHostBatchAtOnce, Ring, id="host batch dropped before its copy"),
        pytest.param(drive_prefetch, BatchSim, Prefetcher, FreesSlotsAtOnce, id="slot freed before its copy"),
        pytest.param(drive_prefetch, BatchSim, DropsWhatArrives, Ring, id="destination dropped before its copy"),
        pytest.param(drive_user_copies, NoFence, Prefetcher, Ring, id="no fence"),
        pytest.param(drive_user_copies, FenceOfOneStream, Prefetcher, Ring, id="a fence of one stream"),
        pytest.param(drive_user_copies, FenceOfOneDevice, Prefetcher, Ring, id="a fence of one device"),
    ],
)
def test_without_any_one_guard_a_wrong_byte_is_found(
    drive: Callable[..., None], sim_type: type[Sim], prefetcher_type: type[Prefetcher], ring_type: type[Ring]
) -> None:
    with pytest.raises(AssertionError):
        holds(drive, sim_type, prefetcher_type, ring_type, examples=2000, phases=(Phase.generate,))


# ── how far the host runs ahead ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("way", ["in slots", "views", "pinned"])
def test_a_host_with_nothing_else_to_do_is_at_most_six_steps_ahead(way: str) -> None:
    sim = BatchSim(by_hand=True, eager=False)  # the device works only when it is waited for
    ring = Ring(PrivateSegment, 1 << 30, pin=sim.register, fence=sim.fence if way == "pinned" else None)
    producer = Producer(ring, lambda most: int(way == "in slots" or most == 3), 40)
    batches: Any = Prefetcher(producer, sim, budget_nbytes=1 << 20, counters=Counters())
    done: list[int] = []
    for step in range(40):
        if way == "pinned":
            sim.to(producer.next_batch()["x"])
        else:
            batches.next_batch()
        assert step - len(done) <= 6
        sim.launch(functools.partial(done.append, step))
    counts = ring.counts()
    assert counts.copying <= MOST_PENDING + 1
    assert counts.free + counts.filling + counts.ready + counts.held + counts.copying <= 10
    batches.close()
    ring.close()


# ── plans ───────────────────────────────────────────────────────────────────────────────────────────────────


def copied(plan: CopyPlan, memory: np.ndarray) -> Any:
    """Return the batch that a device has when the parts of `memory` have been copied."""
    sim = Sim()
    there = [sim.empty(spec) for spec in plan.specs]
    sim.upload_parts(there, memory.ctypes.data, plan.parts, sim.record_event()).synchronize()
    return plan.build(there)


def filled(arena: Arena, size: tuple[int, ...], value: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return arena.tensor(size, dtype).fill_(value)


def test_many_small_tensors_are_copied_together_and_are_separate_ones_there() -> None:
    arena = Arena(np.empty(1 << 20, np.uint8))
    dtypes = torch.float32, torch.int64, torch.bool, torch.float16
    batch: Any = {str(k): filled(arena, (3, 5 + k), k, dtypes[k % 4]) for k in range(12)}
    batch = {"large": filled(arena, (100, 200), 50), "small": batch, "word": "x"}
    plan = CopyPlan(EnvelopePlan(codec.encode(batch, arena)))
    assert [spec.size.numel() > 1000 for spec in plan.specs] == [True, True]
    there = copied(plan, arena.memory)
    assert (there["large"] == 50).all()
    assert there["word"] == "x"
    for name, tensor in there["small"].items():
        assert torch.equal(tensor, batch["small"][name])
        assert tensor.dtype is batch["small"][name].dtype
    before = there["small"]["1"]._version
    there["small"]["0"].add_(1)
    assert there["small"]["1"]._version == before
    assert there["small"]["1"]._base is None


def test_the_order_of_dimensions_is_kept() -> None:
    def batch(arena: Arena) -> list[torch.Tensor]:
        image = filled(arena, (4, 8, 8, 3), 1).permute(0, 3, 1, 2)
        return [image, filled(arena, (60, 70), 2).t(), filled(arena, (5, 1), 3)]

    arena = Arena(np.empty(1 << 20, np.uint8))
    ours = batch(arena)
    there = copied(CopyPlan(EnvelopePlan(codec.encode(ours, arena))), arena.memory)
    for one, other in zip(there, ours, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == torch.empty_like(other, device="meta").stride()


@pytest.mark.parametrize(
    "batch",
    [
        lambda arena: [filled(arena, (50, 50), 1).requires_grad_()],
        lambda arena: [filled(arena, (100, 100), 1)[:, ::2]],
        lambda arena: [torch.empty(0)],
        lambda arena: {"image": filled(arena, (100, 100), 1), "boxes": [torch.empty(0, 4)]},
        lambda arena: "a word",
    ],
)
def test_what_bytes_alone_do_not_copy_is_opened_on_the_host(batch: Callable[[Arena], Any]) -> None:
    arena = Arena(np.empty(1 << 20, np.uint8))
    made = batch(arena)
    envelope = codec.encode(made, arena)
    assert not codec.description_nbytes(envelope) or not is_copyable(EnvelopePlan(envelope))
