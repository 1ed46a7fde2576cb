"""The folder of an unfinished conversion, from which the same command resumes after a kill.

    state.json          {"version", "settings", "plan", "finished"}; replaced as a whole
    file-000002/        a complete file of the result (some formats write several), and written.json: what it holds
    new-*               what is being written; the next attempt removes it
    lock                locked as long as a process of the conversion lives

Files and folders get their names when all of their bytes are on the disk: what has a name is complete.

The folder is this user's alone (mode 0700), as its name is known to all: where the target's folder is shared, another
user may have made it before, with links to files of this user in the places that are written to, or with files of other
samples. So one that was there is used if nobody else may enter it and all in it is this user's: `private_files`.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from penstock.core.errors import SourceError
from penstock.core.private_files import check_tree, make_folder, open_file
from penstock.data.convert.canonical_bytes import DatasetChecksum
from penstock.data.convert.records import files_of
from penstock.data.convert.target import RECORD_NAME, STATE_NAME, remove, sync
from penstock.data.storage.file_lock import is_same_file, try_lock

_VERSION = 5
_ORPHANS_S = 10.0
"""How long workers of a killed conversion may take to exit."""


class PartialFolder:
    """The locked folder of one conversion.

    Args:
        path: created if it does not exist.
        settings: JSON that must be equal for a conversion to be resumed.

    Raises:
        SourceError: another conversion is running in the folder, or left it with other settings; or another user may
            have put something there.
    """

    def __init__(self, path: str, settings: dict[str, Any]) -> None:
        self.path = path
        self.lock, is_new = _lock_folder(path)
        """A descriptor that locks the folder as long as any process has it open; workers inherit it."""
        try:
            if not is_new:
                check_tree(path)
            self.state: dict[str, Any] = _read_json(os.path.join(path, STATE_NAME)) or {}
            for name in os.listdir(path):
                if name != "lock" and (not self.state or name.startswith("new-")):
                    remove(os.path.join(path, name))
            if self.state:
                self._check_settings(settings)
            else:
                self.update(version=_VERSION, settings=settings)
                sync(os.path.dirname(path) or ".")
        except BaseException:
            self.close()
            raise

    def update(self, **values: Any) -> None:
        """Add values to the state, on the disk, too."""
        self.state |= values
        path = os.path.join(self.path, STATE_NAME)
        temporary = os.path.join(self.path, f"new-{os.getpid()}-{STATE_NAME}")
        with open(open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
            json.dump(self.state, file)
        sync(temporary)
        os.replace(temporary, path)
        sync(self.path)

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self.lock)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        if self.state["version"] != _VERSION:
            raise SourceError(f"{self.path} was written by another version of penstock; remove it to start over")
        for name, value in settings.items():
            if name == "errors" and value == "skip":
                continue  # files written without skipping records are valid either way
            if (recorded := self.state["settings"].get(name)) != value:
                texts = (
                    text if len(text) <= 100 else f"{text[:100]}..." for text in map(json.dumps, (recorded, value))
                )
                raise SourceError(
                    f"{self.path} holds an unfinished conversion with another {name} ({', now '.join(texts)}); repeat "
                    "that call to finish it, or remove the folder to start over"
                )


def _lock_folder(folder: str) -> tuple[int, bool]:
    """Lock the folder; return the descriptor, and whether the folder is new.

    Waits for workers that outlive a killed conversion.
    """
    deadline = time.monotonic() + _ORPHANS_S
    path = os.path.join(folder, "lock")
    while True:
        try:
            is_new = make_folder(folder, closed=True)
            lock = open_file(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise SourceError(f"{folder}, where the conversion works, cannot be created: {error}") from error
        is_locked = try_lock(lock, waits=False)
        if is_locked and is_same_file(lock, path):
            return lock, is_new
        os.close(lock)  # another process has the lock, or had it and has removed the folder
        if not is_locked:
            if time.monotonic() > deadline:
                raise SourceError(f"another conversion is running in {folder}; wait until it ends, or write elsewhere")
            time.sleep(0.05)


@contextmanager
def atomic_folder(path: str) -> Iterator[str]:
    """Yield a new folder to write in, which is synced and renamed to `path` at the end, or removed after an error."""
    parent, name = os.path.split(path)
    temporary = os.path.join(parent, f"new-{os.getpid()}-{name}")
    os.mkdir(temporary)
    try:
        yield temporary
        for one in [*files_of(temporary), *(folder for folder, _, _ in os.walk(temporary))]:
            sync(one)
        shutil.rmtree(path, ignore_errors=True)
        os.rename(temporary, path)
        sync(parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _read_json(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class Written:
    """What a complete folder holds, as written.json in it says."""

    checksum: DatasetChecksum
    skipped: int

    def record(self, folder: str) -> None:
        """Write it to a folder."""
        with open(os.path.join(folder, RECORD_NAME), "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)

    @classmethod
    def load(cls, folder: str) -> Written | None:
        """Return what a folder's record says; None if there is no such folder."""
        entry = _read_json(os.path.join(folder, RECORD_NAME))
        return entry and cls(DatasetChecksum(**entry["checksum"]), entry["skipped"])
