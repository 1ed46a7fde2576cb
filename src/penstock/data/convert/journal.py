"""The journal of a conversion: what is done, so that the same command resumes after a kill.

`journal.jsonl` in the ".partial" folder holds one JSON object per line, each appended and synced before the next:

    {"event": "started", "version": 2, "settings": {...}}    the source's files, sizes and times, and all options
    {"event": "scan_started", "ranges": ...}                 the ranges in which the source is scanned
    {"event": "range_scanned", "number": 3, ...}             range 3 has been scanned
    {"event": "planned", "schema": ..., "boundaries": ...}   what is written, and in which segments
    {"event": "segment_written", "number": 7, ...}           segment 7 is in its folder, synced, with this checksum
    {"event": "file_joined", "number": 2, ...}               so is file 2 of the result
    {"event": "finished", "folders": [...]}                  all files are complete, and are renamed next

A line that a kill cut off is dropped. Files that no line mentions are removed.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from penstock.core.errors import SourceError
from penstock.data.convert.target import sync
from penstock.data.storage.file_lock import try_lock

_VERSION = 2
_ORPHANS_S = 10.0
"""How long workers of a killed conversion may take to exit."""


class Journal:
    """The locked folder of one conversion, and its journal.

    Args:
        folder: created if it does not exist.
        settings: JSON that must be equal for a conversion to be resumed.

    Raises:
        SourceError: another conversion is running in the folder, or left it with other settings.
    """

    def __init__(self, folder: str, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.lock = _lock_folder(folder)
        """A descriptor that locks the folder as long as any process has it open; workers inherit it."""
        self._path = os.path.join(folder, "journal.jsonl")
        try:
            self.entries = self._load()
            self._file = open(self._path, "ab")  # noqa: SIM115 - contents until close
        except BaseException:
            os.close(self.lock)
            raise
        try:
            if not self.entries:
                self.append("started", version=_VERSION, settings=settings)
                sync(folder)
                sync(os.path.dirname(folder) or ".")
            else:
                self._check_settings(settings)
        except BaseException:
            self.close()
            raise

    def append(self, event: str, **values: Any) -> None:
        """Write a line, and sync it to the disk."""
        entry = {"event": event, **values}
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.entries.append(entry)

    def all(self, event: str) -> list[dict[str, Any]]:
        """Return what was appended of an event."""
        return [
            {name: value for name, value in entry.items() if name != "event"}
            for entry in self.entries
            if entry["event"] == event
        ]

    def last(self, event: str) -> dict[str, Any] | None:
        """Return the last entry of an event; None if there is none."""
        found = self.all(event)
        return found[-1] if found else None

    def close(self) -> None:
        """Close the journal and unlock the folder."""
        self._file.close()
        os.close(self.lock)

    def _load(self) -> list[dict[str, Any]]:
        if not os.path.exists(self._path):
            return []
        with open(self._path, "rb") as file:
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self._path, len(whole))
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise SourceError(f"{self._path} is damaged ({error}); remove {self.folder} to start over") from error

    def _check_settings(self, settings: dict[str, Any]) -> None:
        settings = json.loads(json.dumps(settings))  # as in the journal, where tuples are lists
        started = self.entries[0]
        recorded = started.get("settings", {})
        if started.get("version") != _VERSION:
            raise SourceError(f"{self.folder} was written by another version of penstock; remove it to start over")
        for name in settings:
            if name == "errors" and settings[name] == "skip":
                continue  # segments written without skipping records are valid either way
            if recorded.get(name) != settings[name]:
                raise SourceError(
                    f"{self.folder} holds an unfinished conversion with another {name} "
                    f"({_shorten(recorded.get(name))}, now {_shorten(settings[name])}); repeat that call to finish it, "
                    "or remove the folder to start over"
                )


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:100] + "..."


def _lock_folder(folder: str) -> int:
    """Lock the folder and return the descriptor; waits for workers that outlive a killed conversion."""
    deadline = time.monotonic() + _ORPHANS_S
    while True:
        path = os.path.join(folder, "lock")
        try:
            os.makedirs(folder, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise SourceError(f"{folder}, where the conversion works, cannot be created: {error}") from error
        if not try_lock(lock, waits=False):
            os.close(lock)
            if time.monotonic() > deadline:
                raise SourceError(f"another conversion is running in {folder}; wait until it ends, or write elsewhere")
            time.sleep(0.05)
            continue
        if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(lock)):
            return lock
        os.close(lock)  # the process that had the lock has removed the folder
