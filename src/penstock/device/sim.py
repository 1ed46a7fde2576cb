"""Sim: a simulated accelerator with streams, events, a caching allocator, slow copies, and faults.

Its memory is host memory. What is allocated is poisoned, in stream order, and a copy moves its bytes only when the copy
engine runs it. So wrong bytes show that a batch was used before its event had passed, that a destination was
overwritten while a kernel still read it, or that a slot was refilled while a copy still read it. Copies from memory
that is not registered are staged when they are submitted, as the CUDA driver does, so a refill cannot change them.

    >>> import torch
    >>> from penstock.device import Sim
    >>> gpu = Sim(bandwidth=1e9, delay_s=1e-4)
    >>> there = gpu.to(torch.arange(3))       # submitted, not done
    >>> gpu.synchronize()
    >>> there
    tensor([0, 1, 2])

Operations on one stream run in order; those of different streams in any order. By default a thread runs them as time
passes. With `by_hand=True` nothing runs until the test calls `step`, in an order that the test chooses (hypothesis).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from penstock.core.units import round_up, size_text, to_nbytes
from penstock.device.base import CopyPairs, Event, TensorSpec

POISON = 0xA5
"""The byte that fills memory before it is written to."""

_BLOCK = 512
_IDLE_S = 0.2
"""The engine's thread ends after this time without an operation; the next operation starts another."""


@dataclass(eq=False)
class _Operation:
    run: Callable[[], None]
    ready: Callable[[], bool]
    seconds: float = 0.0


@dataclass(eq=False)
class SimStream:
    """Operations that run one after another."""

    name: str
    queue: deque[_Operation] = field(default_factory=deque)


class SimEvent:
    """Passes when the operation that records it runs; see `base.Event`."""

    def __init__(self, sim: Sim, parts: int = 1) -> None:
        self._sim = sim
        self._left = parts

    def query(self) -> bool:
        """Return whether it has passed."""
        return self._left <= 0

    def synchronize(self) -> None:
        """Wait until it has passed."""
        self._sim._wait(self.query)

    def _pass(self) -> None:
        self._left -= 1


