"""What a worker process is started with, besides its spec: who it is, and the descriptors that reach it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

from penstock.loader.workers.worker import WorkerOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessOptions(WorkerOptions):
    """Who a worker process is."""

    is_settled: bool = True
    """Whether `workers` is how many there are; else the control page has that number, and asking settles it."""


class Descriptor:
    """A file descriptor that survives being pickled into a worker process, by whatever start method."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        """Duplicate the descriptor; multiprocessing allows this only while it starts a process."""
        return _receive_descriptor, (DupFd(self.fd),)


def _receive_descriptor(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())


@dataclass(frozen=True, slots=True)
class ProcessEnds:
    """A worker process's ends of its channels, and the control page."""

    inbox: socket.socket
    shared: socket.socket
    results: socket.socket
    control_nbytes: int
    control: Descriptor
    lock: Descriptor
