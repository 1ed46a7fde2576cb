"""Rows at the bottom of a terminal that stay in place while everything else scrolls.

The rows lie outside the terminal's scroll region (DECSTBM), as a package manager's progress line does. Output of the
program, its workers, C libraries and other progress bars scrolls above them, so stdout needs no wrapper. Each update is
one write to the descriptor, marked as a synchronized update: a terminal that knows the mark never shows half-drawn
rows, others ignore it.
Sources: the control sequences of xterm and of the DEC VT100 it follows (CSI r, ESC 7, ESC 8, ESC D, CSI K);
synchronized output (private mode 2026).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

_MIN_ROWS = 4
_SAVE, _RESTORE = "\x1b7", "\x1b8"
_WIPE, _DOWN, _PLAIN = "\x1b[K", "\x1bD", "\x1b[m"
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"


class StatusRows:
    """The last rows of the terminal on descriptor `fd`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._claimed: tuple[os.terminal_size, int] | None = None

    @staticmethod
    def fits(fd: int) -> bool:
        """Return whether `fd` is a terminal that is high enough and knows the control sequences."""
        try:
            return (
                os.isatty(fd)
                and os.environ.get("TERM", "dumb") != "dumb"
                and os.get_terminal_size(fd).lines >= _MIN_ROWS
            )
        except OSError:
            return False

    def size(self) -> os.terminal_size:
        """Return the terminal's size; all zero if the terminal is gone."""
        try:
            return os.get_terminal_size(self._fd)
        except OSError:
            return os.terminal_size((0, 0))

    def show(self, lines: Sequence[str]) -> None:
        """Replace the rows' content by `lines`, none of which is wider than the terminal."""
        size = self.size()
        if size.lines < _MIN_ROWS:
            return
        count = len(lines)
        claim = ""
        if self._claimed != (size, count):
            if self._claimed is not None and self._claimed[0] == size:
                claim = self._release()
            # Down first (ESC D keeps the column), so that the cursor is not in a claimed row; and back up afterwards.
            claim += f"{_DOWN * count}{_SAVE}\x1b[1;{size.lines - count}r{_RESTORE}\x1b[{count}A"
        self._claimed = size, count
        first = size.lines - count + 1
        rows = "".join(f"\x1b[{first + number};1H{line}{_PLAIN}{_WIPE}" for number, line in enumerate(lines))
        self._write(f"{claim}{_SAVE}{rows}{_RESTORE}")

    def close(self) -> None:
        """Clear the rows and return them to the scroll region."""
        if self._claimed is not None:
            self._write(self._release())
            self._claimed = None

    def _release(self) -> str:
        assert self._claimed is not None
        size, count = self._claimed
        rows = "".join(f"\x1b[{row};1H{_WIPE}" for row in range(size.lines - count + 1, size.lines + 1))
        return f"{_SAVE}\x1b[r{rows}{_RESTORE}"

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone; the program must not notice
            os.write(self._fd, f"{_BEGIN}{text}{_END}".encode())
