"""The record of one run, and run.json, the file that holds it.

run.json is one JSON object. Names end in their unit (`_s` seconds, `_nbytes` bytes, `_per_s`); fractions lie between 0
and 1.

    schema      "penstock.run/1"; it changes when readers of the old one would misread the new one
    versions    {"penstock", "python", "torch"}: torch is null if the program never imported it
    command     the program: the script (or "-m", module) and its arguments
    started     start time in UTC, as ISO 8601
    started_unix_ns  the same in nanoseconds since 1970
    wall_s      time from the start to the end of the program
    exit        {"code": int, "error": null or the exception in one line}
    host        {"cpus": cores that this process may use, "machine": {"processor", "cores", "memory_nbytes", "system",
                "accelerators"}, "memory": {"peak_pss_nbytes", "peak_rss_nbytes", "processes"}}
    device      {"memory": null, or the peak of the accelerators that were used}
    totals      {"batches", "samples", "nbytes", "loading_s", "loop_s", "samples_per_s", "stall_fraction",
                "stages": {...}}
    loaders     one object for each DataLoader, in the order they were made:
                {"name", "made_at", "loader_class", "iterator", "fallback_reason", "is_iterated", "shuffled_by", "rank",
                "settings": {...}, "loop_s", "samples_per_s", "stall_fraction", "statistics": {...}}
    timeline    one object for each point in time, in order
    findings    one object for each finding, the most expensive one first
    ranks       one object for each rank of a run of several ranks; exit, host and totals then cover all ranks
    baseline    null, or the comparison with torch's own loader

`statistics` holds the fields of `penstock.LoaderStatistics` (an entry of `index_digests` those of
`penstock.core.stats.IndexDigest`), `stages` those of `penstock.StageTimes`, `memory` those of
`penstock.observe.meters.host_memory.HostMemory` or `device_meter.DeviceMemory`, a point of the timeline those of
`timeline.TimelinePoint`, a finding those of `finding.Finding`, a rank those of `rank_record.RankRecord`, the baseline
those of `baseline.Baseline`; each is documented there. `totals` and the rates of each loader are derived from the rest
(rates.py, core/stats.py), for readers other than penstock, which ignores them.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from penstock.core.errors import OptionError
from penstock.core.stats import LoaderStatistics
from penstock.core.urls import redact, redact_all, redact_command
from penstock.observe.atomic_write import write_text_atomic
from penstock.observe.meters.device_meter import DeviceMemory
from penstock.observe.meters.host_memory import HostMemory
from penstock.observe.record import rates
from penstock.observe.record.baseline import Baseline
from penstock.observe.record.finding import Finding
from penstock.observe.record.known_fields import build_from_known
from penstock.observe.record.rank_record import RankRecord
from penstock.observe.record.timeline import TimelinePoint

_Data = TypeVar("_Data")

SCHEMA = "penstock.run/1"

_INTERRUPTED = 128 + signal.SIGINT

IteratorKind = Literal["replaced", "subclass", "own", "fallback"]
"""What iterates a loader: penstock's iterator in place of torch's; the same, in a subclass of DataLoader; the loader's
own iterator, which is left alone; torch's, because penstock's cannot."""

_FIELDS = ("made_at", "loader_class", "iterator", "fallback_reason", "is_iterated", "shuffled_by")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderRecord:
    """One DataLoader of a run."""

    name: str
    """The class of its dataset, and a number from the second iterated loader of that class on, as in "Images #2"."""

    made_at: str = ""
    """The line of the program that made it, as in "train.py:12"; empty where unknown."""

    loader_class: str = "DataLoader"
    """Its class."""

    iterator: IteratorKind = "replaced"
    """What iterates it."""

    fallback_reason: str = ""
    """Why torch's iterator runs, if it does."""

    is_iterated: bool = True
    """Whether it was iterated at all."""

    shuffled_by: str = ""
    """The class of its sampler, if that draws a random order."""

    settings: Mapping[str, Any]
    """The arguments it was created with."""

    statistics: LoaderStatistics
    """Its final counters."""

    rank: int | None = None
    """The rank it belongs to, in a run of several ranks."""

    def __post_init__(self) -> None:
        for name in ("name", "made_at", "fallback_reason"):
            object.__setattr__(self, name, redact(getattr(self, name)))
        object.__setattr__(self, "settings", redact_all(self.settings))

    @property
    def label(self) -> str:
        """Its name, and where it was made."""
        return label_of(self.name, self.made_at)

    @property
    def is_watched(self) -> bool:
        """Whether its iterator is not penstock's: of its stages, only wait and step are known."""
        return self.iterator in ("own", "fallback")


