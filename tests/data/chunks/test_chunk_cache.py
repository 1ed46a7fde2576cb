"""Unpacked chunks: how many are held, and who unpacks them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from penstock.data.chunks import chunk_cache
from penstock.data.chunks.chunk_cache import ChunkCache
from penstock.data.chunks.chunk_shuffle import SHUFFLE_BLOCK


def test_as_many_are_held_as_a_reader_shuffles_together_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_cache, "_SMALL", 0)
    made: list[int] = []

    def get(held: ChunkCache[np.ndarray], number: int) -> None:
        held.get(number, lambda: made.append(number) or np.zeros(10, np.uint8))  # type: ignore[func-returns-value]

    held: ChunkCache[np.ndarray] = ChunkCache(10, 1 << 20)
    for number in (*range(2 * SHUFFLE_BLOCK), *range(2 * SHUFFLE_BLOCK), 99, 0, 1):
        get(held, number)
    assert made == [*range(2 * SHUFFLE_BLOCK), 99, 0, 1]


def test_bytes_are_bounded_but_the_last_chunk_is_held() -> None:
    held: ChunkCache[np.ndarray] = ChunkCache(1000, 100)
    first = held.get(1, lambda: np.zeros(1000, np.uint8))
    assert held.get(1, lambda: np.ones(1)) is first
    held.get(2, lambda: np.zeros(1000, np.uint8))
    assert held.get(1, lambda: np.ones(1)) is not first


def test_threads_wait_for_the_one_that_unpacks() -> None:
    held: ChunkCache[np.ndarray] = ChunkCache(8, 1 << 20)
    makers: list[int] = []

    def unpack() -> np.ndarray:
        makers.append(threading.get_ident())
        time.sleep(0.05)
        return np.zeros(1)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: held.get("a", unpack), range(8)))
    assert len(makers) == 1
    assert all(one is found[0] for one in found)


def test_who_comes_after_one_that_failed_tries_again() -> None:
    held: ChunkCache[np.ndarray] = ChunkCache(8, 1 << 20)

    def fail() -> np.ndarray:
        raise OSError("no")

    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            held.get("a", fail)
    assert held.get("a", lambda: np.ones(1)) == 1
