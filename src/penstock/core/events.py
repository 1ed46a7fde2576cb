"""Recorder: the events of each batch, recorded only for a trace.

Stamps are nanoseconds of CLOCK_MONOTONIC (`time.perf_counter_ns` on Linux). It is one clock for all processes of a
machine, so the stamps of a worker and of the training process can be compared as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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
    samples: int = 0
    """How many samples were made."""


EventFields = tuple[EventKind, int, int, int, int, int, int, int, int, int]
"""The fields of an `Event`."""
_MadeFields = tuple[int, int, int, int]
_Record = tuple[Any, ...]
"""An `EventFields`, or a turn of the loop: five numbers, and those of a `_MadeFields` if the loop made the batch."""

_TURN_LENGTHS = 5, 9


class Recorder:
    """Keeps the events of the first and the last batches, `max_records` in all, so that memory is bounded.

    Called by the iterating thread only, for each batch. So nothing is made of what is recorded before it is asked
    for: a record is a plain tuple of numbers, which the garbage collector stops tracking. The memory that it takes is
    most of its cost, by what that displaces from the caches, so a batch that the loop makes itself has one record.

    Example:
        >>> recorder = Recorder(max_records=4)
        >>> for batch in range(10):
        ...     recorder.add_turn(3 * batch, 3 * batch + 1, 3 * batch + 3, 0, batch)
        >>> [(event.kind, event.batch) for event in recorder.events()][:3], recorder.dropped
        ([('next', 0), ('step', 0), ('next', 1)], 12)
    """

    def __init__(self, max_records: int = 100_000) -> None:
        self._max_first = max_records // 2
        self._first: list[_Record] = []
        self._last: deque[_Record] = deque(maxlen=max_records - max_records // 2)
        self._seen = 0
        self.made: _MadeFields | tuple[()] = ()
        """Set before `add_turn`, if the loop itself makes the batch: when it began, fetch, collate, samples."""

    def add(self, event: EventFields) -> None:
        """Record one event."""
        self._seen += 1
        if len(self._first) < self._max_first:
            self._first.append(event)
        else:
            self._last.append(event)

    def add_step(self, began_ns: int, ended_ns: int, epoch: int, batch: int) -> None:
        """Record the last step of an epoch."""
        self.add(("step", began_ns, ended_ns, epoch, batch, 0, -1, 0, 0, 0))

    def add_wait(self, began_ns: int, ended_ns: int, epoch: int, batch: int) -> None:
        """Record that the loop was blocked."""
        self.add(("wait", began_ns, ended_ns, epoch, batch, 0, -1, 0, 0, 0))

    def add_turn(self, stepped_ns: int, began_ns: int, ended_ns: int, epoch: int, batch: int) -> None:
        """Record the step from `stepped_ns` (0: none) to `began_ns`, and getting `batch` from then to `ended_ns`."""
        record: _Record = (stepped_ns, began_ns, ended_ns, epoch, batch)
        if self.made:
            record += self.made
            self.made = ()
            self._seen += 1
        self._seen += 2 if stepped_ns else 1
        if len(self._first) < self._max_first:
            self._first.append(record)
        else:
            self._last.append(record)

    @property
    def dropped(self) -> int:
        """How many events were not kept, all of them from the middle of the run."""
        return self._seen - len(self.events())

    def events(self) -> tuple[Event, ...]:
        """Return the events that were kept, in the order in which they ended."""
        return tuple(
            event for records in (self._first, self._last) for record in records for event in _events_of(record)
        )


def _events_of(record: _Record) -> Iterator[Event]:
    if len(record) not in _TURN_LENGTHS:
        yield Event(*record)
        return
    stepped_ns, began_ns, ended_ns, epoch, batch, *made = record
    if stepped_ns:
        yield Event("step", stepped_ns, began_ns, epoch, batch - 1)
    if made:
        at_ns, fetch_ns, collate_ns, samples = made
        made_ns = at_ns + fetch_ns + collate_ns
        yield Event("make", at_ns, made_ns, epoch, batch, fetch_ns=fetch_ns, collate_ns=collate_ns, samples=samples)
    yield Event("next", began_ns, ended_ns, epoch, batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderEvents:
    """The recorded events of one loader's batches."""

    name: str
    """The loader's name."""

    events: tuple[Event, ...]
    """In the order in which they were recorded."""

    dropped: int = 0
    """Events from the middle of the run that were dropped for lack of room."""