def label_of(name: str, made_at: str) -> str:
    """Return the name of a loader as it is shown.

    >>> label_of("Images #2", "train.py:12")
    'Images #2 (train.py:12)'
    """
    return f"{name} ({made_at})" if made_at else name


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One run of one program."""

    command: tuple[str, ...]
    """The script, or "-m" and the module, and the arguments; what is named like secrets without its value."""

    started: str
    """Start time in UTC, as ISO 8601."""

    started_unix_ns: int = 0
    """Start time in nanoseconds since 1970; 0 where unknown."""

    wall_s: float
    """Seconds from the start to the program's end."""

    exit_code: int | None = 0
    """As the shell sees it; 130 for an interrupted program. None where no exit handler ran: the program was killed, or
    called `os._exit`. Of several ranks, the first that is not 0."""

    error: str | None = None
    """The exception that ended the program, in one line; as all texts of a record, without what is secret in it."""

    versions: Mapping[str, str | None] = field(default_factory=dict)
    """Of penstock, python and torch."""

    cpus: int = 1
    """Cores that this process may use."""

    machine: Mapping[str, str | int] = field(default_factory=dict)
    """The machine, see machine.py; empty where unknown."""

    memory: HostMemory = field(default_factory=HostMemory)
    """The peak of this process and its descendants."""

    device_memory: DeviceMemory | None = None
    """The peak of the accelerators that it used; None without one."""

    load: float = 0.0
    """Processes of the machine that ran or waited for a core when the run began: the average of a minute."""

    forks_with_loaders: int = 0
    """Child processes that the program forked and that made loaders of their own; nothing of those is counted."""

    children_cpu_s: float = 0.0
    """CPU time of the processes that this one started and that have ended, workers among them."""

    loaders: tuple[LoaderRecord, ...] = ()
    """In the order they were made."""

    timeline: tuple[TimelinePoint, ...] = ()
    """The run over time."""

    findings: tuple[Finding, ...] = ()
    """The most expensive one first."""

    ranks: tuple[RankRecord, ...] = ()
    """In order; empty for a run of a single process."""

    baseline: Baseline | None = None
    """The comparison with torch's own loader, with `--baseline`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", redact_command(self.command))
        object.__setattr__(self, "error", None if self.error is None else redact(self.error))

    @property
    def has_failed(self) -> bool:
        """Whether an exception ended the program; not that the user interrupted it."""
        return self.error is not None and self.exit_code != _INTERRUPTED

    @property
    def totals(self) -> rates.Totals:
        """The sums over all of its loaders."""
        return rates.total((loader.statistics for loader in self.loaders), self.ranks)


def as_json(record: RunRecord) -> dict[str, Any]:
    """Return the object that run.json holds."""
    return {
        "schema": SCHEMA,
        "versions": dict(record.versions),
        "command": list(record.command),
        "started": record.started,
        "started_unix_ns": record.started_unix_ns,
        "wall_s": record.wall_s,
        "exit": {"code": record.exit_code, "error": record.error},
        "host": {
            "cpus": record.cpus,
            "load": record.load,
            "machine": dict(record.machine),
            "memory": asdict(record.memory),
            "forks_with_loaders": record.forks_with_loaders,
            "children_cpu_s": record.children_cpu_s,
        },
        "device": {"memory": asdict(record.device_memory) if record.device_memory is not None else None},
        "totals": _totals(record.totals),
        "loaders": [
            {
                "name": loader.name,
                **{name: getattr(loader, name) for name in _FIELDS},
                "rank": loader.rank,
                "settings": dict(loader.settings),
                **_rates(loader.statistics),
                "statistics": asdict(loader.statistics),
            }
            for loader in record.loaders
        ],
        "timeline": [asdict(point) for point in record.timeline],
        "findings": [asdict(finding) for finding in record.findings],
        "ranks": [asdict(rank) for rank in record.ranks],
        "baseline": asdict(record.baseline) if record.baseline is not None else None,
    }


def from_json(data: Any) -> RunRecord:
    """Return the record that `as_json` turned into `data`.

    Unknown fields are ignored, so that runs of newer versions can be read.

    Raises:
        OptionError: `data` is not a run, or has another schema.
    """
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise OptionError(
            f"not a run of penstock: expected the schema {SCHEMA!r}, got {schema!r}; give a saved run.json"
        )
    try:
        return RunRecord(
            command=tuple(data["command"]),
            started=data["started"],
            started_unix_ns=data.get("started_unix_ns", 0),
            wall_s=data["wall_s"],
            exit_code=data["exit"]["code"],
            error=data["exit"]["error"],
            versions=data["versions"],
            cpus=data["host"]["cpus"],
            load=data["host"].get("load", 0.0),
            forks_with_loaders=data["host"].get("forks_with_loaders", 0),
            children_cpu_s=data["host"].get("children_cpu_s", 0.0),
            machine=data["host"].get("machine", {}),
            memory=build_from_known(HostMemory, data["host"]["memory"]),
            device_memory=_known(DeviceMemory, data.get("device", {}).get("memory")),
            loaders=tuple(build_from_known(LoaderRecord, loader) for loader in data["loaders"]),
            timeline=tuple(build_from_known(TimelinePoint, point) for point in data.get("timeline", ())),
            findings=tuple(build_from_known(Finding, finding) for finding in data.get("findings", ())),
            ranks=tuple(build_from_known(RankRecord, rank) for rank in data.get("ranks", ())),
            baseline=_known(Baseline, data.get("baseline")),
        )
    except (KeyError, TypeError) as exc:
        raise OptionError(f"the run is damaged: {exc!r} while reading it; repeat it with `penstock run`") from exc


def save(record: RunRecord, file: Path) -> None:
    """Write run.json, whole or not at all.

    Raises:
        OptionError: the file cannot be written.
    """
    write_text_atomic(file, json.dumps(as_json(record), indent=2, default=repr) + "\n", "--json FILE")


def load(file: Path) -> RunRecord:
    """Read run.json.

    Raises:
        OptionError: the file cannot be read, or is not a run.
    """
    try:
        return from_json(json.loads(file.read_text(encoding="utf-8")))
    except OSError as exc:
        raise OptionError(f"{file}: {os.strerror(exc.errno or 0)}; give a run.json that `penstock run` wrote") from exc
    except ValueError as exc:  # includes OptionError
        raise OptionError(f"{file}: {exc}") from exc


def _rates(statistics: LoaderStatistics) -> dict[str, float]:
    return {name: getattr(statistics, name) for name in ("loop_s", "samples_per_s", "stall_fraction")}


def _totals(totals: rates.Totals) -> dict[str, Any]:
    return {**asdict(totals), "stall_fraction": totals.stall_fraction}


def _known(cls: type[_Data], data: Mapping[str, Any] | None) -> _Data | None:
    return None if data is None else build_from_known(cls, data)
