"""The keeper: a process beside the run that draws its panel, and cleans up after it whatever way it ends.

It is forked before the program begins, and is nobody's child, so that the program does not meet it in `os.wait`. It
draws what the run's beacon says; so rich, its locks and its time stay out of the process that trains. And since it
does not die with the run, the terminal is given back, and what was counted is reported, also after SIGTERM, SIGHUP,
SIGKILL or a crash, without any signal handler in the program's process: the program sees the signals as it would have
without penstock, and ends by them.

    run:     start ─▶ (the program) ─▶ clear: "clear" ─▶ waits for the answer ─▶ prints its report ─▶ dismiss: "over"
    keeper:  draws ────────────────────▶ gives the rows back, answers ────────────────────────────────▶ is gone
    run killed before "over": its pidfd becomes readable ─▶ the keeper gives the rows back, writes what is written at
                              the end
    run stopped (Ctrl-Z): the keeper gives the rows back until the run goes on
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.observe.display import Display

_LOOK_S = 0.25
_CLEAR, _OVER = b"c", b"o"
_ANSWER_S = 5.0
"""A keeper that somebody has stopped must not hold up the program's end."""


class Keeper:
    """The run's end of the line to its keeper."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    @classmethod
    def start(cls, beacon: Path, afterwards: Callable[[], None], *, draws: bool) -> Keeper | None:
        """Start a keeper for this process. Nothing else may run in this process yet.

        Returns None where there can be none: without pidfd_open (Linux 5.3), without another process to be had, or
        where this process is the first of its container, whose child every orphan becomes.

        Args:
            beacon: the file that says how the run is.
            afterwards: called in the keeper when this process has ended without `dismiss`.
            draws: whether to draw on the terminal that is stderr.
        """
        if os.getpid() == 1 or not hasattr(os, "pidfd_open"):
            return None
        try:
            pidfd = os.pidfd_open(os.getpid())
        except OSError:
            return None
        ours, theirs = socket.socketpair()
        run = os.getpid()
        try:
            first = os.fork()
        except OSError:  # no further process is allowed
            ours.close()
            theirs.close()
            os.close(pidfd)
            return None
        if first == 0:
            try:
                os.setsid()  # out of reach of the terminal's signals
                if os.fork() == 0:
                    _keep_watch(run, pidfd, theirs, beacon, afterwards, draws=draws)
            finally:
                os._exit(0)
        os.waitpid(first, 0)
        os.close(pidfd)
        theirs.close()
        return cls(ours)

    def clear(self) -> None:
        """Have the terminal given back, and wait until it is."""
        with contextlib.suppress(OSError):
            self._line.sendall(_CLEAR)
        answered = select.poll()
        answered.register(self._line, select.POLLIN)
        answered.poll(1000 * _ANSWER_S)

    def dismiss(self) -> None:
        """Send the keeper away: all has been written that is written at the end."""
        with contextlib.suppress(OSError):
            self._line.sendall(_OVER)
        self._line.close()


def _keep_watch(
    run: int, pidfd: int, line: socket.socket, beacon: Path, afterwards: Callable[[], None], *, draws: bool
) -> None:
    """Be the keeper, to its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    _let_go({pidfd, line.fileno()})
    from penstock.observe.display import Display

    display = Display(2) if draws else None
    try:
        is_over = _draw(run, pidfd, line, beacon, display)
    finally:
        if display is not None:
            display.close()
    if not is_over:
        with contextlib.suppress(OSError):
            beacon.unlink()
        afterwards()


def _draw(run: int, pidfd: int, line: socket.socket, beacon: Path, display: Display | None) -> bool:
    """Draw until the run has ended or is no run any more, and return whether nothing is left to be done for it."""
    from penstock.observe.beacon import is_ending, is_stopped, read

    events = select.poll()
    events.register(pidfd, select.POLLIN)
    events.register(line, select.POLLIN)
    shown_at = 0.0
    while True:
        happened = dict(events.poll(1000 * _LOOK_S if display is not None else None))
        if line.fileno() in happened:
            match line.recv(1):
                case message if message == _CLEAR:
                    if display is not None:
                        display.close()
                        display = None
                    with contextlib.suppress(OSError):
                        line.sendall(_CLEAR)
                case message if message == _OVER:
                    return True
                case _:  # hung up: it is ending, or has become another program by exec
                    if not is_ending(run):
                        return True
                    events.unregister(line)
        elif pidfd in happened:
            return False
        elif display is not None and is_stopped(run):
            display.close()
            shown_at = 0.0
        elif display is not None and (sighting := read(beacon)) is not None and sighting.at != shown_at:
            display.show(sighting)
            shown_at = sighting.at


def _let_go(kept: set[int]) -> None:
    """Close all that came along but stderr and `kept`, so that nobody waits for this process to close it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
