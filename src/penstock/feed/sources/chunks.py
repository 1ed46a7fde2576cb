"""Unpacked chunks: each is unpacked once, by one thread, and kept for as long as a shuffled pass needs it.

A reader is a thread. With `RunOrder` it reads `WINDOW` runs at a time, so that twice as many for each reader suffice.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from penstock.feed.sources.order import WINDOW

_SMALL = 16 << 20


class Weighed(Protocol):
    """Says what it takes in memory, as an array does."""

    @property
    def nbytes(self) -> int:
        """The bytes."""


_Chunk = TypeVar("_Chunk", bound=Weighed)


class Chunks(Generic[_Chunk]):
    """The chunks of one field that this process has unpacked; those that nobody asked for the longest go first.

    Args:
        chunk_nbytes: of the largest one.
        most_nbytes: never holds more, but for the one that was asked for last.

    >>> import numpy as np
    >>> chunks = Chunks(8, 1 << 20)
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
        """Return the chunk `key`; `unpack` makes it if it is not held. Others who want the same one wait for it."""
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

    def _keep(self, key: Hashable, chunk: _Chunk) -> None:
        with self._lock:
            wanted = max(_SMALL, 2 * WINDOW * self._chunk_nbytes * len(self._readers))
            room = min(self._most_nbytes, wanted)
            self._held[key] = chunk
            self._held_nbytes += chunk.nbytes
            while self._held_nbytes > room and len(self._held) > 1:
                _, oldest = self._held.popitem(last=False)
                self._held_nbytes -= oldest.nbytes
