"""A pulse: what a run under way looks like just now. The live panel shows it, `penstock watch` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from penstock.core.stats import StageTimes
from penstock.observe.timeline import Moment

_Data = TypeVar("_Data")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """One look at one process of a run."""

    pid: int
    """The process."""

    command: tuple[str, ...] = ()
    """What it runs."""

    rank: int = 0
    """Which of the run's ranks it is."""

    world_size: int = 1
    """How many ranks there are, on all machines."""

    moment: Moment
    """What had been counted by now, over all of its loaders."""

    loader: str = ""
    """The loader that handed out most lately. Empty before the first batch."""

    epoch: int = 0
    """Its epoch, from 1."""

    batch: int = 0
    """The batch it has come to within that epoch; of all epochs where the length is not known."""

    length: int | None = None
    """Batches in an epoch, where that is known."""

    window_s: float = 0.0
    """Over how many seconds the following was counted, over all loaders."""

    samples_per_s: float = 0.0
    """By the wall clock."""

    batches_per_s: float = 0.0
    """By the wall clock."""

    stall_share: float = 0.0
    """Share of the loop's time in which the step waited for data."""

    stages: StageTimes = field(default_factory=StageTimes)
    """Seconds by stage."""

    eta_s: float | None = None
    """Seconds until the end of that loader's epoch at this speed, where the length is known."""

    starting: int = 0
    """Workers that have not begun."""

    restarts: int = 0
    """Workers that died and were replaced, since the run's start."""

    processes: int = 1
    """Processes of the run."""

    since_batch_s: float = 0.0
    """How long ago the last batch was handed out."""


def as_json(pulse: Pulse) -> dict[str, Any]:
    """Return the object that `from_json` reads; twice a second in a run, and `asdict` takes five times as long."""
    moment = {**_entries(pulse.moment), "stages": _entries(pulse.moment.stages)}
    return {**_entries(pulse), "moment": moment, "stages": _entries(pulse.stages)}


def from_json(data: Mapping[str, Any]) -> Pulse:
    """Return the pulse that `as_json` made `data` from; entries that are not known are ignored.

    Raises:
        KeyError, TypeError: it is no pulse.
    """
    moment = {**data["moment"], "stages": _known(StageTimes, data["moment"]["stages"])}
    return _known(
        Pulse,
        {
            **data,
            "command": tuple(data["command"]),
            "moment": _known(Moment, moment),
            "stages": _known(StageTimes, data["stages"]),
        },
    )


def _entries(one: Pulse | Moment | StageTimes) -> dict[str, Any]:
    return {field.name: getattr(one, field.name) for field in fields(one)}


def _known(kind: type[_Data], data: Mapping[str, Any]) -> _Data:
    names = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in data.items() if name in names})
