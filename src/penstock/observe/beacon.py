"""Beacons: small files in which runs under way say how they are, for `penstock watch` and for the process that draws.

    <folder>/<pid>.json     {"born": when the process started, in the kernel's ticks; "at": Unix time; "pulse": {...}}

The folder is the user's alone: `penstock` in XDG_RUNTIME_DIR, or else `penstock-UID` in the folder for temporary files.
A file is replaced whole, never changed, and is gone when its run ends. A run that was killed leaves its file behind;
whoever looks at the folder next removes it.
Source: the XDG Base Directory Specification on $XDG_RUNTIME_DIR; proc(5) on the start time in /proc/PID/stat.
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
from penstock.observe import pulse as pulses
from penstock.observe.pulse import Pulse

_PF_EXITING = 0x4
"""Of the kernel's include/linux/sched.h; the field `flags` of proc(5)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """A pulse that was read."""

    pulse: Pulse
    """What the run said of itself."""

    at: float
    """When, as Unix time."""


class Beacon:
    """This process's file.

    Args:
        folder: where it lies, see `private_folder`.
    """

    def __init__(self, folder: Path) -> None:
        self._pid = os.getpid()
        self._born = born(self._pid)
        self.file = folder / f"{self._pid}.json"
        self._partial = folder / f".{self._pid}.json"

    def show(self, pulse: Pulse) -> None:
        """Say how the run is. A full disk or a folder that has gone is no reason to disturb the run."""
        text = json.dumps({"born": self._born, "at": time.time(), "pulse": pulses.as_json(pulse)})
        with contextlib.suppress(OSError):
            # Past Python's file objects, whose locks a fork could catch.
            descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
            os.replace(self._partial, self.file)

    def close(self) -> None:
        """Take the file away."""
        for file in (self.file, self._partial):
            with contextlib.suppress(OSError):
                file.unlink()


def private_folder() -> Path:
    """Return the folder for beacons, made if need be.

    Raises:
        OptionError: it is not this user's alone, or cannot be made.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.path.isabs(runtime) and os.access(runtime, os.W_OK | os.X_OK):
        folder = Path(runtime) / "penstock"
    else:
        folder = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as exc:
        raise OptionError(f"{folder} cannot be made: {os.strerror(exc.errno or 0)}; set XDG_RUNTIME_DIR") from exc
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OptionError(f"{folder} is not a folder of this user's alone; remove it, or set XDG_RUNTIME_DIR")
    return folder


def living(folder: Path) -> list[Sighting]:
    """Return what all runs under way say, by process; remove the files of runs that are over."""
    files = sorted((file for file in folder.glob("*.json") if file.stem.isdecimal()), key=lambda file: int(file.stem))
    return [sighting for file in files if (sighting := read(file)) is not None]


def read(file: Path) -> Sighting | None:
    """Return what a beacon says, or None, and no file left, when its run is over."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        sighting = Sighting(pulse=pulses.from_json(data["pulse"]), at=float(data["at"]))
        is_alive = born(sighting.pulse.pid) == data["born"]
    except OSError:
        return None
    except (ValueError, KeyError, TypeError):
        is_alive, sighting = False, None
    if not is_alive:
        with contextlib.suppress(OSError):
            file.unlink()
        return None
    return sighting


def born(pid: int) -> int | None:
    """Return when a process started, in the kernel's ticks since boot; None when there is no such process."""
    fields = _stat(pid)
    return int(fields[19]) if fields is not None and fields[0] != "Z" else None


def is_stopped(pid: int) -> bool:
    """Return whether a process has been stopped, as by Ctrl-Z."""
    fields = _stat(pid)
    return fields is not None and fields[0] in "tT"


def is_ending(pid: int) -> bool:
    """Return whether a process has ended or is about to: the kernel closes its files before it tells anybody."""
    fields = _stat(pid)
    return fields is None or bool(int(fields[6]) & _PF_EXITING)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; the name before them may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
