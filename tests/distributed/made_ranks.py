"""Ranks that are made in one process: a store that counts requests, and news that nobody's thread asks for."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from penstock.distributed.rank_news import Listener, RankNews


class CountedStore:
    """What a TCPStore does, for the methods that are used here, and how often each rank has called one."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: Counter[int] = Counter()
        self._lock = threading.Lock()

    def of(self, rank: int) -> Any:
        """Return one rank's connection."""
        return _Connection(self, rank)

    def call(self, rank: int, method: str, *args: Any) -> Any:
        """Answer a request."""
        with self._lock:
            self.requests[rank] += 1
            return getattr(self, f"_{method}")(*args)

    def _check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def _get(self, key: str) -> bytes:
        return self.values[key]

    def _set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def _add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def _compare_set(self, key: str, expected: str, desired: str) -> bytes:
        assert expected == ""
        return self.values.setdefault(key, desired.encode())


class _Connection:
    def __init__(self, store: CountedStore, rank: int) -> None:
        self._store = store
        self._rank = rank

    def __getattr__(self, method: str) -> Any:
        return lambda *args: self._store.call(self._rank, method, *args)


class ScriptedNews(RankNews):
    """News that a test asks for, instead of a thread."""

    def listen(self, listener: Listener) -> None:
        """Hand messages to `listener` from now on."""
        self._listeners.append(listener)

    def leave(self, listener: Listener) -> None:
        """Hand nothing more to `listener`."""
        self._listeners.remove(listener)
