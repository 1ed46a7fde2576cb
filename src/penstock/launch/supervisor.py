"""The supervisor: a process beside the run that draws its panel, and reports the run if it is killed.

It is forked before the program begins and is not a child of the run, so that the program does not meet it in `os.wait`.
It draws what the run's status file holds: rich, its locks and its time stay out of the process that trains. Because it
outlives the run, the terminal is restored and the counters are reported after SIGTERM, SIGHUP, SIGKILL or a crash too,
without a signal handler in the program's process: the program receives signals as without penstock, and ends by them.

    run:         start ─▶ (the program) ─▶ release_terminal ─▶ waits for the answer ─▶ report ─▶ dismiss
                                                 │  ▲                                              │
    supervisor:  draws ──────────────────────────▼──┴ releases the rows, answers ──────────────────▼ exits
    killed run:  its pidfd becomes readable before `dismiss` ─▶ the supervisor releases the rows and writes the outputs
    stopped run: (Ctrl-Z) the supervisor releases the rows until the run continues
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
    from penstock.observe.live.display import Display

_DRAW_PERIOD_S = 0.25
_RELEASE, _DISMISS = b"r", b"d"
_ANSWER_TIMEOUT_S = 5.0
"""A supervisor that somebody has stopped must not delay the program's end."""


class Supervisor:
    """The run's connection to its supervisor."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def start(
        cls, status_file: Path, on_start: Callable[[], None], on_killed: Callable[[], None], *, draws: bool
    ) -> Supervisor | None:
        """Start a supervisor for this process, which must have a single thread.

        Returns None if there can be none: without pidfd_open (Linux 5.3), if no further process is allowed, or if this
        process is the first one of a container, which becomes the parent of every orphan.

        Args:
            status_file: what to draw.
            on_start: called in the supervisor first.
            on_killed: called in the supervisor if this process ends without `dismiss`.
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
            child = os.fork()
        except OSError:  # no further process is allowed
            ours.close()
            theirs.close()
            os.close(pidfd)
            return None
        if child == 0:
            # Forks again and exits, so that the supervisor is not a child of the run.
            try:
                os.setsid()  # out of reach of the terminal's signals
                if os.fork() == 0:
                    _supervise(run, pidfd, theirs, status_file, on_start, on_killed, draws=draws)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(pidfd)
        theirs.close()
        return cls(ours)

    def release_terminal(self) -> None:
        """Make the supervisor release the panel's rows, and wait until it has."""
        with contextlib.suppress(OSError):
            self._connection.sendall(_RELEASE)
        answer = select.poll()
        answer.register(self._connection, select.POLLIN)
        if answer.poll(1000 * _ANSWER_TIMEOUT_S):
            _receive(self._connection)

    def dismiss(self) -> None:
        """End the supervisor: all outputs are written."""
        with contextlib.suppress(OSError):
            self._connection.sendall(_DISMISS)
        self._connection.close()


def _supervise(
    run: int,
    pidfd: int,
    connection: socket.socket,
    status_file: Path,
    on_start: Callable[[], None],
    on_killed: Callable[[], None],
    *,
    draws: bool,
) -> None:
    """Do the supervisor's work, in its process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    _close_inherited({pidfd, connection.fileno()})
    on_start()
    display = None
    if draws:
        from penstock.observe.live.display import Display

        display = Display(2)
    try:
        is_reported = _draw_until_end(run, pidfd, connection, status_file, display)
    finally:
        if display is not None:
            display.close()
    if not is_reported:
        with contextlib.suppress(OSError):
            status_file.unlink()
        on_killed()


def _draw_until_end(
    run: int, pidfd: int, connection: socket.socket, status_file: Path, display: Display | None
) -> bool:
    """Draw until the run ends or executes another program; return whether nothing is left to report."""
    from penstock.observe.live.status_file import read_status
    from penstock.observe.meters.process_state import is_exiting, is_stopped

    events = select.poll()
    events.register(pidfd, select.POLLIN)
    events.register(connection, select.POLLIN)
    drawn_unix_s = 0.0
    while True:
        ready = dict(events.poll(1000 * _DRAW_PERIOD_S if display is not None else None))
        if connection.fileno() in ready:
            match _receive(connection):
                case message if message == _RELEASE:
                    if display is not None:
                        display.close()
                        display = None
                    with contextlib.suppress(OSError):
                        connection.sendall(_RELEASE)
                case message if message == _DISMISS:
                    return True
                case _:  # closed: the run is ending, or has become another program by exec
                    if not is_exiting(run):
                        return True
                    events.unregister(connection)
        elif pidfd in ready:
            return False
        elif display is not None and is_stopped(run):
            display.close()
            drawn_unix_s = 0.0
        elif display is not None and (status := read_status(status_file)) is not None and status.unix_s != drawn_unix_s:
            display.show(status)
            drawn_unix_s = status.unix_s


def _receive(connection: socket.socket) -> bytes:
    """Return what the other side says; nothing where it has hung up, also without having read what it was told."""
    try:
        return connection.recv(1)
    except ConnectionError:
        return b""


def _close_inherited(kept: set[int]) -> None:
    """Close all inherited descriptors but stderr and `kept`, so that readers of pipes do not wait for this process."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
