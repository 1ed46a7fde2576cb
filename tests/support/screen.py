"""A terminal's screen, as far as penstock's rows and ordinary output need one: what a person would see."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

_TOKEN = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])|\x1b([78D])|([\r\n])|([^\x1b\r\n])")
_STATE = re.compile(r"\x1b\[\?2026h(.*?)\x1b\[\?2026l|((?:[^\x1b]|\x1b[78D]|\x1b\[[0-9;]*[A-Za-z])+)", re.DOTALL)
_UNFINISHED = re.compile(r"(\x1b\[\?2026h.*|\x1b(\[[?0-9;]*)?)?", re.DOTALL)


class Screen:
    """Understands CSI r, H, A, K, m, ESC 7, ESC 8, ESC D, CR and LF (a line feed as the terminal's driver sends it).

    And private mode 2026: what a person sees is the screen after an update, never amid one.
    """

    def __init__(self, lines: int, columns: int) -> None:
        self.lines, self.columns = lines, columns
        self.cells = [[" "] * columns for _ in range(lines)]
        self.scrolled: list[str] = []
        self.top, self.bottom = 0, lines - 1
        self.row = self.column = 0
        self.saved = (0, 0)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._sent = ""

    def feed(self, sent: bytes) -> Screen:
        """Show some output, whole updates of it."""
        for _ in self.updates(sent):
            pass
        return self

    def updates(self, sent: bytes) -> Iterator[None]:
        """Show some output, stopping at each state that a person sees. What is not whole yet waits for the rest."""
        self._sent += self._decoder.decode(sent)
        while found := _STATE.match(self._sent):
            self._sent = self._sent[found.end() :]
            self._show(found[1] or found[2] or "")
            yield
        assert _UNFINISHED.fullmatch(self._sent), f"a terminal of 1978 does not know {self._sent[:20]!r}"

    def _show(self, text: str) -> None:
        position = 0
        while position < len(text):
            found = _TOKEN.match(text, position)
            assert found is not None, f"a terminal of 1978 does not know {text[position : position + 20]!r}"
            position = found.end()
            arguments, control, escape, move, letter = found.groups()
            if control:
                self._control(control, [int(one or 0) for one in (arguments or "").split(";")])
            elif escape:
                self._escape(escape)
            elif move:
                self.column = 0 if move == "\r" else self.column
                if move == "\n":
                    self._down()
            else:
                self._put(letter)

    def text(self) -> list[str]:
        """Return the rows, without blanks at their ends."""
        return ["".join(row).rstrip() for row in self.cells]

    def _put(self, letter: str) -> None:
        if self.column == self.columns:
            self.column = 0
            self._down()
        self.cells[self.row][self.column] = letter
        self.column += 1

    def _down(self) -> None:
        if self.row == self.bottom:
            if self.top == 0:
                self.scrolled.append("".join(self.cells[0]).rstrip())
            del self.cells[self.top]
            self.cells.insert(self.bottom, [" "] * self.columns)
        elif self.row < self.lines - 1:
            self.row += 1

    def _escape(self, kind: str) -> None:
        if kind == "7":
            self.saved = self.row, self.column
        elif kind == "8":
            self.row, self.column = self.saved
        else:
            self._down()

    def _control(self, kind: str, numbers: list[int]) -> None:
        if kind == "r":
            self.top = max(numbers[0], 1) - 1
            self.bottom = (numbers[1] if len(numbers) > 1 else self.lines) - 1
            self.row = self.column = 0
        elif kind == "H":
            self.row, self.column = numbers[0] - 1, numbers[1] - 1
        elif kind == "A":
            self.row = max(0, self.row - numbers[0])
        elif kind == "K":
            self.cells[self.row][self.column :] = [" "] * (self.columns - self.column)
        else:
            assert kind == "m", f"an unknown control {kind!r}"
