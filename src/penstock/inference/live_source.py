"""Batches from a live source: an iterator of samples that blocks, as a camera or a queue does."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import default_collate


@dataclass(slots=True)
class _Item:
    """A sample, or what was raised in its place, and when."""

    sample: Any
    error: BaseException | None
    arrived_s: float = field(default_factory=time.monotonic)


class LiveBatches:
    """Reads samples in a thread, and makes a batch when there are enough of them, or when the first has waited long.

    Args:
        samples: where they come from. Its iterator is used by the thread alone.
        batch_size: samples in a batch, at most.
        max_latency_s: the longest that a sample waits for others, in seconds; None waits for a full batch.
        collate_fn: makes a batch of a list of samples.
    """

    def __init__(
        self,
        samples: Iterable[Any],
        batch_size: int,
        max_latency_s: float | None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._batch_size = batch_size
        self._max_latency_s = max_latency_s
        self._collate = collate_fn or default_collate
        self._samples: queue.Queue[_Item] = queue.Queue(2 * batch_size)
        self._pending: list[Any] = []
        self._deadline_s = float("inf")
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_read, args=(iter(samples), self._samples, self._stop), name="penstock-live-source", daemon=True
        )
        self._thread.start()

    def next_batch(self) -> Any:
        """Return the next batch, waiting for its first sample as long as that takes.

        Raises:
            StopIteration: the source has ended. What else the source raises comes after the samples before it.
        """
        while (found := self.try_next()) is None:
            wait_s = self._deadline_s - time.monotonic() if self._pending else float("inf")
            with contextlib.suppress(queue.Empty):
                self._take(self._samples.get(timeout=None if wait_s == float("inf") else max(0.0, wait_s)))
        return found[0]

    def try_next(self) -> tuple[Any] | None:
        """Return the next batch, in a tuple, if it is full or due; raises as `next_batch` does."""
        with contextlib.suppress(queue.Empty):
            while self._error is None and len(self._pending) < self._batch_size:
                self._take(self._samples.get_nowait())
        if not self._pending:
            if self._error is not None:
                raise self._error
            return None
        is_full = len(self._pending) == self._batch_size
        if not (is_full or self._error is not None or time.monotonic() >= self._deadline_s):
            return None
        batch, self._pending = self._pending, []
        return (self._collate(batch),)

    def _take(self, item: _Item) -> None:
        if item.error is not None:
            self._error = item.error
            return
        if not self._pending and self._max_latency_s is not None:
            self._deadline_s = item.arrived_s + self._max_latency_s
        self._pending.append(item.sample)

    def close(self) -> None:
        """Stop reading. The thread ends when the source yields the sample that it is waiting for, or ends."""
        self._stop.set()
        with self._samples.mutex:
            self._samples.queue.clear()
            self._samples.not_full.notify_all()


def _read(source: Any, samples: queue.Queue[_Item], stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            item = _Item(next(source), None)
        except Exception as error:  # noqa: BLE001  raised where its sample would have come; StopIteration too
            item = _Item(None, error)
        samples.put(item)
        if item.error is not None:
            return
