"""The journal of a conversion: what is done for good, so that the same command goes on where a kill left off.

`journal.jsonl` in the ".partial" folder holds a JSON object per line, each appended and synced before the next:

    {"is": "begun", "version": 1, "settings": {...}}        the source's files, sizes and times, and all options
    {"is": "looked", "number": 3, ...}                      a part of the source has been looked through
    {"is": "planned", "schema": ..., "counts": ..., "cuts": ...}   what is written, and into which segments
    {"is": "wrote", "number": 7, "crc32": ..., ...}         segment 7 lies in its file, synced, with these bytes
    {"is": "joined", "number": 2, ...}                      so does file 2 of the result
    {"is": "finished", "files": [...]}                      all of the result is there, and gets its names now

A line that a kill cut off is dropped. Files that no line proves are thrown away.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import zlib
from typing import Any

from penstock.core.errors import SourceError
from penstock.feed.convert.target import sync_folder

_VERSION = 1
_ORPHANS_S = 10.0
"""How long workers of a conversion that was killed may take to be gone."""
_PIECE = 1 << 20


class Journal:
    """The folder of one conversion, locked, and its journal.

    Args:
        folder: is made if it is not there.
        settings: what must be the same for going on: JSON.

    Raises:
        SourceError: another conversion is at work there, or left it with other settings.
    """

    def __init__(self, folder: str, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.lock = _locked(folder)
        """A descriptor that holds the folder as long as any process has it open: workers inherit it."""
        self._path = os.path.join(folder, "journal.jsonl")
        try:
            self.entries = self._load()
            self.is_resumed = bool(self.entries)
            self._file = open(self._path, "ab")  # noqa: SIM115 - held until close
        except BaseException:
            os.close(self.lock)
            raise
        try:
            if not self.entries:
                self.append("begun", version=_VERSION, settings=settings)
                sync_folder(folder)
                sync_folder(os.path.dirname(folder) or ".")
            else:
                self._agree(settings)
        except BaseException:
            self.close()
            raise

    def append(self, what: str, **values: Any) -> None:
        """Write a line, and have it on the disk."""
        entry = {"is": what, **values}
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.entries.append(entry)

    def all(self, what: str) -> list[dict[str, Any]]:
        """Return the entries of a kind."""
        return [entry for entry in self.entries if entry["is"] == what]

    def last(self, what: str) -> dict[str, Any] | None:
        """Return the last entry of a kind."""
        found = self.all(what)
        return found[-1] if found else None

    def close(self) -> None:
        """Let go of the folder."""
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
            raise SourceError(f"{self._path} is damaged ({error}); remove {self.folder} to begin anew") from error

    def _agree(self, settings: dict[str, Any]) -> None:
        settings = json.loads(json.dumps(settings))  # tuples are lists there
        begun = self.entries[0]
        then = begun.get("settings", {})
        if begun.get("version") != _VERSION:
            raise SourceError(f"{self.folder} is of another version of penstock; remove it to begin anew")
        for name in settings:
            if name == "errors" and settings[name] == "skip":
                continue  # what was written without leaving anything out is right either way
            if then.get(name) != settings[name]:
                raise SourceError(
                    f"{self.folder} holds an unfinished conversion with another {name} ({_short(then.get(name))}, now "
                    f"{_short(settings[name])}); repeat that one to finish it, or remove the folder to begin anew"
                )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:100] + "..."


def _locked(folder: str) -> int:
    """Return a descriptor that locks the folder; waits for workers that outlive a killed conversion.

    Raises:
        SourceError: another process has it, and keeps it.
    """
    deadline = time.monotonic() + _ORPHANS_S
    while True:
        path = os.path.join(folder, "lock")
        try:
            os.makedirs(folder, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise SourceError(f"{folder}, where the work is to be done, cannot be made: {error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            if time.monotonic() > deadline:
                raise SourceError(
                    f"another conversion is at work in {folder}; wait for its end, or write elsewhere"
                ) from None
            time.sleep(0.05)
            continue
        if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(lock)):
            return lock
        os.close(lock)  # whoever had it has removed the folder since


def crc32_of(path: str) -> int:
    """Return the CRC-32 of a file; of a folder, that of its files' names and bytes, by name."""
    crc = 0
    for name in _files_of(path):
        crc = zlib.crc32(os.path.relpath(name, path).encode(), crc)
        with open(name, "rb") as file:
            while piece := file.read(_PIECE):
                crc = zlib.crc32(piece, crc)
    return crc


def _files_of(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [path]
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
