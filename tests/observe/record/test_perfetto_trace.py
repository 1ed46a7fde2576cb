"""A trace lines up with torch.profiler's of the same loop, and holds what the format asks for."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import made_runs
import pytest
import torch
from sample_sets import Numbered
from torch.profiler import ProfilerActivity, profile, record_function

from penstock import DataLoader
from penstock.core.errors import OptionError
from penstock.core.events import Event
from penstock.observe.live.loader_registry import LoaderRegistry
from penstock.observe.meters.clock import Clock, read_clock, trace_base_ns
from penstock.observe.record import perfetto_trace

BATCHES, EPOCHS = 12, 2


def _traced_loop(**arguments: object) -> perfetto_trace.Trace:
    clock = read_clock()
    registry = LoaderRegistry(record_events=True)
    loader = DataLoader(Numbered(BATCHES * 4), batch_size=4, **arguments)
    registry.register(loader)
    for _ in range(EPOCHS):
        for _ in loader:
            with record_function("my step"):
                torch.ones(64, 64).sum()
    return perfetto_trace.trace_of_events([watched.events() for watched in registry.loaders], clock, os.getpid())


def _slices(events, start: str) -> list[dict]:
    found = [event for event in events if event["ph"] == "X" and event["name"].startswith(start)]
    return sorted(found, key=lambda event: event["ts"])


def _end(event: dict) -> float:
    return event["ts"] + event["dur"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it profiles
def test_our_steps_lie_around_the_profilers(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        ours = _traced_loop(num_workers=2)
    profiler.export_chrome_trace(str(tmp_path / "profile.json"))
    theirs = perfetto_trace.read_trace(tmp_path / "profile.json")
    assert theirs.base_ns == ours.base_ns
    steps, marks = _slices(ours.events, "step"), _slices(theirs.events, "my step")
    assert len(steps) == len(marks) == BATCHES * EPOCHS
    asked, handed = _slices(ours.events, "next batch"), _slices(theirs.events, "enumerate(DataLoader)")
    slack_us = (
        50  # two clocks, each read to some microseconds; a step that lay beside its mark would be milliseconds off
    )
    for step, mark in zip(steps, marks, strict=True):
        assert step["ts"] - slack_us <= mark["ts"]
        assert _end(mark) <= _end(step) + slack_us
    for next_batch in asked:
        assert any(
            next_batch["ts"] - slack_us <= inner["ts"] and _end(inner) <= _end(next_batch) + slack_us
            for inner in handed
        )


@pytest.mark.parametrize(
    ("arguments", "processes"),
    [
        ({"num_workers": 0}, 1),
        ({"num_workers": 2, "persistent_workers": True}, 3),
        ({"num_workers": 2, "worker_type": "thread"}, 1),
    ],
    ids=["inline", "process", "thread"],
)
def test_every_batch_is_made_before_it_is_handed_out(arguments: dict, processes: int) -> None:
    events = _traced_loop(**arguments).events
    made, handed = _slices(events, "make batch"), _slices(events, "next batch")
    assert len(handed) == BATCHES * EPOCHS
    assert len({event["pid"] for event in made} | {os.getpid()}) == processes
    for batch in handed:
        mine = [event for event in made if all(event["args"][key] == batch["args"][key] for key in ("epoch", "batch"))]
        assert sum(event["args"]["samples"] for event in mine) == 4
        assert all(_end(event) <= _end(batch) for event in mine)


def test_a_loader_that_nobody_traces_records_nothing() -> None:
    registry = LoaderRegistry()
    loader = DataLoader(Numbered(8), batch_size=4)
    registry.register(loader)
    list(loader)
    assert registry.loaders[0].events().events == ()


def test_slices_of_one_track_lie_inside_or_beside_one_another() -> None:
    events = [event for event in _traced_loop(num_workers=2).events if event["ph"] == "X"]
    tracks: dict[tuple[int, int], list[dict]] = {}
    for event in events:
        tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    for track in tracks.values():
        open_until: list[float] = []
        for event in sorted(track, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1] <= event["ts"] + 0.002:  # micros with three digits
                open_until.pop()
            assert not open_until or _end(event) <= open_until[-1] + 0.002
            open_until.append(_end(event))


def test_the_file_has_the_fields_of_the_format(tmp_path: Path) -> None:
    perfetto_trace.write_trace(_traced_loop(num_workers=2), tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    assert data["displayTimeUnit"] == "ms"
    needed = {"X": {"name", "cat", "ts", "dur", "pid", "tid", "args"}, "M": {"name", "pid", "args"}}
    for event in data["traceEvents"]:
        assert event.keys() >= needed[event["ph"]]
        assert event.get("dur", 0) >= 0
    names = {event["args"]["name"] for event in data["traceEvents"] if event["ph"] == "M"}
    names = {name.partition(" (test_perfetto_trace.py:")[0] for name in names}
    assert {"penstock: loop over Numbered", "worker 0 of Numbered", "penstock worker 1 of Numbered"} <= names


def test_a_trace_that_leaves_events_out_says_how_many() -> None:
    loader = perfetto_trace.LoaderEvents(name="x", events=(Event("step", 0, 5000),), dropped=7)
    names = [
        event["args"]["name"]
        for event in perfetto_trace.trace_of_events([loader], read_clock(), 1).events
        if event["ph"] == "M"
    ]
    assert names[-1] == "penstock: loop over x (7 events from the middle were dropped)"


def test_traces_of_other_bases_are_merged_at_the_same_moments(tmp_path: Path) -> None:
    clock = Clock(monotonic_ns=0, unix_ns=1_800_000_000 * 10**9)
    ours = perfetto_trace.trace_of_events(
        [perfetto_trace.LoaderEvents(name="x", events=(Event("step", 0, 5000),))], clock, pid=1
    )
    other = {"baseTimeNanoseconds": ours.base_ns - 7000, "traceEvents": [{"ph": "X", "name": "a", "ts": 7.0}]}
    (tmp_path / "other.json.gz").write_bytes(gzip.compress(json.dumps(other).encode()))
    perfetto_trace.write_trace(ours, tmp_path / "both.json", merge=[tmp_path / "other.json.gz"])
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    assert [event["ts"] for event in events if event["name"] == "a"] == [0.0]
    assert [event["dur"] for event in events if event["name"] == "step 0"] == [5.0]


def test_a_saved_runs_timeline_becomes_counters_at_its_own_time() -> None:
    run = made_runs.ordinary()
    found = perfetto_trace.trace_of_timeline(run)
    counters = [event for event in found.events if event["ph"] == "C"]
    assert {event["name"] for event in counters} >= {"samples/s", "batches", "memory, bytes: device"}
    last = max(event["ts"] for event in counters)
    assert found.base_ns + last * 1000 == pytest.approx(1_795_253_400e9 + 120e9, abs=1e6)
    assert found.base_ns == trace_base_ns(1_795_253_400 * 10**9)


@pytest.mark.parametrize("content", [None, "[]", "{", '{"traceEvents": []}'])
def test_what_is_no_trace_is_refused_with_what_to_give(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    with pytest.raises(OptionError, match=r"give (a trace|one) written by"):
        perfetto_trace.read_trace(tmp_path / "x.json")
