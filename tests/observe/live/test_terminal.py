"""The panel's rows lie outside of what scrolls, and the terminal is given back as it was."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from collections.abc import Iterator

import pytest
from screen import Screen

from penstock.observe.live.terminal import StatusRows

BELL = b"\a"


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Return the two ends of a terminal: what a program writes to the second can be read from the first."""
    master, slave = os.openpty()
    yield master, slave
    os.close(master)
    os.close(slave)


def shown(terminal: tuple[int, int]) -> bytes:
    """Return all that was written to the terminal; it comes through when the kernel gets round to it."""
    master, slave = terminal
    os.write(slave, BELL)
    pieces = b""
    while not pieces.endswith(BELL):
        pieces += os.read(master, 65536)
    return pieces.removesuffix(BELL)


def resize(slave: int, rows: int, columns: int) -> None:
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@pytest.mark.parametrize("printed", [0, 5, 22, 30])
def test_what_is_printed_scrolls_above_the_rows_and_nothing_of_it_is_lost(
    terminal: tuple[int, int], printed: int
) -> None:
    _, slave = terminal
    resize(slave, 24, 80)
    screen = Screen(24, 80)
    rows = StatusRows(slave)
    said = [f"before {number}" for number in range(printed)]
    os.write(slave, "".join(f"{line}\n" for line in said).encode())
    rows.show(["one", "two", "three"])
    more = [f"after {number}" for number in range(30)]
    os.write(slave, "".join(f"{line}\n" for line in more).encode())
    rows.show(["four", "five", "six"])
    screen.feed(shown(terminal))
    assert screen.text()[-3:] == ["four", "five", "six"]
    assert (screen.top, screen.bottom) == (0, 20)
    assert [line for line in screen.scrolled + screen.text()[:-3] if line] == said + more
    rows.close()
    screen.feed(shown(terminal))
    assert screen.text()[-3:] == ["", "", ""]
    assert (screen.top, screen.bottom) == (0, 23)


def test_the_rows_are_claimed_once_and_again_when_the_terminal_has_another_size(terminal: tuple[int, int]) -> None:
    _, slave = terminal
    resize(slave, 24, 80)
    rows = StatusRows(slave)
    rows.show(["one", "two"])
    assert shown(terminal).count(b"\x1b[1;22r") == 1
    rows.show(["three", "four"])
    assert b"\x1b[1;" not in shown(terminal)
    resize(slave, 30, 80)
    rows.show(["five", "six"])
    assert shown(terminal).count(b"\x1b[1;28r") == 1


def test_another_number_of_rows_wipes_those_that_are_given_back(terminal: tuple[int, int]) -> None:
    _, slave = terminal
    resize(slave, 24, 80)
    rows = StatusRows(slave)
    rows.show(["one", "two", "three"])
    rows.show(["alone"])
    screen = Screen(24, 80).feed(shown(terminal))
    assert screen.text()[-3:] == ["", "", "alone"]
    assert (screen.top, screen.bottom) == (0, 22)


def test_closing_gives_the_whole_terminal_back_and_only_once(terminal: tuple[int, int]) -> None:
    _, slave = terminal
    resize(slave, 24, 80)
    rows = StatusRows(slave)
    rows.show(["one"])
    shown(terminal)
    rows.close()
    rows.close()
    assert shown(terminal) == b"\x1b[?2026h\x1b7\x1b[r\x1b[24;1H\x1b[K\x1b8\x1b[?2026l"


@pytest.mark.parametrize(("term", "rows", "fits"), [("xterm", 24, True), ("dumb", 24, False), ("xterm", 2, False)])
def test_a_terminal_that_cannot_hold_the_rows_is_left_alone(
    terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch, term: str, rows: int, fits: bool
) -> None:
    _, slave = terminal
    resize(slave, rows, 80)
    monkeypatch.setenv("TERM", term)
    assert StatusRows.fits(slave) is fits


def test_a_pipe_holds_no_rows() -> None:
    reader, writer = os.pipe()
    try:
        assert not StatusRows.fits(writer)
    finally:
        os.close(reader)
        os.close(writer)


def test_rows_that_are_drawn_anew_are_never_seen_half_drawn(terminal: tuple[int, int]) -> None:
    _, slave = terminal
    resize(slave, 24, 80)
    rows = StatusRows(slave)
    rows.show(["one", "two"])
    screen = Screen(24, 80).feed(shown(terminal))
    rows.show(["three", "four"])
    seen = set()
    for byte in shown(terminal):
        screen.feed(bytes([byte]))
        seen.add(tuple(screen.text()[-2:]))
    assert seen == {("one", "two"), ("three", "four")}
