"""The note that a worker on a Ray cluster keeps in its machine's temporary folder: which sample it is making.

It is a file of 16 bytes, mapped by the worker, and outlives it. Ray starts a process on that machine to read it, so
this file imports nothing that takes time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
import time
from pathlib import Path

_FORMAT = struct.Struct("<qq")
"""The task being made, and its row."""

_NAME = "penstock-worker-"
_STALE_S = 3600.0


class CrashNote:
    """The note of this process."""

    def __init__(self) -> None:
        _sweep()
        descriptor, self.path = tempfile.mkstemp(prefix=f"{_NAME}{os.getpid()}-")
        try:
            os.truncate(descriptor, _FORMAT.size)
            self._memory = mmap.mmap(descriptor, _FORMAT.size)
        finally:
            os.close(descriptor)
        self.write(-1, 0)  # no task yet

    def write(self, seq: int, row: int) -> None:
        """Note which task is being made, and which of its rows."""
        _FORMAT.pack_into(self._memory, 0, seq, row)

    def remove(self) -> None:
        """Remove the file; called when this process ends normally."""
        Path(self.path).unlink(missing_ok=True)


def read_note(path: str) -> tuple[int, int]:
    """Return the task and the row that a dead worker of this machine was making, and remove its note."""
    note = Path(path)
    seq, row = _FORMAT.unpack(note.read_bytes())
    note.unlink()
    return int(seq), int(row)


def _sweep() -> None:
    """Remove old notes of workers that were killed together with everybody who would have read them."""
    for path in Path(tempfile.gettempdir()).glob(f"{_NAME}*"):
        pid = path.name.removeprefix(_NAME).partition("-")[0]
        with contextlib.suppress(OSError):  # another worker sweeps as well, or it is another user's
            if not Path("/proc", pid).exists() and time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()
