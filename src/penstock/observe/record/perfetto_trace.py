"""Writes a run as a trace for Perfetto, chrome://tracing and other readers of torch.profiler's traces.

The format is Chrome's trace-event JSON: complete events ("X") for intervals, counters ("C") for values, metadata ("M")
for names; `ts` and `dur` are microseconds. The time base is torch.profiler's (clock.py), so that both traces line up,
and `merge_traces` puts them into one.
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
from penstock.core.events import Event, LoaderEvents
from penstock.observe.atomic_write import write_text_atomic
from penstock.observe.meters.clock import Clock, trace_base_ns
from penstock.observe.record.run_record import RunRecord
from penstock.observe.record.time_series import build_time_series

_FIRST_TRACK = 1 << 30
"""Thread number of the first track that is not a thread: above the number of every real thread."""

_LABELS = {"step": "step", "next": "next batch", "wait": "wait", "make": "make batch"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Trace events and their time base."""

    base_ns: int
    """The time at which `ts` is 0, in nanoseconds since 1970."""

    events: tuple[dict[str, Any], ...]
    """In the format's own form."""


def trace_of_events(loaders: Sequence[LoaderEvents], clock: Clock, pid: int) -> Trace:
    """Return the batches' events of a run as a trace; `pid` is the training process."""
    base_ns = trace_base_ns(clock.unix_ns)
    found: list[dict[str, Any]] = []
    for number, loader in enumerate(loaders):
        tracks: dict[tuple[int, int], str] = {}
        for event in loader.events:
            process, thread, name = _track(event, number, loader.name, pid)
            tracks[process, thread] = name
            track = {"pid": process, "tid": thread}
            found += _slices(event, track, lambda stamp: _micros(clock.unix_of(stamp), base_ns))
        found += _names(tracks, pid)
        if loader.dropped:
            label = f"penstock: loop over {loader.name} ({loader.dropped} events from the middle were dropped)"
            found.append(_meta("thread_name", pid, _FIRST_TRACK + 1000 * number, label))
    return Trace(base_ns=base_ns, events=tuple(found))


def trace_of_timeline(record: RunRecord) -> Trace:
    """Return the timeline of a saved run as counters: throughput, fractions of the time, queue, memory."""
    started_ns = record.started_unix_ns or _parsed_ns(record.started)
    base_ns = trace_base_ns(started_ns)
    found = [_meta("process_name", 0, 0, f"penstock: {' '.join(record.command)}")]

    def count(name: str, at_s: float, **values: float) -> None:
        ts = _micros(started_ns + round(at_s * 1e9), base_ns)
        found.append({"ph": "C", "cat": "penstock", "name": name, "pid": 0, "tid": 0, "ts": ts, "args": values})

    for span in build_time_series(record.timeline).spans:
        count("samples/s", span.from_s, samples_per_s=span.samples_per_s)
        count("loop, fraction of the time", span.from_s, step=span.step, waiting=span.waiting)
        count("busy workers", span.from_s, reading=span.reading, collating=span.collating)
    for point in record.timeline:
        count("batches", point.at_s, ready=point.ready, held=point.held)
        memory = {"slots": point.slots_nbytes, "host": point.host_nbytes, "device": point.device_nbytes}
        known = {name: nbytes for name, nbytes in memory.items() if nbytes is not None}
        for name, nbytes in known.items():
            count(f"memory, bytes: {name}", point.at_s, nbytes=nbytes)
    return Trace(base_ns=base_ns, events=tuple(found))


def merge_traces(first: Trace, others: Iterable[Trace]) -> Trace:
    """Return one trace with all events, on the time base of the first."""
    events = list(first.events)
    for other in others:
        shift = (other.base_ns - first.base_ns) / 1000
        events += [{**event, "ts": event["ts"] + shift} if "ts" in event else event for event in other.events]
    return Trace(base_ns=first.base_ns, events=tuple(events))


def read_trace(file: Path) -> Trace:
    """Read a trace of penstock or torch.profiler, plain or gzipped.

    Raises:
        OptionError: the file cannot be read, or is not a trace with a time base.
    """
    try:
        data = file.read_bytes()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        found = json.loads(text)
        return Trace(base_ns=int(found["baseTimeNanoseconds"]), events=tuple(found["traceEvents"]))
    except OSError as exc:
        raise OptionError(f"{file} cannot be read ({exc}); give a trace written by torch.profiler or penstock") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise OptionError(
            f"{file} is not a trace with traceEvents and baseTimeNanoseconds ({exc!r}); give one written by "
            "torch.profiler's export_chrome_trace or `penstock run --trace`"
        ) from exc


def write_trace(trace: Trace, file: Path, *, merge: Sequence[Path] = ()) -> None:
    """Write `trace` to `file`, merged with the traces in the files `merge`.

    Raises:
        OptionError: one of the files cannot be read or written.
    """
    whole = merge_traces(trace, map(read_trace, merge))
    data = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": whole.base_ns,
        "traceEvents": list(whole.events),
    }
    write_text_atomic(file, json.dumps(data, separators=(",", ":"), default=repr) + "\n", "--trace FILE")


# ── events ──────────────────────────────────────────────────────────────────────────────────────────────────


def _track(event: Event, number: int, loader: str, pid: int) -> tuple[int, int, str]:
    """Return the process, thread and name of an event's track."""
    if event.worker < 0:
        return pid, _FIRST_TRACK + 1000 * number, f"penstock: loop over {loader}"
    name = f"worker {event.worker} of {loader}"
    if event.pid:
        return event.pid, event.pid, name
    return pid, _FIRST_TRACK + 1000 * number + 1 + event.worker, f"penstock: {name}"


def _slices(event: Event, track: dict[str, int], micros: Any) -> list[dict[str, Any]]:
    began, ended = micros(event.began_ns), micros(event.ended_ns)
    args: dict[str, Any] = {"epoch": event.epoch, "batch": event.batch}
    if event.kind == "make":
        args |= {
            "samples": event.samples,
            "fetch_ms": event.fetch_ns / 1e6,
            "collate_ms": event.collate_ns / 1e6,
        }
    name = _LABELS[event.kind] + (f" {event.batch}" if event.kind != "wait" else "")
    found = [_slice(name, began, ended, track, args)]
    if event.kind == "make":
        # Sums: where rows are written one by one, reading and collating alternate.
        middle = micros(event.began_ns + event.fetch_ns)
        found.append(_slice("read and decode (sum)", began, middle, track, {}))
        found.append(_slice("collate (sum)", middle, ended, track, {}))
    return found


def _slice(name: str, began: float, ended: float, track: dict[str, int], args: dict[str, Any]) -> dict[str, Any]:
    duration = round(ended - began, 3)
    return {"ph": "X", "cat": "penstock", "name": name, "ts": began, "dur": duration, **track, "args": args}


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
