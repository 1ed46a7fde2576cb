"""The protocol of a device: moving bytes there and back in its own time, and saying when a move is over.

Two streams matter. The **consumer's** is the current stream of whoever iterates: the user's kernels run there, and
device memory is allocated there, so that torch's caching allocator may give it away again as soon as it is dropped.
The **side** stream is ours: copies run there while the consumer computes. Between them there are only events:

    consumer   ── step k-1 ──┬─ now() ──────── step k ──────────────────── wait(event) ── step k+1 ──
                              └──────────┐                                     │
    side                          waits ─┴─ upload of batch k+1 ── event ──────┘

The upload waits for what the consumer had been given when the destination was allocated, because the destination may
be memory that a kernel of an earlier step still reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(destination, source) pairs of equal size and dtype."""


class Mould(NamedTuple):
    """What a tensor takes: its size, its strides in elements, its dtype."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Mould:
        """Return the mould of what `tensor.to(another_device)` would give: its order of dimensions is kept."""
        return cls(tensor.shape, torch.empty_like(tensor, device="meta").stride(), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of such a tensor."""
        return self.size.numel() * self.dtype.itemsize


class Event(Protocol):
    """A moment on a device: it passes when everything submitted before it is done."""

    def query(self) -> bool:
        """Return whether it has passed."""
        ...

    def synchronize(self) -> None:
        """Wait until it has passed."""
        ...


class Registration(Protocol):
    """Host memory that the device may read and write by itself (page-locked)."""

    def close(self) -> None:
        """Give the memory back to the pager. No copy may be under way."""
        ...


class Device(Protocol):
    """Where batches go. All methods but `fence` are called by the thread that iterates."""

    name: str
    """As in "cuda:0"."""

    torch_device: torch.device
    """Where its tensors are, as torch says it."""

    is_host: bool
    """Whether device memory is host memory, so that nothing has to be copied."""

    has_fence: bool
    """Whether `fence` works, so that pinned slots may be lent to a user who makes copies of their own."""

    numa_node: int | None
    """The NUMA node it hangs on; None on machines with one, and where nobody knows."""

    def apart(self) -> AbstractContextManager[object]:
        """Return a context whose calls are no part of a graph that is being captured; entered around all the others.

        While none is captured it changes nothing. While one is, what was handed over inside is complete at its end.
        """
        ...

    def empty(self, mould: Mould) -> torch.Tensor:
        """Return uninitialised memory that the consumer's stream may use from now on.

        Raises:
            torch.OutOfMemoryError: there is not enough.
        """
        ...

    def now(self) -> Event:
        """Return an event behind everything that the consumer's stream has been given so far."""
        ...

    def upload(self, copies: Copies, after: Event) -> Event:
        """Copy host to device on the side stream once `after` has passed; return the event of its end."""
        ...

    def hand_over(self, event: Event) -> None:
        """Have the consumer's stream wait for `event` before what it is given from now on."""
        ...

    def download(self, copies: Copies) -> Event:
        """Copy device to host, behind everything the consumer's stream has been given so far; return its end."""
        ...

    def register(self, memory: memoryview) -> Registration | None:
        """Page-lock host memory; None when the system refuses."""
        ...

    def fence(self) -> Event | None:
        """Return an event behind everything on every stream; None when none can be recorded at this moment."""
        ...


class Passed:
    """An event of a device that does everything at once."""

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""
