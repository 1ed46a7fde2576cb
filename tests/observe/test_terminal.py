"""The status row takes the terminal's last row and gives it back."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from collections.abc import Iterator

import pytest

from penstock.observe.terminal import StatusRow


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    master, slave = os.openpty()
    yield master, slave
    os.close(master)
    os.close(slave)


def resize(fd: int, rows: int, columns: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def test_the_row_is_claimed_once_and_again_when_the_terminal_has_another_size(terminal: tuple[int, int]) -> None:
    master, slave = terminal
    resize(slave, 24, 80)
    row = StatusRow(slave)
    row.show("one")
    assert os.read(master, 4096).count(b"\x1b[1;23r") == 1
    row.show("two")
    assert b"r\x1b" not in os.read(master, 4096)
    resize(slave, 30, 80)
    row.show("three")
    assert os.read(master, 4096).count(b"\x1b[1;29r") == 1


def test_a_text_longer_than_the_row_is_cut(terminal: tuple[int, int]) -> None:
    master, slave = terminal
    resize(slave, 24, 10)
    StatusRow(slave).show("0123456789abc")
    assert b"012345678\x1b[K" in os.read(master, 4096)


def test_closing_gives_the_whole_terminal_back_and_only_once(terminal: tuple[int, int]) -> None:
    master, slave = terminal
    resize(slave, 24, 80)
    row = StatusRow(slave)
    row.show("one")
    os.read(master, 4096)
    row.close()
    row.close()
    assert os.read(master, 4096) == b"\x1b7\x1b[r\x1b[24;1H\x1b[K\x1b8"


@pytest.mark.parametrize(("term", "rows", "fits"), [("xterm", 24, True), ("dumb", 24, False), ("xterm", 2, False)])
def test_a_terminal_that_cannot_hold_the_row_is_left_alone(
    terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch, term: str, rows: int, fits: bool
) -> None:
    _, slave = terminal
    resize(slave, rows, 80)
    monkeypatch.setenv("TERM", term)
    assert StatusRow.fits(slave) is fits


def test_a_pipe_holds_no_row() -> None:
    reader, writer = os.pipe()
    try:
        assert not StatusRow.fits(writer)
    finally:
        os.close(reader)
        os.close(writer)
