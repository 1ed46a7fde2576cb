"""Loading in the training process itself (`num_workers=0`), collated into slots that are used again and again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data._utils.worker import WorkerInfo

from penstock.core.events import Recorder
from penstock.feed.counters import Counters
from penstock.feed.stream_cursor import Used
from penstock.feed.transport.ring import Ring, Slot
from penstock.feed.transport.room import Room
from penstock.feed.workers.lanes import Lane, Lanes
from penstock.feed.workers.maker import Job, Made, NothingLeftError
from penstock.feed.workers.witness import install_info

_NOTHING = np.empty(0, np.uint8)


class InlineRunner:
    """Makes each batch when it is asked for. Reuse alone is most of the gain: a fresh batch costs its page faults."""

    def __init__(
        self,
        job: Job,
        ring: Ring,
        counters: Counters,
        indices: Iterator[Any],
        *,
        base_seed: int,
        epoch_seed: int,
        lanes: Sequence[Lane] = (),
        turn: int = 0,
        init_fn: Callable[[int], Any] | None = None,
    ) -> None:
        self._ring = ring
        self._counters = counters
        self._indices = indices
        self._epoch_seed = epoch_seed
        self._base_seed = base_seed
        self._lanes = Lanes(job, dict(enumerate(lanes)), self._tell, init=init_fn)
        self._lanes.leave()
        self._waiting = deque(range(len(lanes) if job.iterable else 1))
        self._waiting.rotate(-turn)
        for lane in [lane for lane in self._waiting if job.iterable and lanes[lane].has_ended]:
            self._waiting.remove(lane)
        """Lanes that have batches left, from the one whose turn is next; 0 for map-style datasets."""
        self._slot: Slot | None = None
        self._number = -1
        self.unused: list[Used] = []
        """What had nothing to hand out since the last batch that was."""
        self.receipt: Sequence[Used] = ()

    def next_batch(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: the epoch is over.
        """
        while self._waiting:
            indices = next(self._indices)
            lane = self._waiting[0]
            self._number += 1
            self.unused.append(Used(self._number, lane))
            began = time.perf_counter_ns()
            try:
                made = self._make(lane, indices)
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
                self._waiting.popleft()
                self.unused[-1] = Used(self._number, lane, has_ended=True)
                continue
            self._waiting.rotate(-1)
            self.receipt, self.unused = self.unused, []
            if counters.recorder is not None:
                _record(counters.recorder, made, counters.epochs, self._number)
            counters.batches += 1
            counters.samples += made.samples
            if slot is not None and made.room is not None:
                counters.nbytes += made.room.used
                self._ring.note(slot, made.room.used)
            return made.batch
        raise StopIteration

    def look(self, place: int, lane: Lane) -> Lane:
        """Return a lane of an iterable dataset as it is now."""
        maker = self._lanes.maker(place)
        self._lanes.leave()
        if maker is None:
            return lane
        if lane.has_ended or maker.has_ended:
            return replace(lane, has_ended=True, end=maker.end_state(), state=None, since=())
        state = maker.snapshot()
        return lane if state is None else replace(lane, state=state, since=())

    def try_next(self) -> tuple[Any] | None:
        """Return None: making a batch ahead of time would hold up the step that waits to be started."""
        return None

    def _make(self, lane: int, indices: Any) -> Made:
        maker = self._lanes.maker(lane)
        assert maker is not None
        try:
            # No slot until the first sample shows that the batch is large enough to gain by one.
            return maker.make(indices, Room(_NOTHING), epoch_seed=self._epoch_seed, enlarge=self._enlarge)
        finally:
            self._lanes.leave()

    def _tell(self, lane: Lane, job: Job) -> None:
        """Have `get_worker_info()` say what it said where this lane was begun, in a worker; else that this is none."""
        seed = self._base_seed + lane.number
        info = WorkerInfo(id=lane.number, num_workers=lane.of, seed=seed, dataset=job.dataset) if lane.of else None
        install_info(info)

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
