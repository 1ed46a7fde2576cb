"""One row at the bottom of a terminal, kept out of the way of everything that scrolls.

The row lies outside the terminal's scroll region (DECSTBM), as a package manager's progress line does. Whatever
prints, be it the program, a worker process, a C library or a progress bar of the program's own, scrolls above it, and
nobody's stdout has to be wrapped. What is written goes straight to the descriptor: a lock of Python's that a thread
held while another one forks would stay locked in the child for ever.
Source: the control sequences of xterm and of the DEC VT100 it follows (CSI r, ESC 7, ESC 8, ESC D, CSI K).
"""

from __future__ import annotations

import contextlib
import os

_LEAST_ROWS = 4
_SAVE, _RESTORE = "\x1b7", "\x1b8"
_WIPE, _COLOUR = "\x1b[K", "\x1b[36m"


class StatusRow:
    """The last row of the terminal on descriptor `fd`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._size: os.terminal_size | None = None

    @staticmethod
    def fits(fd: int) -> bool:
        """Return whether `fd` is a terminal that has a row to spare and knows the control sequences."""
        try:
            return (
                os.isatty(fd)
                and os.environ.get("TERM", "dumb") != "dumb"
                and os.get_terminal_size(fd).lines >= _LEAST_ROWS
            )
        except OSError:
            return False

    def show(self, text: str) -> None:
        """Write `text` in the row, cut to its width, in place of what was there."""
        size = os.get_terminal_size(self._fd)
        if size.lines < _LEAST_ROWS:
            return
        # Down a row first (ESC D keeps the column), so that the cursor is not on the last one; and back up afterwards.
        claim = "" if size == self._size else f"\x1bD{_SAVE}\x1b[1;{size.lines - 1}r{_RESTORE}\x1b[A"
        self._size = size
        self._write(f"{claim}{_SAVE}\x1b[{size.lines};1H{_COLOUR}{text[: size.columns - 1]}{_WIPE}{_RESTORE}")

    def close(self) -> None:
        """Wipe the row and give it back."""
        if self._size is not None:
            self._write(f"{_SAVE}\x1b[r\x1b[{self._size.lines};1H{_WIPE}{_RESTORE}")
            self._size = None

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal has gone; the program goes on
            os.write(self._fd, text.encode())
