"""What is kept of one run, and run.json, the file it is kept in.

run.json is one JSON object. Times are seconds, sizes are bytes, shares lie between 0 and 1.

    schema      "penstock.run/1"; it changes when a reader of the old one would go wrong
    versions    {"penstock", "python", "torch"}: torch is null when the program never imported it
    command     what was run: the script (or "-m", module) and its arguments
    started     when, in UTC, as ISO 8601
    began_unix_ns  the same to the nanosecond, since 1970
    wall_s      from then to the end of the program
    exit        {"code": int, "error": null or the exception in one line}
    host        {"cpus": how many this process may use, "machine": {"processor", "cores", "memory_nbytes", "system",
                "accelerators"}, "memory": {"peak_pss_nbytes", "peak_rss_nbytes", "processes"}}
    totals      {"batches", "samples", "nbytes", "loop_s", "samples_per_s", "waited_share", "stages": {...}}
    loaders     one object for each DataLoader, in the order they were made:
                {"name", "rank", "settings": {...}, "loop_s", "samples_per_s", "waited_share", "statistics": {...}}
    timeline    one object for each moment that was looked at, in the order of time
    findings    one object for each thing that was found, the one that costs most first
    ranks       one object for each rank of a run that had several; exit, host and totals are then all ranks'
    baseline    null, or the comparison with torch's own loader

`statistics` holds the fields of `penstock.LoaderStatistics`, `stages` those of `penstock.StageTimes`, `memory` those
of `penstock.observe.host_memory.HostMemory`, a moment those of `penstock.observe.timeline.Moment`, a finding those of
`penstock.observe.finding.Finding`, a rank those of `penstock.observe.rank_record.RankRecord`, the baseline those of
`penstock.observe.baseline.Baseline`; each is documented there. `totals` and the rates of each loader follow
from the rest (see rates.py) and are written for readers that are not penstock; reading the file ignores them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from penstock.core.errors import OptionError
from penstock.core.stats import LoaderStatistics, RingCounts, StageTimes
from penstock.observe import rates
from penstock.observe.baseline import Baseline, Stretch
from penstock.observe.finding import Finding
from penstock.observe.host_memory import HostMemory
from penstock.observe.rank_record import RankRecord
from penstock.observe.timeline import Moment
from penstock.observe.whole_file import write_whole

SCHEMA = "penstock.run/1"

_Data = TypeVar("_Data")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderRecord:
    """One DataLoader of a run."""

    name: str
    """The class of its dataset."""

    settings: Mapping[str, Any]
    """The arguments it was made with, as far as they are numbers, words or truth values."""

    statistics: LoaderStatistics
    """What it counted, to its end."""

    rank: int | None = None
    """Whose it was, in a run of several ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One run of one program."""

    command: tuple[str, ...]
    """The script, or "-m" and the module, and the arguments."""

    started: str
    """When, in UTC, as ISO 8601."""

    began_unix_ns: int = 0
    """The same to the nanosecond, since 1970; 0 for runs of versions that did not keep it."""

    wall_s: float
    """From then to the program's end."""

    exit_code: int | None = 0
    """What the shell sees; 130 for a program that was interrupted. None where no exit handler ran: it was killed, or
    left by `os._exit`. Of several ranks, the first that is not 0."""

    error: str | None = None
    """The exception that ended the program, in one line."""

    versions: Mapping[str, str | None] = field(default_factory=dict)
    """Of penstock, python and torch."""

    cpus: int = 1
    """How many this process might use."""

    machine: Mapping[str, str | int] = field(default_factory=dict)
    """What it ran on; see machine.py. Empty for runs of versions that did not keep it."""

    memory: HostMemory = field(default_factory=HostMemory)
    """The peak of this process and its descendants."""

    loaders: tuple[LoaderRecord, ...] = ()
    """In the order they were made."""

    timeline: tuple[Moment, ...] = ()
    """The run over time."""

    findings: tuple[Finding, ...] = ()
    """What was found about it, what costs most first."""

    ranks: tuple[RankRecord, ...] = ()
    """In order, where there were several; empty for a program that ran alone."""

    baseline: Baseline | None = None
    """The comparison with torch's own loader, where one was asked for."""


