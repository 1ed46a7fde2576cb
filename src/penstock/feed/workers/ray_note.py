"""The note that a worker on a Ray cluster keeps in its machine's temporary folder: which sample it is making.

It is a file of 16 bytes, mapped by the worker, and outlives it. Whoever reads it is a process of that machine that Ray
starts for this, so that this file imports nothing that takes time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
import time
from pathlib import Path

_FORM = struct.Struct("<qq")
"""The piece being made, and its row."""

_NAME = "penstock-worker-"
_STALE_S = 3600.0


class Note:
    """The note of this process."""

    def __init__(self) -> None:
        _sweep()
        descriptor, self.path = tempfile.mkstemp(prefix=f"{_NAME}{os.getpid()}-")
        try:
            os.truncate(descriptor, _FORM.size)
            self._memory = mmap.mmap(descriptor, _FORM.size)
        finally:
            os.close(descriptor)
        self.write(-1, 0)  # no piece's: a process that dies before its first one was making none

    def write(self, seq: int, row: int) -> None:
        """Note which piece is being made, and which of its rows."""
        _FORM.pack_into(self._memory, 0, seq, row)

    def remove(self) -> None:
        """Remove the file: this process ends as it should."""
        Path(self.path).unlink(missing_ok=True)


def read_note(path: str) -> tuple[int, int]:
    """Return the piece and the row that a dead worker of this machine was making, and remove its note."""
    note = Path(path)
    seq, row = _FORM.unpack(note.read_bytes())
    note.unlink()
    return int(seq), int(row)


def _sweep() -> None:
    """Remove notes of workers that ended long ago without removing theirs: killed, with nobody left to read it."""
    for path in Path(tempfile.gettempdir()).glob(f"{_NAME}*"):
        pid = path.name.removeprefix(_NAME).partition("-")[0]
        with contextlib.suppress(OSError):  # another worker sweeps as well, or it is another user's
            if not Path("/proc", pid).exists() and time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()
