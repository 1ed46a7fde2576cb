"""What each rank of a run has written so far: one file for each, from which whoever ends last makes one report.

    <folder>/ranks-<launch>/<rank>.json     {"pid", "born", "ended": whether nothing will follow, "record": run.json's}

Nobody waits for anybody: every rank that ends puts together what is there, and the last one to end finds all of it. A
rank that is killed leaves what it wrote last.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.core.ranks import Ranks
from penstock.observe.beacon import born
from penstock.observe.merge import merged
from penstock.observe.record import RunRecord, as_json, from_json

_KILLED = "it was killed, or left by os._exit: the counts are those of its last seconds"


@dataclass(frozen=True, slots=True)
class Ending:
    """What there is when a rank ends."""

    record: RunRecord | None
    """Of all ranks that have written something; None when none has."""

    is_last: bool
    """Whether no other rank runs any more."""


class Parts:
    """This rank's part, and a view of the others'.

    Args:
        folder: the user's own.
        ranks: this process's place among them.
    """

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._ranks = ranks
        self._pid = os.getpid()
        self._born = born(self._pid)
        self._folder = folder / f"ranks-{ranks.launch or self._pid}"

    def begin(self) -> None:
        """Say that this rank runs, and remove what runs that were killed have left."""
        with contextlib.suppress(OSError):
            for other in self._folder.parent.glob("ranks-*"):
                if not any(_runs(part) for part in _read(other).values()):
                    shutil.rmtree(other, ignore_errors=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._write(None, ended=False)

    def keep(self, record: RunRecord) -> None:
        """Write what has been counted so far."""
        with contextlib.suppress(OSError):
            self._write(record, ended=False)

    def end(self, record: RunRecord | None) -> Ending:
        """Write what has been counted in all, and return what all ranks have.

        Args:
            record: None for what was kept last; for a process that ended without a word.
        """
        try:
            with self._lock():
                return self._end(record)
        except OSError:  # a full disk, or somebody has cleaned up
            return Ending(record, True)

    def remove(self) -> None:
        """Remove all ranks' parts, now that the last one's report is written: whoever is killed before is reported."""
        shutil.rmtree(self._folder, ignore_errors=True)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, record: RunRecord | None) -> Ending:
        parts = _read(self._folder)
        own = self._ranks.rank
        missing = {}
        if record is None:
            part = parts.get(own, {"record": None, "ended": False})
            record = from_json(part["record"]) if part["record"] is not None else None
            if not part["ended"]:
                missing[own] = _KILLED
                record = replace(record, error=_KILLED) if record is not None else None
        self._write(record, ended=True)
        records = {own: record} if record is not None else {}
        is_last = True
        for rank in self._ranks.local_ranks:
            if rank == own:
                continue
            other = parts.get(rank)
            if other is None:
                missing[rank] = "it never began"
                continue
            if other["record"] is not None:
                records[rank] = from_json(other["record"])
            if _runs(other):
                is_last = False
                missing[rank] = "it was still running"
            elif not other["ended"] or rank not in records or records[rank].exit_code is None:
                missing[rank] = _KILLED
        if not records:
            return Ending(None, is_last)
        return Ending(merged(records, missing) if self._ranks.world_size > 1 else records[own], is_last)

    def _write(self, record: RunRecord | None, *, ended: bool) -> None:
        part = {
            "pid": self._pid,
            "born": self._born,
            "ended": ended,
            "record": None if record is None else as_json(record),
        }
        file = self._folder / f"{self._ranks.rank}.json"
        partial = file.with_suffix(".partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            text = memoryview(json.dumps(part, default=repr).encode())
            while text:
                text = text[os.write(descriptor, text) :]
        finally:
            os.close(descriptor)
        os.replace(partial, file)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Let one rank end at a time. The lock dies with its process, and no child inherits it."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _read(folder: Path) -> dict[int, dict[str, Any]]:
    found = {}
    for file in folder.glob("[0-9]*.json"):
        with contextlib.suppress(OSError, ValueError):
            found[int(file.stem)] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _runs(part: dict[str, Any]) -> bool:
    return not part["ended"] and part["born"] is not None and born(part["pid"]) == part["born"]
