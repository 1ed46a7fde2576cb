"""Rank files: each rank saves its record so far, and the rank that ends last merges them into one report.

    <folder>/ranks-<launch>/<rank>.json     {"pid", "start_ticks": see process_state.py,
                                             "ended": whether the record is final, "record": as in run.json, or null}

    <folder>/ranks-<launch>/reported        the rank that writes the report of all
    <folder>/ranks-<launch>/kept            locked by each supervisor while it lives: a run that begins must not
                                            remove what the supervisor of a killed run is about to report

No rank waits for another. Every rank that ends merges the records that exist, and the last one finds all of them. A
killed rank leaves the record that it saved last: the first when it begins, later ones while it loads. Where several are
killed at once, the first whose supervisor notices is the last rank that ends, since nobody runs any more; the others
have nothing to add. A launcher ends the ranks that are left when one fails, so a rank may be killed while it writes the
report: then its supervisor writes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.core.ranks import Ranks
from penstock.observe.meters.process_state import start_ticks
from penstock.observe.record.merge_ranks import merge_ranks
from penstock.observe.record.run_record import RunRecord, as_json, from_json

_KILLED = "it was killed, or called os._exit: its counters are those of its last seconds"


@dataclass(frozen=True, slots=True)
class FinalState:
    """The records that exist when a rank ends."""

    record: RunRecord | None
    """The merged record of all ranks that have saved one; None if none has."""

    is_last: bool
    """Whether no other rank runs."""


class RankFiles:
    """This rank's file, and the files of the other ranks.

    Args:
        folder: accessible to the user only.
        ranks: this process's rank.
    """

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._ranks = ranks
        self._pid = os.getpid()
        self._start_ticks = start_ticks(self._pid)
        self._folder = folder / f"ranks-{ranks.launch or self._pid}"

    def begin(self, record: RunRecord | None = None) -> None:
        """Create this rank's file, with a first record, and remove the files of runs that were killed."""
        with contextlib.suppress(OSError), _locked(self._folder.parent):
            for other in self._folder.parent.glob("ranks-*"):
                # Never this run's own folder: another rank may have created it and not written its file yet.
                is_own = other == self._folder
                if not is_own and not any(map(_is_running, _read(other).values())) and not _is_kept(other):
                    shutil.rmtree(other, ignore_errors=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._write(record, ended=False)

    def keep(self) -> None:
        """Keep all ranks' files while this process lives: the supervisor's, which reports them if the run is killed."""
        import fcntl

        with contextlib.suppress(OSError):
            kept = os.open(self._folder / "kept", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(kept, fcntl.LOCK_SH)  # until the descriptor is closed, when the process ends

    def save(self, record: RunRecord) -> None:
        """Save the record so far."""
        with contextlib.suppress(OSError):
            self._write(record, ended=False)

    def end(self, record: RunRecord | None) -> FinalState:
        """Save the final record, and return the state of all ranks.

        Args:
            record: None for the one that was saved last, for a process that was killed.
        """
        try:
            with self._lock():
                return self._end(record)
        except OSError:  # the disk is full, or somebody has removed the folder
            return FinalState(record, True)

    def remove(self) -> None:
        """Remove all ranks' files. Called after the report is written, so that a rank killed before is reported."""
        shutil.rmtree(self._folder, ignore_errors=True)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, record: RunRecord | None) -> FinalState:
        reported = self._folder / "reported"
        entries, own = _read(self._folder), self._ranks.rank
        if record is None and _text(reported) not in ("", str(own)):
            return FinalState(None, False)
        missing: dict[int, str] = {}
        if record is None:
            record, missing = self._saved_record(entries)
        self._write(record, ended=True)
        records = {own: record} if record is not None else {}
        is_last = True
        for rank in self._ranks.local_ranks:
            if rank == own:
                continue
            entry = entries.get(rank)
            if entry is None:
                missing[rank] = "it never started"
                continue
            if entry["record"] is not None:
                records[rank] = from_json(entry["record"])
            if _is_running(entry):
                is_last = False
                missing[rank] = "it was still running"
            elif not entry["ended"] or rank not in records or records[rank].exit_code is None:
                missing[rank] = _KILLED
        if not records:
            return FinalState(None, is_last)
        if is_last:
            reported.write_text(str(own))
        return FinalState(merge_ranks(records, missing) if self._ranks.world_size > 1 else records[own], is_last)

    def _saved_record(self, entries: dict[int, dict[str, Any]]) -> tuple[RunRecord | None, dict[int, str]]:
        """Return what this rank saved last, and why it is incomplete."""
        own = self._ranks.rank
        entry = entries.get(own, {"record": None, "ended": False})
        record = from_json(entry["record"]) if entry["record"] is not None else None
        if entry["ended"]:
            return record, {}
        if record is None:
            return None, {own: _KILLED}
        wall_s = max(record.wall_s, time.time() - record.started_unix_ns / 1e9)  # until now, rather than when it saved
        return replace(record, error=_KILLED, wall_s=wall_s), {own: _KILLED}

    def _write(self, record: RunRecord | None, *, ended: bool) -> None:
        entry = {
            "pid": self._pid,
            "start_ticks": self._start_ticks,
            "ended": ended,
            "record": None if record is None else as_json(record),
        }
        file = self._folder / f"{self._ranks.rank}.json"
        partial = file.with_suffix(".partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            text = memoryview(json.dumps(entry, default=repr).encode())
            while text:
                text = text[os.write(descriptor, text) :]
        finally:
            os.close(descriptor)
        os.replace(partial, file)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Let one rank end at a time. A record lock dies with its process, and no child inherits it."""
        import fcntl  # not on Windows, where there is no private folder and so no file of a rank

        self._folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _read(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the content of all rank files, by rank."""
    entries = {}
    for file in folder.glob("[0-9]*.json"):
        with contextlib.suppress(OSError, ValueError):
            entries[int(file.stem)] = json.loads(file.read_text(encoding="utf-8"))
    return entries


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one run at a time begin: what it has made and not filled yet does not look like a killed one's."""
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_kept(folder: Path) -> bool:
    import fcntl

    try:
        with (folder / "kept").open() as kept:
            fcntl.flock(kept, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:  # a run without a supervisor, or one that has removed its files
        return False
    except BlockingIOError:
        return True
    return False


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""


def _is_running(entry: dict[str, Any]) -> bool:
    ticks = entry.get("start_ticks")  # missing in the files of another version
    return ticks is not None and not entry["ended"] and start_ticks(entry["pid"]) == ticks
