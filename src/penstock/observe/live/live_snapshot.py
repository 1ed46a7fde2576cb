"""The state of one process of a run at one time, as the live panel and `penstock watch` show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from penstock.core.stats import StageTimes
from penstock.observe.record.known_fields import build_from_known
from penstock.observe.record.timeline import TimelinePoint


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveSnapshot:
    """One process of a run at one time."""

    pid: int
    """The process."""

    command: tuple[str, ...] = ()
    """What it runs."""

    rank: int = 0
    """Its rank in the run."""

    world_size: int = 1
    """How many ranks there are, on all machines."""

    launch: str = ""
    """What the ranks that were started together on this machine share; empty for a single process."""

    now: TimelinePoint
    """Counters since the run's start and current gauges, over all of its loaders."""

    loader: str = ""
    """The loader that handed out a batch last. Empty before the first batch."""

    made_at: str = ""
    """The line of the program that made it, as in "train.py:12"; empty where unknown."""

    is_watched: bool = False
    """Whether that loader's iterator is not penstock's: how many batches are ready is not known then."""

    epoch: int = 0
    """That loader's epoch, from 1."""

    batch: int = 0
    """Batches handed out in that epoch; in all epochs where the length is unknown."""

    length: int | None = None
    """Batches in an epoch; None where it is unknown."""

    window_s: float = 0.0
    """Length of the window, in seconds, over which the rates below are measured, over all loaders."""

    samples_per_s: float = 0.0
    """Per second of wall clock."""

    batches_per_s: float = 0.0
    """Per second of wall clock."""

    stall_fraction: float = 0.0
    """Fraction of the loop's time in which the step waited for data."""

    stages: StageTimes = field(default_factory=StageTimes)
    """Seconds by stage."""

    eta_s: float | None = None
    """Seconds until the end of that loader's epoch at this speed; None where the length is unknown, and where they are
    more than a month."""

    starting: int = 0
    """Workers that have not begun their first task."""

    restarts: int = 0
    """Workers that died and were replaced, since the run's start."""

    processes: int = 1
    """Processes of the run."""

    copy_wait_s: float | None = None
    """Seconds a step that the device waited for that loader's copies; None where that is not timed."""

    since_batch_s: float = 0.0
    """Seconds since the last batch was handed out."""


def as_json(snapshot: LiveSnapshot) -> dict[str, Any]:
    """Return the object that `from_json` reads."""
    # dataclasses.asdict takes five times as long, and a run calls this twice a second.
    now = {**_entries(snapshot.now), "stages": _entries(snapshot.now.stages)}
    return {**_entries(snapshot), "now": now, "stages": _entries(snapshot.stages)}


def from_json(data: Mapping[str, Any]) -> LiveSnapshot:
    """Return the snapshot that `as_json` turned into `data`; unknown entries are ignored.

    Raises:
        KeyError, TypeError: `data` is not a snapshot.
    """
    return build_from_known(LiveSnapshot, data)


def _entries(one: LiveSnapshot | TimelinePoint | StageTimes) -> dict[str, Any]:
    return {field.name: getattr(one, field.name) for field in fields(one)}