def as_json(record: RunRecord) -> dict[str, Any]:
    """Return the object that run.json holds."""
    return {
        "schema": SCHEMA,
        "versions": dict(record.versions),
        "command": list(record.command),
        "started": record.started,
        "began_unix_ns": record.began_unix_ns,
        "wall_s": record.wall_s,
        "exit": {"code": record.exit_code, "error": record.error},
        "host": {"cpus": record.cpus, "machine": dict(record.machine), "memory": asdict(record.memory)},
        "totals": _totals(record),
        "loaders": [
            {
                "name": loader.name,
                "rank": loader.rank,
                "settings": dict(loader.settings),
                **_rates(loader.statistics),
                "statistics": asdict(loader.statistics),
            }
            for loader in record.loaders
        ],
        "timeline": [asdict(moment) for moment in record.timeline],
        "findings": [asdict(finding) for finding in record.findings],
        "ranks": [asdict(rank) for rank in record.ranks],
        "baseline": asdict(record.baseline) if record.baseline is not None else None,
    }


def from_json(data: Any) -> RunRecord:
    """Return the record that `as_json` made `data` from.

    Fields that this version does not know are ignored, so that a newer penstock's runs can be read.

    Raises:
        OptionError: `data` is no run, or one of another schema.
    """
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise OptionError(f"not a run of penstock: the schema is {schema!r}, not {SCHEMA!r}; give a saved run.json")
    try:
        return RunRecord(
            command=tuple(data["command"]),
            started=data["started"],
            began_unix_ns=data.get("began_unix_ns", 0),
            wall_s=data["wall_s"],
            exit_code=data["exit"]["code"],
            error=data["exit"]["error"],
            versions=data["versions"],
            cpus=data["host"]["cpus"],
            machine=data["host"].get("machine", {}),
            memory=_known(HostMemory, data["host"]["memory"]),
            loaders=tuple(
                LoaderRecord(
                    name=loader["name"],
                    settings=loader["settings"],
                    statistics=_statistics(loader["statistics"]),
                    rank=loader.get("rank"),
                )
                for loader in data["loaders"]
            ),
            timeline=tuple(map(_moment, data.get("timeline", ()))),
            findings=tuple(_known(Finding, finding) for finding in data.get("findings", ())),
            ranks=tuple(_known(RankRecord, rank) for rank in data.get("ranks", ())),
            baseline=_baseline(data["baseline"]) if data.get("baseline") is not None else None,
        )
    except (KeyError, TypeError) as exc:
        raise OptionError(f"a broken run: {exc!r} while reading it; make it again with `penstock run`") from exc


def save(record: RunRecord, file: Path) -> None:
    """Write run.json, whole or not at all.

    Raises:
        OptionError: it cannot be written there.
    """
    write_whole(file, json.dumps(as_json(record), indent=2, default=repr) + "\n", "--json FILE")


def load(file: Path) -> RunRecord:
    """Read run.json.

    Raises:
        OptionError: the file cannot be read, or holds no run.
    """
    try:
        return from_json(json.loads(file.read_text(encoding="utf-8")))
    except OSError as exc:
        raise OptionError(f"{file}: {os.strerror(exc.errno or 0)}; give a run.json that `penstock run` wrote") from exc
    except ValueError as exc:  # OptionError is one of them
        raise OptionError(f"{file}: {exc}") from exc


def _rates(statistics: LoaderStatistics) -> dict[str, float]:
    return {
        "loop_s": rates.loop_s(statistics),
        "samples_per_s": rates.samples_per_s(statistics),
        "waited_share": rates.waited_share(statistics),
    }


def _totals(record: RunRecord) -> dict[str, Any]:
    every = [loader.statistics for loader in record.loaders]
    loop_s = sum(map(rates.loop_s, every))
    samples = sum(one.samples for one in every)
    return {
        "batches": sum(one.batches for one in every),
        "samples": samples,
        "nbytes": sum(one.nbytes for one in every),
        "loop_s": loop_s,
        "samples_per_s": rates.of_ranks(record.ranks) if record.ranks else samples / loop_s if loop_s else 0.0,
        "waited_share": sum(map(rates.loading_s, every)) / loop_s if loop_s else 0.0,
        "stages": asdict(rates.total_stages(one.stages for one in every)),
    }


def _statistics(data: Mapping[str, Any]) -> LoaderStatistics:
    lists = {name: tuple(data[name]) for name in ("quarantined", "skipped_indices")}
    nested = {"stages": _known(StageTimes, data["stages"]), "ring": _known(RingCounts, data["ring"])}
    return _known(LoaderStatistics, {**data, **lists, **nested})


def _baseline(data: Mapping[str, Any]) -> Baseline:
    ways = {way: None if data[way] is None else _known(Stretch, data[way]) for way in ("torch", "penstock")}
    return _known(Baseline, {**data, **ways})


def _moment(data: Mapping[str, Any]) -> Moment:
    return _known(Moment, {**data, "stages": _known(StageTimes, data["stages"])})


def _known(kind: type[_Data], data: Mapping[str, Any]) -> _Data:
    """Make a dataclass of `kind` from those entries of `data` that it has fields for."""
    names = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in data.items() if name in names})
