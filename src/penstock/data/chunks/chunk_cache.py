"""A cache of unpacked chunks: each is unpacked once, by one thread, and kept as long as a shuffled pass needs it.

With `ChunkShuffle` a thread reads from `SHUFFLE_BLOCK` chunks at a time, so that twice as many for each thread suffice.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from penstock.data.chunks.chunk_shuffle import SHUFFLE_BLOCK

_SMALL = 16 << 20


class HasNbytes(Protocol):
    """Has a size in memory, as an array does."""

    @property
    def nbytes(self) -> int:
        """The bytes."""


_Chunk = TypeVar("_Chunk", bound=HasNbytes)


class ChunkCache(Generic[_Chunk]):
    """The chunks of one field that this process has unpacked; the least recently used are dropped first.

    Args:
        chunk_nbytes: of the largest one.
        most_nbytes: the limit of all; one chunk is always kept.

    >>> import numpy as np
    >>> chunks = ChunkCache(8, 1 << 20)
    >>> chunks.get(3, lambda: np.zeros(1)) is chunks.get(3, lambda: np.ones(1))
    True
    """

    def __init__(self, chunk_nbytes: int, most_nbytes: int) -> None:
        self._chunk_nbytes = chunk_nbytes
        self._most_nbytes = most_nbytes
        self._lock = threading.Lock()
        self._held: OrderedDict[Hashable, _Chunk] = OrderedDict()
        self._held_nbytes = 0
        self._gates: dict[Hashable, threading.Lock] = {}
        self._readers: set[int] = set()

    def get(self, key: Hashable, unpack: Callable[[], _Chunk]) -> _Chunk:
        """Return the chunk `key`; `unpack` makes it if it is not cached, while other threads that ask for it wait."""
        with self._lock:
            found = self._held.get(key)
            if found is not None:
                self._held.move_to_end(key)
                return found
            self._readers.add(threading.get_ident())
            gate = self._gates.setdefault(key, threading.Lock())
        with gate:
            with self._lock:
                found = self._held.get(key)
            if found is not None:
                return found
            try:
                found = unpack()
                self._keep(key, found)
            finally:
                with self._lock:
                    self._gates.pop(key, None)
        return found

    def peek(self, key: Hashable) -> _Chunk | None:
        """Return the chunk `key` if it is there, without a claim to keep it."""
        return self._held.get(key)

    def drop(self, key: Hashable) -> None:
        """Drop the chunk `key`, if it is there."""
        with self._lock:
            found = self._held.pop(key, None)
            self._held_nbytes -= found.nbytes if found is not None else 0

    def clear(self) -> None:
        """Drop all chunks."""
        with self._lock:
            self._held.clear()
            self._held_nbytes = 0

    def _keep(self, key: Hashable, chunk: _Chunk) -> None:
        with self._lock:
            wanted = max(_SMALL, 2 * SHUFFLE_BLOCK * self._chunk_nbytes * len(self._readers))
            room = min(self._most_nbytes, wanted)
            self._held[key] = chunk
            self._held_nbytes += chunk.nbytes
            while self._held_nbytes > room and len(self._held) > 1:
                _, oldest = self._held.popitem(last=False)
                self._held_nbytes -= oldest.nbytes
