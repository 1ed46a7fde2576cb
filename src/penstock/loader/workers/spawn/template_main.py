"""The template process: a fresh interpreter with torch imported, which forks itself into workers when it is asked.

It runs no line of the program. A worker that is forked does what multiprocessing's `spawn_main` does in a new
interpreter, and ends as an interpreter ends, with its exit handlers.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from multiprocessing import forkserver, resource_tracker, spawn
from typing import Any, NoReturn

import numpy as np

MOST_FDS = 250
"""How many descriptors may go with one request; the kernel's limit is 253."""


def serve(fd: int, on_interrupt: Any) -> None:
    """Fork a worker for every request, and report how it ended; until the training process hangs up or ends.

    Args:
        fd: of the socket to the training process.
        on_interrupt: what a worker does at SIGINT to begin with; the template ignores it.
    """
    requests = socket.socket(fileno=fd)
    parent = os.pidfd_open(os.getppid())  # its end of the socket may be held by processes that it has forked
    workers: dict[int, tuple[int, int]] = {}
    """By the descriptor that tells its end: the pid of a worker, and where its exit code goes."""
    poller = select.poll()
    poller.register(requests, select.POLLIN)
    poller.register(parent, select.POLLIN)
    is_open = True
    while is_open or workers:
        for ready, _ in poller.poll():
            if ready in workers:
                poller.unregister(ready)
                _report(ready, *workers.pop(ready))
                continue
            request, fds = b"", list[int]()
            if ready == requests.fileno():
                request, fds, _, _ = socket.recv_fds(requests, 1, MOST_FDS)
            if not request:
                poller.unregister(ready)
                is_open = False
                continue
            data, status, *others = fds
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGINT, on_interrupt)
                for other in (requests.detach(), parent, status, *workers, *(code for _, code in workers.values())):
                    os.close(other)
                _be_worker(data, *others)
            watch = os.pidfd_open(pid)
            workers[watch] = pid, status
            poller.register(watch, select.POLLIN)
            with contextlib.suppress(ConnectionError):
                requests.send(pid.to_bytes(8, "little"))
            for other in (data, *others):
                os.close(other)


def _report(watch: int, pid: int, status: int) -> None:
    os.close(watch)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know
        forkserver.write_signed(status, code)
    os.close(status)


def _be_worker(data: int, tracker: int, out: int, err: int, *inherited: int) -> NoReturn:
    for stream, number in ((out, 1), (err, 2)):
        os.dup2(stream, number)
        os.close(stream)
    tracked: Any = resource_tracker._resource_tracker
    tracked._fd = tracker
    descriptors: Any = forkserver._forkserver
    descriptors._inherited_fds = [*inherited]
    np.random.seed()  # as every new interpreter has other numbers; Python's own generator does it by itself
    try:
        code = spawn._main(data, os.dup(data))
    except EOFError:  # the training process was interrupted before it said what to do
        code = 0
    sys.exit(code)