class Sim:
    """A simulated accelerator; see `base.Device` and the top of this file.

    Args:
        bandwidth: bytes per second of its link; None for an infinite one.
        delay_s: seconds that every copy takes in addition.
        capacity_nbytes: the most memory it has; beyond it an allocation raises `torch.OutOfMemoryError`.
        pinnable_nbytes: the most host memory that may be registered; beyond it registration is refused.
        has_fence: whether `fence` works, as it does with new drivers only.
        numa_node: the NUMA node that it reports.
        by_hand: whether operations run only in `step`.
        eager: whether kernels are host code that runs immediately, as operations of torch on these tensors are. Then
            `wait_event` blocks the host. Without it, kernels are what is passed to `launch`.
    """

    is_host = False

    def __init__(
        self,
        *,
        bandwidth: float | None = None,
        delay_s: float = 0.0,
        capacity_nbytes: int | str | None = None,
        pinnable_nbytes: int | str | None = None,
        has_fence: bool = True,
        numa_node: int | None = None,
        by_hand: bool = False,
        eager: bool = True,
    ) -> None:
        self.name = "sim"
        self.torch_device = torch.device("cpu")
        self.has_fence = has_fence
        self.numa_node = numa_node
        self.consumer = SimStream("consumer")
        """The stream that is current. A program may set another one."""
        self.capturing = False
        """Set it to simulate a capture: then `fence` returns None, and calls must be made in `outside_capture`."""
        self._is_outside_capture = False
        self._bandwidth = bandwidth
        self._delay_s = delay_s
        self._capacity = None if capacity_nbytes is None else to_nbytes("capacity_nbytes", capacity_nbytes)
        self._pinnable = None if pinnable_nbytes is None else to_nbytes("pinnable_nbytes", pinnable_nbytes)
        self._by_hand = by_hand
        self._eager = eager
        self._up, self._down = SimStream("up"), SimStream("down")
        self._streams = [self.consumer, self._up, self._down]
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._registered: dict[int, memoryview] = {}
        self._error: BaseException | None = None
        self._numbers = itertools.count()
        self._blocks: dict[tuple[int, int], list[np.ndarray]] = {}
        """Free memory, by the stream that it was allocated on and its size."""
        self._uses: dict[int, list[SimStream]] = {}
        """Other streams that use memory, by its address."""
        self._in_use: list[tuple[list[SimEvent], tuple[int, int], np.ndarray]] = []
        """Memory that has been dropped, and is free when these events have passed."""
        self._nbytes = 0
        self._allocations = 0
        self._failing: set[int] = set()
        self.counts: Counter[str] = Counter()
        """How often: "copies", "staged", "registered", "refused", "fences"."""

    # ── the protocol ────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def outside_capture(self) -> Iterator[None]:
        """Allow calls during a capture; wait for them at the end, if there is one."""
        self._is_outside_capture = True
        try:
            yield
            if self.capturing:
                self._record(self.consumer).synchronize()
        finally:
            self._is_outside_capture = False

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """Return poisoned memory, from a freed block of that size if there is one."""
        if spec.nbytes == 0:
            return torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype)
        nbytes = round_up(spec.nbytes, _BLOCK)
        memory = self._take_block(nbytes)
        view = memory[:]  # the tensor keeps this one alive; the block is given back when it dies
        weakref.finalize(view, self._give_back, (id(self.consumer), nbytes), memory).atexit = False
        self._submit(self.consumer, lambda: memory.fill(POISON))
        flat = torch.frombuffer(view, dtype=spec.dtype, count=spec.size.numel())
        return flat.as_strided(spec.size, spec.stride)

    def current_stream(self) -> SimStream:
        """Return `consumer`."""
        return self.consumer

    def record_use(self, tensor: torch.Tensor) -> None:
        """Free the memory, when it is dropped, only after what `consumer` has been given by then."""
        if tensor.nbytes:
            self._uses.setdefault(tensor.data_ptr(), []).append(self.consumer)

    def record_event(self) -> SimEvent:
        """Return an event on the consumer's stream."""
        self._check_not_captured()
        return self._record(self.consumer)

    def upload(self, copies: CopyPairs, after: Event) -> SimEvent:
        """Copy on the upload stream once `after` has passed."""
        self._check_not_captured()
        self._submit_wait(self._up, after)
        return self._copy(self._up, copies)

    def download(self, copies: CopyPairs) -> SimEvent:
        """Copy on the download stream, after what the consumer's stream has."""
        self._submit_wait(self._down, self.record_event())
        for destination, _ in copies:
            ctypes.memset(destination.data_ptr(), POISON, destination.nbytes)
        return self._copy(self._down, copies)

    def wait_event(self, event: Event) -> None:
        """Make the consumer's stream wait; with `eager`, the host as well."""
        self._check_not_captured()
        self._submit_wait(self.consumer, event)
        if self._eager:
            self.record_event().synchronize()

    def register(self, memory: memoryview) -> SimRegistration | None:
        """Let copies read this memory when the engine runs them, rather than when they are submitted."""
        taken = sum(map(len, self._registered.values()))
        if self._pinnable is not None and taken + len(memory) > self._pinnable:
            self.counts["refused"] += 1
            return None
        self.counts["registered"] += 1
        number = next(self._numbers)
        self._registered[number] = memory
        return SimRegistration(self._registered, number)

    def fence(self) -> SimEvent | None:
        """Return an event after everything on every stream; None during a capture, or without `has_fence`."""
        if self.capturing or not self.has_fence:
            return None
        self.counts["fences"] += 1
        with self._changed:
            event = SimEvent(self, parts=len(self._streams))
            for stream in self._streams:
                self._submit(stream, event._pass)
        return event

    # ── what a user's program does on a device ──────────────────────────────────────────────────────────────

    def stream(self, name: str = "user") -> SimStream:
        """Return a new stream."""
        with self._changed:
            self._streams.append(SimStream(name))
            return self._streams[-1]

    def to(self, tensor: torch.Tensor, stream: SimStream | None = None) -> torch.Tensor:
        """Start a copy of a host tensor to the device (`non_blocking`) and return where it will be."""
        there = self.empty(TensorSpec.of(tensor))
        stream = stream or self.consumer
        if stream is not self.consumer:
            self._submit_wait(stream, self._record(self.consumer))
        self._copy(stream, [(there, tensor)])
        return there

    def launch(self, kernel: Callable[[], None], stream: SimStream | None = None) -> None:
        """Submit a kernel: `kernel()` runs in its turn on the stream."""
        self._submit(stream or self.consumer, kernel)

    def synchronize(self) -> None:
        """Wait until all submitted operations are done."""
        for stream in list(self._streams):
            self._record(stream).synchronize()

    def fail_allocations(self, *numbers: int) -> None:
        """Make the allocations with these numbers, counted from the next one as 0, raise `torch.OutOfMemoryError`."""
        self._failing = {self._allocations + number for number in numbers}

    # ── by hand ─────────────────────────────────────────────────────────────────────────────────────────────

    def runnable(self) -> list[SimStream]:
        """Return the streams whose next operation could run now."""
        with self._changed:
            return [stream for stream in self._streams if stream.queue and stream.queue[0].ready()]

    def step(self, stream: SimStream | None = None) -> bool:
        """Run one operation, of `stream` or of any; return whether there was one."""
        with self._changed:
            ready = self.runnable() if stream is None else [one for one in self.runnable() if one is stream]
            if not ready:
                return False
            ready[0].queue.popleft().run()
            return True

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _check_not_captured(self) -> None:
        if self.capturing and not self._is_outside_capture:
            raise RuntimeError("sim: operation not permitted when stream is capturing")

    def _give_back(self, key: tuple[int, int], memory: np.ndarray) -> None:
        events = [self._record(stream) for stream in self._uses.pop(memory.ctypes.data, ())]
        self._in_use.append((events, key, memory))

    def _take_block(self, nbytes: int) -> np.ndarray:
        number = self._allocations
        self._allocations += 1
        in_use, self._in_use = self._in_use, []
        for dropped in in_use:
            events, key, memory = dropped
            if all(event.query() for event in events):
                self._blocks.setdefault(key, []).append(memory)
            else:
                self._in_use.append(dropped)
        free = self._blocks.get((id(self.consumer), nbytes))
        fits = self._capacity is None or self._nbytes + nbytes <= self._capacity
        if not free and not fits:
            self.synchronize()  # as returning blocks to the driver does
            self._nbytes -= sum(size * len(blocks) for (_, size), blocks in self._blocks.items())
            self._nbytes -= sum(size for _, (_, size), _ in self._in_use)
            self._blocks.clear()
            self._in_use.clear()
            fits = self._capacity is None or self._nbytes + nbytes <= self._capacity
        if number in self._failing or not (free or fits):
            raise torch.OutOfMemoryError(
                f"sim out of memory: tried to allocate {size_text(nbytes)} of {size_text(self._capacity or 0)}, "
                f"{size_text(self._nbytes)} in use"
            )
        if free:
            return free.pop()
        self._nbytes += nbytes
        return np.full(nbytes, POISON, np.uint8)

    def _copy(self, stream: SimStream, copies: CopyPairs) -> SimEvent:
        for destination, source in copies:
            self.counts["copies"] += 1
            keep: Any = None
            if source.stride() == destination.stride():
                keep = self._registration_of(source if stream is not self._down else destination)
            if keep is None:
                self.counts["staged"] += 1
                if stream is not self._down:
                    keep = source = torch.empty_strided(
                        destination.shape, destination.stride(), dtype=source.dtype
                    ).copy_(source)
            seconds = self._delay_s + (source.nbytes / self._bandwidth if self._bandwidth else 0.0)
            self._submit(stream, _copying(destination, source, keep), seconds=seconds)
        return self._record(stream)

    def _registration_of(self, tensor: torch.Tensor) -> memoryview | None:
        """Return the registered memory that contains a tensor."""
        address = tensor.data_ptr()
        for memory in list(self._registered.values()):
            start = np.frombuffer(memory, np.uint8).ctypes.data
            if start <= address < start + len(memory):
                return memory
        return None

    def _record(self, stream: SimStream) -> SimEvent:
        event = SimEvent(self)
        self._submit(stream, event._pass)
        return event

    def _submit_wait(self, stream: SimStream, event: Event) -> None:
        self._submit(stream, lambda: None, ready=event.query)

    def _submit(
        self,
        stream: SimStream,
        run: Callable[[], None],
        *,
        ready: Callable[[], bool] = lambda: True,
        seconds: float = 0.0,
    ) -> None:
        with self._changed:
            stream.queue.append(_Operation(run, ready, seconds))
            if not self._by_hand and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="penstock-sim", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _work(self) -> None:
        """Run operations as time passes, until there were none for `_IDLE_S`."""
        while True:
            with self._changed:
                if not self._changed.wait_for(self.runnable, timeout=_IDLE_S):
                    self._thread = None
                    return
                stream = self.runnable()[0]
                seconds = stream.queue[0].seconds
            if seconds:
                time.sleep(seconds)  # the link is busy; streams may be appended to meanwhile
            with self._changed:
                try:
                    stream.queue.popleft().run()
                except Exception as error:  # noqa: BLE001  a kernel's; raised by the next wait
                    self._error = self._error or error
                self._changed.notify_all()

    def _wait(self, passed: Callable[[], bool]) -> None:
        if not self._by_hand:
            with self._changed:
                self._changed.wait_for(lambda: passed() or self._error)
            if self._error is not None:
                raise self._error
            return
        while not passed():
            if not self.step():
                raise RuntimeError("this event can never pass: every stream waits for another one")


class SimRegistration:
    """Registered host memory; see `base.Registration`."""

    def __init__(self, registered: dict[int, memoryview], number: int) -> None:
        self._registered = registered
        self._number = number

    def close(self) -> None:
        """Remove the registration."""
        self._registered.pop(self._number, None)


def _copying(destination: torch.Tensor, source: torch.Tensor, keep: Any) -> Callable[[], None]:
    """Return an operation that copies. It keeps neither tensor alive, as a device does not."""
    to, of, nbytes = destination.data_ptr(), source.data_ptr(), destination.nbytes

    def run(_: Any = keep) -> None:
        ctypes.memmove(to, of, nbytes)

    return run
