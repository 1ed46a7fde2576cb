"""Device, the protocol of what batches are copied to: asynchronous copies, and events that pass when they are done.

Two streams matter. The **consumer's** is the current stream of whoever iterates: the user's kernels run there, and
device memory is allocated there, so that torch's caching allocator may reuse it as soon as it is dropped.
The **side** stream is penstock's: copies run there while the consumer computes. Only events connect the two:

    consumer   ── step k-1 ──┬─ record_event() ── step k ────────────── wait_event(event) ── step k+1 ──
                              └──────────┐                                     │
    side                          waits ─┴─ upload of batch k+1 ── event ──────┘

The upload waits for everything submitted to the consumer's stream before the destination was allocated, because the
destination may be memory that a kernel of an earlier step still reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

CopyPairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(destination, source) pairs of equal size and dtype."""

Parts = Sequence[tuple[int, int]]
"""Where tensors lie in a slot, contiguous: the offset and the bytes of each."""


class TensorSpec(NamedTuple):
    """What is needed to allocate a tensor: its size, its strides in elements, its dtype."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of what `tensor.to(another_device)` returns: the order of dimensions is kept."""
        return cls(tensor.shape, torch.empty_like(tensor, device="meta").stride(), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of such a tensor."""
        return self.size.numel() * self.dtype.itemsize


class Event(Protocol):
    """A point in a device's streams, which passes when everything submitted before it is done.

    The thread that iterates queries and waits for events, any number of times and in any order. An error of the
    device is raised by `synchronize`. Whoever has it last closes it, once; a stream may still wait for it then.
    """

    def query(self) -> bool:
        """Return whether it has passed."""
        ...

    def synchronize(self) -> None:
        """Wait until it has passed."""
        ...

    def close(self) -> None:
        """Give it back: the device may record it again, for something else."""
        ...


class Mark(Protocol):
    """A point in a stream and the time when it was passed; `torch.Event` is one."""

    def query(self) -> bool:
        """Return whether it has passed."""
        ...

    def elapsed_time(self, later: Any) -> float:
        """Return the milliseconds from it to a later mark; both have passed."""
        ...


class Memory(NamedTuple):
    """Uninitialised memory on a device for the tensors of a batch."""

    tensors: list[torch.Tensor]
    free: Event
    """Behind everything that may still use it."""
    stream: object
    """The consumer's, that it was allocated on."""


class Registration(Protocol):
    """Page-locked host memory, which the device may read and write by itself.

    Its owner closes it once, after the last copy; closing it again does nothing.
    """

    def close(self) -> None:
        """Unlock the memory. No copy may still use it."""
        ...


class Device(Protocol):
    """Where batches are copied to. `Cpu`, `Accelerator`, `Cuda` and the test double `Sim` implement it.

    **Who calls**: only the training process. The thread that iterates a loader calls all methods but `fence`, which
    runs wherever the last view of a pinned slot dies, in any thread. A worker process never imports a device.

    **How often, in which order**: `register` once per shared segment, before copies from it, and its `close` when the
    loader ends. Then, per batch and within `outside_capture`: `allocate`, `upload` or `upload_parts` after
    its event, and, when the batch is handed out, `wait_event`; `record_use` as well if the consumer uses another
    stream by then. For results: `download`, whose event is waited for.

    **After a failure**: `empty` may raise `torch.OutOfMemoryError`; nothing has been submitted then, and the caller may
    drop other batches and call it again. `register` and `fence` return None when they are refused, and the caller uses
    pageable memory, or copies the batch. Any other exception ends the iteration; events and registrations that exist
    stay valid until they are closed.
    """

    name: str
    """As in "cuda:0"."""

    torch_device: torch.device
    """The device of its tensors."""

    is_host: bool
    """Whether device memory is host memory, so that no copy is needed."""

    has_fence: bool
    """Whether `fence` works, so that pinned slots may be lent to a user who makes the copies."""

    can_register: bool
    """Whether `register` can page-lock existing memory, if the system agrees."""

    def outside_capture(self) -> AbstractContextManager[object]:
        """Return a context whose calls are not part of a graph that is being captured. All other calls are made inside.

        Without a capture it does nothing. During one, copies that the consumer waits for inside are done at its end.
        """
        ...

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """Return uninitialised memory that the consumer's stream may use from now on.

        Raises:
            torch.OutOfMemoryError: there is not enough.
        """
        ...

    def allocate(self, specs: Sequence[TensorSpec]) -> Memory:
        """Return memory of `empty` for several tensors, an event after it, and the consumer's stream."""
        ...

    def current_stream(self) -> object:
        """Return the consumer's stream; two are equal if they are the same. A program may change it at any time."""
        ...

    def record_use(self, tensor: torch.Tensor) -> None:
        """Reuse the memory of `tensor`, when it has died, only after what the consumer's stream has been given by then.

        For memory of `empty` that is handed out on another stream than it was allocated on.
        """
        ...

    def record_event(self) -> Event:
        """Return an event after everything submitted to the consumer's stream so far."""
        ...

    def upload(self, copies: CopyPairs, after: Event) -> Event:
        """Copy host to device on the side stream once `after` has passed; return an event after the copies.

        `after` is used up: it may be the one that is returned.
        """
        ...

    def upload_parts(self, tensors: Sequence[torch.Tensor], address: int, parts: Parts, after: Event) -> Event:
        """As `upload`, to whole tensors from parts of a slot at `address`, which is page-locked, bytes as they lie."""
        ...

    def mark(self) -> Mark | None:
        """Return a mark of what the consumer's stream has been given so far; None where there are none."""
        ...

    def wait_event(self, event: Event) -> object:
        """Make the consumer's stream wait for `event` before what is submitted from now on; return that stream."""
        ...

    def download(self, copies: CopyPairs) -> Event:
        """Copy device to host after everything on the consumer's stream so far; return an event after the copies."""
        ...

    def register(self, memory: memoryview) -> Registration | None:
        """Page-lock host memory; None if the system refuses."""
        ...

    def fence(self) -> Event | None:
        """Return an event after everything on every stream; None if none can be recorded now."""
        ...


class CompletedEvent:
    """The event of a device on which every copy is done when it returns."""

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return immediately."""

    def close(self) -> None:
        """Do nothing."""


def allocated(device: Device, specs: Sequence[TensorSpec]) -> Memory:
    """Return what `allocate` does, by the other methods of a device."""
    return Memory([*map(device.empty, specs)], device.record_event(), device.current_stream())


def host_parts(tensors: Sequence[torch.Tensor], address: int, parts: Parts) -> list[torch.Tensor]:
    """Return the parts of a slot as tensors like those that they are copied to; the caller keeps the slot alive."""
    return [
        torch.frombuffer((ctypes.c_byte * nbytes).from_address(address + offset), dtype=tensor.dtype).as_strided(
            tensor.size(), tensor.stride()
        )
        for tensor, (offset, nbytes) in zip(tensors, parts, strict=True)
    ]
