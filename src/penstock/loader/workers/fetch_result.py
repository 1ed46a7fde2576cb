"""What a fetcher made of one task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.loader.transport.arena import Arena


@dataclass(slots=True)
class FetchResult:
    """A batch, or the news that the stream has ended."""

    arena: Arena | None = None
    """Where the batch is."""
    batch: Any = None
    samples: int = 0
    ended: bool = False
    """The iterable dataset is exhausted, and this task got nothing."""
    skipped: list[tuple[Any, str]] = field(default_factory=list)
    """Index and error of each sample that was left out or replaced."""
    state: bytes = b""
    """The state of its shard after it, pickled."""
    began_ns: int = 0
    fetch_ns: int = 0
    collate_ns: int = 0
    busy_ns: int = 0
    """How much of both was computing rather than waiting; see `busy_time`."""


class NothingLeftError(Exception):
    """Every sample of a batch was skipped; `fetched` lists them."""

    def __init__(self, fetched: FetchResult) -> None:
        super().__init__()
        self.fetched = fetched
