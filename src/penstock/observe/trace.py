"""A run as a trace for Perfetto, chrome://tracing and whatever else reads torch.profiler's.

The format is Chrome's trace-event JSON: complete events ("X") for what took time, counters ("C") for what has a
value, metadata ("M") for names; `ts` and `dur` are microseconds. The time base is torch.profiler's (clock.py), so
that both files show the same moment at the same place, and `merge` puts them into one.
Source: "Trace Event Format", the Chromium project's document of 2016.
"""

from __future__ import annotations

import datetime
import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import OptionError
from penstock.core.events import Event
from penstock.observe.clock import Clock, trace_base_ns
from penstock.observe.course import course_of
from penstock.observe.record import RunRecord
from penstock.observe.whole_file import write_whole

_TRACKS = 1 << 30
"""Above every thread's number: tracks of ours among the training process's threads."""

_WORDS = {"step": "step", "next": "next batch", "wait": "wait", "make": "make batch"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Trace events, and when their `ts` is 0."""

    base_ns: int
    """In nanoseconds since 1970."""

    events: tuple[dict[str, Any], ...]
    """As they are written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderEvents:
    """What happened to the batches of one loader."""

    name: str
    """Of the loader."""

    events: tuple[Event, ...]
    """As they came."""

    dropped: int = 0
    """Events from the middle of the run that there was no room for."""


def of_events(loaders: Sequence[LoaderEvents], clock: Clock, pid: int) -> Trace:
    """Return the trace of a run whose training process was `pid`."""
    base_ns = trace_base_ns(clock.unix_ns)
    found: list[dict[str, Any]] = []
    for number, loader in enumerate(loaders):
        tracks: dict[tuple[int, int], str] = {}
        for event in loader.events:
            process, thread, name = _track(event, number, loader.name, pid)
            tracks[process, thread] = name
            place = {"pid": process, "tid": thread}
            found += _slices(event, place, lambda stamp: _micros(clock.unix_of(stamp), base_ns))
        found += _names(tracks, pid)
        if loader.dropped:
            words = f"penstock: loop over {loader.name} ({loader.dropped} events of its middle are left out)"
            found.append(_meta("thread_name", pid, _TRACKS + 1000 * number, words))
    return Trace(base_ns=base_ns, events=tuple(found))


def of_timeline(record: RunRecord, pid: int = 0) -> Trace:
    """Return the counters of a saved run: throughput, shares, queue, memory."""
    began_ns = record.began_unix_ns or _parsed_ns(record.started)
    base_ns = trace_base_ns(began_ns)
    found = [_meta("process_name", pid, 0, f"penstock: {' '.join(record.command)}")]

    def count(name: str, at_s: float, **values: float) -> None:
        ts = _micros(began_ns + round(at_s * 1e9), base_ns)
        found.append({"ph": "C", "cat": "penstock", "name": name, "pid": pid, "tid": 0, "ts": ts, "args": values})

    for span in course_of(record.timeline).spans:
        count("samples/s", span.from_s, samples_per_s=span.samples_per_s)
        count("loop, share of the time", span.from_s, step=span.step, waiting=span.waiting, transport=span.transport)
        count("busy workers", span.from_s, reading=span.reading, collating=span.collating)
    for moment in record.timeline:
        count("batches", moment.at_s, ready=moment.ready, held=moment.held)
        memory = {"slots": moment.slots_nbytes, "host": moment.host_nbytes, "device": moment.device_nbytes}
        known = {name: nbytes for name, nbytes in memory.items() if nbytes is not None}
        for name, nbytes in known.items():
            count(f"memory, bytes: {name}", moment.at_s, nbytes=nbytes)
    return Trace(base_ns=base_ns, events=tuple(found))


def merged(first: Trace, others: Iterable[Trace]) -> Trace:
    """Return one trace of all events, on the base of the first."""
    events = list(first.events)
    for other in others:
        shift = (other.base_ns - first.base_ns) / 1000
        events += [{**event, "ts": event["ts"] + shift} if "ts" in event else event for event in other.events]
    return Trace(base_ns=first.base_ns, events=tuple(events))


def read(file: Path) -> Trace:
    """Read a trace, of ours or of torch.profiler's, plain or gzipped.

    Raises:
        OptionError: the file cannot be read, or holds no trace with a time base.
    """
    try:
        data = file.read_bytes()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        found = json.loads(text)
        return Trace(base_ns=int(found["baseTimeNanoseconds"]), events=tuple(found["traceEvents"]))
    except OSError as exc:
        raise OptionError(f"{file} cannot be read ({exc}); give a trace that torch.profiler or penstock wrote") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise OptionError(
            f"{file} holds no trace with traceEvents and baseTimeNanoseconds ({exc!r}); give one that torch.profiler's "
            "export_chrome_trace or `penstock run --trace` wrote"
        ) from exc


def write(trace: Trace, file: Path, *, merge: Sequence[Path] = ()) -> None:
    """Write `trace` to `file`, with the traces of the files `merge` in it.

    Raises:
        OptionError: one of the files cannot be read or written.
    """
    whole = merged(trace, map(read, merge))
    data = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": whole.base_ns,
        "traceEvents": list(whole.events),
    }
    write_whole(file, json.dumps(data, separators=(",", ":"), default=repr) + "\n", "--trace FILE")


# ── events ──────────────────────────────────────────────────────────────────────────────────────────────────


def _track(event: Event, number: int, loader: str, pid: int) -> tuple[int, int, str]:
    """Return process, thread and name of the line that an event lies on."""
    if event.worker < 0:
        return pid, _TRACKS + 1000 * number, f"penstock: loop over {loader}"
    name = f"worker {event.worker} of {loader}"
    if event.pid:
        return event.pid, event.pid, name
    return pid, _TRACKS + 1000 * number + 1 + event.worker, f"penstock: {name}"


def _slices(event: Event, place: dict[str, int], micros: Any) -> list[dict[str, Any]]:
    began, ended = micros(event.began_ns), micros(event.ended_ns)
    about: dict[str, Any] = {"epoch": event.epoch, "batch": event.batch}
    if event.kind == "make":
        about |= {
            "first row": event.row,
            "samples": event.samples,
            "fetch_ms": event.fetch_ns / 1e6,
            "collate_ms": event.collate_ns / 1e6,
        }
    name = _WORDS[event.kind] + (f" {event.batch}" if event.kind != "wait" else "")
    found = [_slice(name, began, ended, place, about)]
    if event.kind == "make":
        # In sum: where rows are written one by one, the two alternate.
        turn = micros(event.began_ns + event.fetch_ns)
        found.append(_slice("read and decode (in sum)", began, turn, place, {}))
        found.append(_slice("collate (in sum)", turn, ended, place, {}))
    return found


def _slice(name: str, began: float, ended: float, place: dict[str, int], about: dict[str, Any]) -> dict[str, Any]:
    duration = round(ended - began, 3)
    return {"ph": "X", "cat": "penstock", "name": name, "ts": began, "dur": duration, **place, "args": about}


def _names(tracks: dict[tuple[int, int], str], pid: int) -> list[dict[str, Any]]:
    found = []
    for (process, thread), name in tracks.items():
        found.append(_meta("thread_name", process, thread, name))
        if process != pid:
            found.append(_meta("process_name", process, thread, f"penstock {name}"))
    return found


def _meta(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _micros(unix_ns: int, base_ns: int) -> float:
    return (unix_ns - base_ns) / 1000


def _parsed_ns(started: str) -> int:
    try:
        return round(datetime.datetime.fromisoformat(started).timestamp() * 1e9)
    except ValueError:
        return 0
