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
`Sim(beside=gpu)` is another device of the same machine; each thread has a current stream of its own on each of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from penstock.core.units import round_up, size_text, to_nbytes
from penstock.device.base import CopyPairs, Event, Memory, Parts, TensorSpec, allocated, host_parts
from penstock.device.sim_engine import Engine, SimEvent, SimMark, SimStream

POISON = 0xA5
"""The byte that fills memory before it is written to."""

_BLOCK = 512


class Sim:
    """A simulated accelerator; see `base.Device` and the top of this file.

    Args:
        bandwidth: bytes per second of its link; None for an infinite one.
        delay_s: seconds that every copy takes in addition.
        capacity_nbytes: the most memory it has; beyond it an allocation raises `torch.OutOfMemoryError`.
        pinnable_nbytes: the most host memory that may be registered; beyond it registration is refused.
        has_fence: whether `fence` works, as it does with new drivers only.
        by_hand: whether operations run only in `step`.
        eager: whether kernels are host code that runs immediately, as operations of torch on these tensors are. Then
            `wait_event` blocks the host. Without it, kernels are what is passed to `launch`.
        beside: a device of the same machine, which runs this one's operations too (`by_hand` is as there).
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
        by_hand: bool = False,
        eager: bool = True,
        beside: Sim | None = None,
    ) -> None:
        self.name = "sim"
        self.torch_device = torch.device("cpu")
        self.has_fence = has_fence
        self.can_register = pinnable_nbytes is None or to_nbytes("pinnable_nbytes", pinnable_nbytes) > 0
        self._in_thread = threading.local()
        self._bandwidth = bandwidth
        self._delay_s = delay_s
        self._capacity = None if capacity_nbytes is None else to_nbytes("capacity_nbytes", capacity_nbytes)
        self._pinnable = None if pinnable_nbytes is None else to_nbytes("pinnable_nbytes", pinnable_nbytes)
        self._eager = eager
        self._engine: Engine = Engine(by_hand=by_hand) if beside is None else beside._engine
        self._default = self._engine.stream("default")
        self._up, self._down = self._engine.stream("up"), self._engine.stream("down")
        self._registered: dict[int, memoryview] = {} if beside is None else beside._registered
        self._numbers: Iterator[int] = itertools.count() if beside is None else beside._numbers
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

    @property
    def consumer(self) -> SimStream:
        """The stream that is current in this thread. A program may set another one."""
        found: SimStream = getattr(self._in_thread, "stream", self._default)
        return found

    @consumer.setter
    def consumer(self, stream: SimStream) -> None:
        self._in_thread.stream = stream

    @property
    def capturing(self) -> bool:
        """Whether this thread captures a graph. Set it; other calls must then be made in `outside_capture`."""
        return threading.get_ident() in self._engine.capturing

    @capturing.setter
    def capturing(self, is_on: bool) -> None:
        change = self._engine.capturing.add if is_on else self._engine.capturing.discard
        change(threading.get_ident())
        while self._engine.postponed and not self._engine.capturing:
            self._engine.postponed.popleft()()

    @property
    def captures_broken(self) -> int:
        """How many captures, of any thread, were broken by a call that waits for everything."""
        return self._engine.captures_broken

    # ── the protocol ────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def outside_capture(self) -> Iterator[None]:
        """Allow calls during a capture; wait for them at the end, if there is one."""
        self._in_thread.is_outside_capture = True
        try:
            yield
            if self.capturing:
                self._record(self.consumer).synchronize()
        finally:
            self._in_thread.is_outside_capture = False

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """Return poisoned memory, from a freed block of that size if there is one."""
        if spec.nbytes == 0:
            return torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype)
        nbytes = round_up(spec.nbytes, _BLOCK)
        memory = self._take_block(nbytes)
        view = memory[:]  # the tensor keeps this one alive; the block is given back when it dies
        weakref.finalize(view, self._give_back, (id(self.consumer), nbytes), memory).atexit = False
        self._engine.submit(self.consumer, lambda: memory.fill(POISON))
        flat = torch.frombuffer(view, dtype=spec.dtype, count=spec.size.numel())
        return flat.as_strided(spec.size, spec.stride)

    def allocate(self, specs: Sequence[TensorSpec]) -> Memory:
        """Return memory for several tensors."""
        return allocated(self, specs)

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

    def upload_parts(self, tensors: Sequence[torch.Tensor], address: int, parts: Parts, after: Event) -> SimEvent:
        """Copy on the upload stream once `after` has passed."""
        return self.upload([*zip(tensors, host_parts(tensors, address, parts), strict=True)], after)

    def mark(self) -> SimMark:
        """Return a mark on the consumer's stream."""
        self._check_not_captured()
        return self._engine.mark(self.consumer)

    def download(self, copies: CopyPairs) -> SimEvent:
        """Copy on the download stream, after what the consumer's stream has."""
        self._submit_wait(self._down, self.record_event())
        for destination, _ in copies:
            ctypes.memset(destination.data_ptr(), POISON, destination.nbytes)
        return self._copy(self._down, copies)

    def wait_event(self, event: Event) -> SimStream:
        """Make the consumer's stream wait; with `eager`, the host as well."""
        self._check_not_captured()
        self._submit_wait(self.consumer, event)
        if self._eager:
            self.record_event().synchronize()
        return self.consumer

    def register(self, memory: memoryview) -> SimRegistration | None:
        """Let copies read this memory when the engine runs them, rather than when they are submitted."""
        taken = sum(map(len, self._registered.values()))
        if self._pinnable is not None and taken + len(memory) > self._pinnable:
            self.counts["refused"] += 1
            return None
        self.counts["registered"] += 1
        number = next(self._numbers)
        self._registered[number] = memory
        return SimRegistration(self._registered, number, self._engine)

    def fence(self) -> SimEvent | None:
        """Return an event after everything on every device; None during any capture, or without `has_fence`."""
        if self._engine.capturing or not self.has_fence:
            return None
        self.counts["fences"] += 1
        return self._engine.record_all()

    # ── what a user's program does on a device ──────────────────────────────────────────────────────────────

    def stream(self, name: str = "user") -> SimStream:
        """Return a new stream."""
        return self._engine.stream(name)

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
        self._engine.submit(stream or self.consumer, kernel)

    def synchronize(self) -> None:
        """Wait until all submitted operations are done."""
        self._engine.record_all().synchronize()

    def fail_allocations(self, *numbers: int) -> None:
        """Make the allocations with these numbers, counted from the next one as 0, raise `torch.OutOfMemoryError`."""
        self._failing = {self._allocations + number for number in numbers}

    # ── by hand ─────────────────────────────────────────────────────────────────────────────────────────────

    def runnable(self) -> list[SimStream]:
        """Return the streams whose next operation could run now."""
        return self._engine.runnable()

    def step(self, stream: SimStream | None = None) -> bool:
        """Run one operation, of `stream` or of any; return whether there was one."""
        return self._engine.step(stream)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _check_not_captured(self) -> None:
        if self.capturing and not getattr(self._in_thread, "is_outside_capture", False):
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
            self._engine.submit(stream, _copying(destination, source, keep), seconds=seconds)
        return self._record(stream)

    def _registration_of(self, tensor: torch.Tensor) -> memoryview | None:
        """Return the registered memory that contains a tensor."""
        address = tensor.data_ptr()
        for memory in list(self._registered.values()):
            start = np.frombuffer(memory, np.uint8).ctypes.data
            if start <= address < start + len(memory):
                if address + tensor.nbytes > start + len(memory):  # CUDA driver API, cuMemcpy
                    raise RuntimeError("sim error: invalid argument: a copy of memory that is registered in part")
                return memory
        return None

    def _record(self, stream: SimStream) -> SimEvent:
        return self._engine.record([stream])

    def _submit_wait(self, stream: SimStream, event: Event) -> None:
        self._engine.submit(stream, lambda: None, ready=event.query)


class SimRegistration:
    """Registered host memory; see `base.Registration`."""

    def __init__(self, registered: dict[int, memoryview], number: int, engine: Engine) -> None:
        self._registered = registered
        self._number = number
        self._engine = engine

    def close(self) -> None:
        """Remove the registration when nothing reads it any more; after the captures that are under way."""
        if self._number not in self._registered:
            return
        if self._engine.capturing:
            self._engine.postponed.append(self.close)
            return
        self._engine.record_all().synchronize()
        self._registered.pop(self._number, None)


def _copying(destination: torch.Tensor, source: torch.Tensor, keep: Any) -> Callable[[], None]:
    """Return an operation that copies. It keeps neither tensor alive, as a device does not."""
    to, of, nbytes = destination.data_ptr(), source.data_ptr(), destination.nbytes

    def run(_: Any = keep) -> None:
        ctypes.memmove(to, of, nbytes)

    return run
