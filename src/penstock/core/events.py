"""What happened to each batch, and when: kept only where somebody asked for a trace.

Stamps are nanoseconds of CLOCK_MONOTONIC (`time.perf_counter_ns` on Linux), one clock for all processes of a machine,
so that what a worker stamped lies on the training process's line without any agreement between the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

EventKind = Literal["step", "next", "wait", "make"]
"""The program's own step; getting the next batch; of that, being blocked; a worker making a batch or a part of one."""


class Event(NamedTuple):
    """Something that took from `began_ns` to `ended_ns`."""

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
    """Of the making: inside of the dataset."""
    collate_ns: int = 0
    """Of the making: putting samples together. The two alternate where samples are written one by one."""
    row: int = 0
    """The first row of the part that was made."""
    samples: int = 0
    """How many were made."""


EventRow = tuple[EventKind, int, int, *tuple[int, ...]]
"""An event's fields, in its order; those that are missing at the end are as `Event` has them."""

_TOGETHER = 256
"""So many are put away at once: fewer than make Python's collector look at what is new (700)."""


class Recorder:
    """Keeps events: the first half of `most` and the last half, so that memory is bounded however long the run.

    They are kept as plain tuples, which the garbage collector soon leaves alone. Keeping one must cost next to
    nothing, which is why `add` is a list's own method, and only the event that ends a batch looks whether it is time
    to put away what has come. All is called by the iterating thread only.

    Args:
        most: how many are kept.

    Example:
        >>> recorder = Recorder(most=4)
        >>> for stamp in range(0, 10, 2):
        ...     recorder.add(("step", stamp, stamp + 1))
        ...     recorder.add_last(("next", stamp + 1, stamp + 2, 0, stamp // 2))
        >>> [event.began_ns for event in recorder.events()], recorder.dropped
        ([0, 1, 8, 9], 6)
    """

    def __init__(self, most: int = 100_000) -> None:
        self._room = most // 2
        self._first: list[EventRow] = []
        self._last: deque[EventRow] = deque(maxlen=most - most // 2)
        self._seen = 0
        self._recent: list[EventRow] = []
        self.add: Callable[[EventRow], None] = self._recent.append
        """Keep an event."""

    def add_last(self, event: EventRow) -> None:
        """Keep the event that is the last of a batch."""
        self._recent.append(event)
        if len(self._recent) >= _TOGETHER:
            self._put_away()

    @property
    def dropped(self) -> int:
        """How many events there was no room for, all of them from the middle of the run."""
        self._put_away()
        return self._seen - len(self._first) - len(self._last)

    def events(self) -> tuple[Event, ...]:
        """Return what has been kept, as it came."""
        self._put_away()
        return tuple(Event(*row) for rows in (self._first, self._last) for row in rows)

    def _put_away(self) -> None:
        room = self._room - len(self._first)
        self._first += self._recent[:room]
        self._last.extend(self._recent[room:])
        self._seen += len(self._recent)
        self._recent.clear()  # not another list: `add` is this one's
