"""A bump allocator over the memory of one slot.

First the collate function and then the codec, for what collate has not placed, take spans from one `Arena`.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from penstock.core.units import round_up

ALIGNMENT = 128
"""Of every span, in bytes: a multiple of the cache line and of the width of vectorised copies."""


class ArenaFullError(Exception):
    """A slot is too small; `needed` is the size in bytes that would have been enough."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


class Arena:
    """Gives out aligned spans of one slot's memory, front to back."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        """The slot: uint8[nbytes]. A view of a span keeps this array alive."""
        self.nbytes = memory.nbytes
        self.used = 0
        self.address: int = memory.__array_interface__["data"][0] if memory.nbytes else 0

    def take(self, nbytes: int) -> int:
        """Take a span of `nbytes` and return its offset.

        Raises:
            ArenaFullError: the slot ends before the span does.
        """
        offset = round_up(self.used, ALIGNMENT)
        if offset + nbytes > self.nbytes:
            raise ArenaFullError(offset + nbytes)
        self.used = offset + nbytes
        return offset

    def tensor(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor of `size` and `dtype` (uninitialised) whose memory is the next span."""
        nbytes = math.prod(size) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(size, dtype=dtype)
        return view_tensor(self.memory, self.take(nbytes), size, dtype)

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return where in the slot `address` lies, or None when it lies elsewhere."""
        offset = address - self.address
        return offset if 0 <= offset and offset + nbytes <= self.nbytes else None


def view_tensor(memory: np.ndarray, offset: int, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor of `size` and `dtype` that lies at `offset` of `memory` (uint8); it keeps `memory` alive."""
    count = math.prod(size)
    if count == 0:
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(size)
