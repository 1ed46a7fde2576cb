"""The keeper: a process beside the run that draws its panel, and cleans up after it whatever way it ends.

It is forked before the program begins, and is nobody's child, so that the program does not meet it in `os.wait`. It
draws what the run's beacon says; so rich, its locks and its time stay out of the process that trains. And since it
does not die with the run, the terminal is given back, and what was counted is reported, also after SIGTERM, SIGHUP,
SIGKILL or a crash, without any signal handler in the program's process: the program sees the signals as it would have
without penstock, and ends by them.

    run: start ─▶ (the program) ─▶ dismiss: "end" ─▶ waits for the hang-up ─▶ prints its report
    keeper:  draws ───────────────────────▶ gives the rows back ─▶ hangs up, is gone
    run killed: its pidfd becomes readable ─▶ the keeper gives the rows back, writes what is written at the end
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

_LOOK_S = 0.25
_DISMISS_S = 5.0
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

    def dismiss(self) -> None:
        """Send the keeper away and wait until it has given the terminal back."""
        with contextlib.suppress(OSError):
            self._line.sendall(b"end")
        over = select.poll()
        over.register(self._line, select.POLLIN)
        over.poll(1000 * _DISMISS_S)
        self._line.close()


def _keep_watch(
    run: int, pidfd: int, line: socket.socket, beacon: Path, afterwards: Callable[[], None], *, draws: bool
) -> None:
    """Be the keeper, to its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    _let_go({pidfd, line.fileno()})
    from penstock.observe.beacon import is_stopped, read
    from penstock.observe.display import Display

    display = Display(2) if draws else None
    events = select.poll()
    events.register(pidfd, select.POLLIN)
    events.register(line, select.POLLIN)
    period_ms = 1000 * _LOOK_S if display is not None else None
    shown_at = 0.0
    try:
        while not (happened := dict(events.poll(period_ms))):
            assert display is not None
            if is_stopped(run):
                display.close()
                shown_at = 0.0
            elif (sighting := read(beacon)) is not None and sighting.at != shown_at:
                display.show(sighting)
                shown_at = sighting.at
    finally:
        if display is not None:
            display.close()
    is_over = line.fileno() in happened and line.recv(16) != b""
    if not is_over and pidfd in happened:
        with contextlib.suppress(OSError):
            beacon.unlink()
        afterwards()


def _let_go(kept: set[int]) -> None:
    """Close all that came along but stderr and `kept`, so that nobody waits for this process to close it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
