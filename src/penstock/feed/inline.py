"""Loading in the training process itself (`num_workers=0`), collated into slots that are used again and again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.core.events import Recorder
from penstock.feed.counters import Counters
from penstock.feed.transport.ring import Ring, Slot
from penstock.feed.transport.room import Room
from penstock.feed.workers.maker import BatchMaker, Job, Made, NothingLeftError

_NOTHING = np.empty(0, np.uint8)


class InlineRunner:
    """Makes each batch when it is asked for. Reuse alone is most of the gain: a fresh batch costs its page faults."""

    def __init__(self, job: Job, ring: Ring, counters: Counters, indices: Iterator[Any]) -> None:
        self._job = job
        self._ring = ring
        self._counters = counters
        self._indices = indices
        self._maker = BatchMaker(job)
        self._slot: Slot | None = None
        self._made = 0

    def next_batch(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: the epoch is over.
        """
        while True:
            indices = next(self._indices)
            began = time.perf_counter_ns()
            try:
                # No slot until the first sample shows that the batch is large enough to gain by one.
                made = self._maker.make(indices, Room(_NOTHING), enlarge=self._enlarge)
            except NothingLeftError as nothing:
                self._counters.skip(nothing.made.skipped)
                continue
            finally:
                slot, self._slot = self._slot, None
                self._counters.inline_ns += time.perf_counter_ns() - began
            counters = self._counters
            counters.fetch_ns += made.fetch_ns
            counters.collate_ns += made.collate_ns
            counters.skip(made.skipped)
            if made.ended:
                raise StopIteration
            if counters.recorder is not None:
                _record(counters.recorder, made, counters.epochs, self._made)
            self._made += 1
            counters.batches += 1
            counters.samples += made.samples
            if slot is not None and made.room is not None:
                counters.nbytes += made.room.used
                self._ring.note(slot, made.room.used)
            return made.batch

    def try_next(self) -> tuple[Any] | None:
        """Return None: making a batch ahead of time would hold up the step that waits to be started."""
        return None

    def _enlarge(self, nbytes: int) -> Room:
        slot = self._ring.acquire_roomier(nbytes)
        if slot is None:  # the user holds all that the budget allows: an ordinary batch, in memory of its own
            self._ring.copied_out += 1
            return Room(np.empty(nbytes, np.uint8))
        return Room(self._lend(slot))

    def _lend(self, slot: Slot) -> np.ndarray:
        """Lend `slot` before it is filled; it is free again when the last view of it dies, or at once without any."""
        self._slot = slot
        self._ring.commit(slot, 0)
        return self._ring.lend(slot)


def _record(recorder: Recorder, made: Made, epoch: int, number: int) -> None:
    recorder.add(
        "make",
        made.began_ns,
        made.began_ns + made.fetch_ns + made.collate_ns,
        epoch=epoch,
        batch=number,
        fetch_ns=made.fetch_ns,
        collate_ns=made.collate_ns,
        samples=made.samples,
    )
