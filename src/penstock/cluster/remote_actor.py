"""One Ray actor as the training process sees it, and the tasks it has been given."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from penstock.cluster.actor import Arrival
from penstock.loader.workers.messages import Result, Task


@dataclass(slots=True, eq=False)
class RemoteTask:
    """A task that was sent to an actor: first its result arrives, then its data."""

    task: Task
    result_ref: Any
    data_ref: Any
    result: Result | None = None
    has_data: bool = False


@dataclass(slots=True, eq=False)
class RemoteActor:
    """An actor, from the request to Ray until it leaves or dies."""

    handle: Any
    requested_s: float
    """When it was requested, on the clock of `time.monotonic`."""
    machines: frozenset[str]
    """Those alive when it was requested; it is on one of them, or on a newer one."""
    arriving: Any
    """The reference of its `Arrival`."""
    shares_core: bool = False
    """Whether it was requested without a core of its own, beside one that finds none; the first to arrive stays."""
    number: int | None = None
    arrival: Arrival | None = None
    opening: Any = None
    """The reference of its call to `open`, until that has returned."""
    is_open: bool = False
    is_retired: bool = False
    tasks: deque[RemoteTask] = field(default_factory=deque)

    def unfinished(self) -> int:
        """Return how many of its tasks have no result."""
        return sum(remote.result is None for remote in self.tasks)
