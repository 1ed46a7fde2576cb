"""Recorder: the events of each batch, recorded only for a trace.

Stamps are nanoseconds of CLOCK_MONOTONIC (`time.perf_counter_ns` on Linux). It is one clock for all processes of a
machine, so the stamps of a worker and of the training process can be compared as they are.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple

EventKind = Literal["step", "next", "wait", "make"]
"""The program's own step; getting the next batch; the part of that spent blocked; a worker making (part of) a batch."""


class Event(NamedTuple):
    """What happened from `began_ns` to `ended_ns`."""

    kind: EventKind
    began_ns: int
    ended_ns: int
    epoch: int = 0
    batch: int = 0
    """Its number in the epoch, from 0."""
    pid: int = 0
    """The worker process; 0 for the training process."""
    worker: int = -1
    """The worker's number; -1 for the loop's own thread."""
    fetch_ns: int = 0
    """Of a "make" event: inside the dataset."""
    collate_ns: int = 0
    """Of a "make" event: collating. The two alternate where samples are written one by one."""
    row: int = 0
    """The first row that was made."""
    samples: int = 0
    """How many samples were made."""


_Row = tuple[EventKind, int, int, int, int, int, int, int, int, int, int]


class Recorder:
    """Keeps the first and the last events, `max_events` in all, so that memory is bounded however long the run.

    They are plain tuples of numbers, which the garbage collector stops tracking.

    Example:
        >>> recorder = Recorder(max_events=4)
        >>> for stamp in range(10):
        ...     recorder.add("step", stamp, stamp + 1)
        >>> [event.began_ns for event in recorder.events()], recorder.dropped
        ([0, 1, 8, 9], 6)
    """

    def __init__(self, max_events: int = 100_000) -> None:
        self._max_first = max_events // 2
        self._first: list[_Row] = []
        self._last: deque[_Row] = deque(maxlen=max_events - max_events // 2)
        self._seen = 0

    def add(
        self,
        kind: EventKind,
        began_ns: int,
        ended_ns: int,
        epoch: int = 0,
        batch: int = 0,
        pid: int = 0,
        worker: int = -1,
        fetch_ns: int = 0,
        collate_ns: int = 0,
        row: int = 0,
        samples: int = 0,
    ) -> None:
        """Record an `Event` of these fields. Called by the iterating thread only."""
        self._seen += 1
        event = (kind, began_ns, ended_ns, epoch, batch, pid, worker, fetch_ns, collate_ns, row, samples)
        if self._seen <= self._max_first:
            self._first.append(event)
        else:
            self._last.append(event)

    @property
    def dropped(self) -> int:
        """How many events were not kept, all of them from the middle of the run."""
        return self._seen - len(self._first) - len(self._last)

    def events(self) -> tuple[Event, ...]:
        """Return the events that were kept, in order."""
        return tuple(Event(*row) for rows in (self._first, self._last) for row in rows)
