"""Status files: one small file per running process, for `penstock watch` and for the supervisor that draws the panel.

    <folder>/<pid>.json     {"start_ticks": the process's start, see process_state.py; "unix_s": when the file was
                             written, in seconds since 1970; "snapshot": {...}, see live_snapshot.py}

The folder is accessible to the user only: `penstock` in XDG_RUNTIME_DIR, or `penstock-UID` in the folder for temporary
files. A file is replaced as a whole, and removed when its run ends. A killed run leaves its file behind; the next
reader of the folder removes it.
Source: the XDG Base Directory Specification on $XDG_RUNTIME_DIR.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import OptionError
from penstock.observe.live import live_snapshot
from penstock.observe.live.live_snapshot import LiveSnapshot
from penstock.observe.meters.process_state import start_ticks


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusRecord:
    """A snapshot that was read from a status file."""

    snapshot: LiveSnapshot
    """The state of the run."""

    unix_s: float
    """When it was written, in seconds since 1970."""


class StatusFile:
    """This process's status file.

    Args:
        folder: where it lies, see `private_folder`.
    """

    def __init__(self, folder: Path) -> None:
        self._pid = os.getpid()
        self._start_ticks = start_ticks(self._pid)
        self.path = folder / f"{self._pid}.json"
        self._partial = folder / f".{self._pid}.json"

    def write(self, snapshot: LiveSnapshot) -> None:
        """Replace the file. Errors such as a full disk are ignored: they must not disturb the run."""
        data = {
            "start_ticks": self._start_ticks,
            "unix_s": time.time(),
            "snapshot": live_snapshot.as_json(snapshot),
        }
        text = json.dumps(data)
        with contextlib.suppress(OSError):
            # os.open, not open: a fork could copy a locked Python file object.
            descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
            os.replace(self._partial, self.path)

    def close(self) -> None:
        """Remove the file."""
        for file in (self.path, self._partial):
            with contextlib.suppress(OSError):
                file.unlink()


def private_folder() -> Path:
    """Return the folder for status files, created if it is missing.

    Raises:
        OptionError: the folder cannot be created, or others have access to it.
    """
    if not hasattr(os, "getuid"):
        raise OptionError("Windows has no folder that only this user can access by its mode; live numbers need Linux")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.path.isabs(runtime) and os.access(runtime, os.W_OK | os.X_OK):
        folder = Path(runtime) / "penstock"
    else:
        folder = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as exc:
        raise OptionError(f"{folder} cannot be created: {os.strerror(exc.errno or 0)}; set XDG_RUNTIME_DIR") from exc
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OptionError(
            f"{folder} must be a folder that only this user can access; remove it, or set XDG_RUNTIME_DIR"
        )
    return folder


def active_runs(folder: Path) -> list[StatusRecord]:
    """Return the status of every running process, ordered by pid; remove the files of runs that are over."""
    files = sorted((file for file in folder.glob("*.json") if file.stem.isdecimal()), key=lambda file: int(file.stem))
    return [status for file in files if (status := read_status(file)) is not None]


def read_status(file: Path) -> StatusRecord | None:
    """Return the content of a status file. If its run is over, remove the file and return None."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        status = StatusRecord(snapshot=live_snapshot.from_json(data["snapshot"]), unix_s=float(data["unix_s"]))
        is_alive = start_ticks(status.snapshot.pid) == data["start_ticks"]
    except OSError:
        return None
    except (ValueError, KeyError, TypeError):
        is_alive, status = False, None
    if not is_alive:
        with contextlib.suppress(OSError):
            file.unlink()
        return None
    return status
