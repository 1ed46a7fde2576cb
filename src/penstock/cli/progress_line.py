"""Says on stderr how far a command is: in a terminal one line that is written over, elsewhere one every few seconds."""

from __future__ import annotations

import sys
import time

_TERMINAL_PERIOD_S, _LINE_PERIOD_S = 0.2, 5.0


class ProgressLine:
    """Shows the newest of the texts that it is given, in a `with`."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._period_s = _TERMINAL_PERIOD_S if self._is_terminal else _LINE_PERIOD_S
        self._shown_at = time.monotonic()

    def show(self, text: str) -> None:
        """Show `text`, if the one before has been there for a while."""
        now = time.monotonic()
        if now - self._shown_at >= self._period_s:
            self._shown_at = now
            before, after = ("\r\x1b[K", "") if self._is_terminal else ("", "\n")
            print(f"{before}penstock: {text}", end=after, file=sys.stderr, flush=True)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
