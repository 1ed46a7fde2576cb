"""The control page: what the training process and its worker processes share without sending messages.

It has 64-bit cells, few enough to be read by eye in a debugger:

    cell 0                the epoch that is running; a worker that finds another one abandons its task
    cell 1                twice the number of workers; 1 more when that is settled, because a worker has asked for it
    cell 2                1 when a sample has left something in its worker (`workers.lasting_effects`)
    cell 3 + 2·w          worker w: sequence number + 1 of the task it claimed, 0 before its first
    cell 4 + 2·w          worker w: the row of that task which it is making; before its first, 1 when it is ready; IDLE
                          when its result has been sent

and one lock file. A worker takes a message from the shared queue and writes its claim under a POSIX record lock,
which the kernel drops when the worker dies; so under the same lock the training process knows exactly which tasks
the dead have taken and which still wait.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.core.shared_segment import Handle, SharedSegment, attach, create

IDLE = (1 << 64) - 1
"""In place of a row: the worker has no task."""

_WORKERS, _EFFECTS, _CLAIMS = 1, 2, 3


class ControlPage:
    """One side's view of the page. Made by the training process; workers `attach` with `handle` and `lock_fd`."""

    def __init__(self, segment: SharedSegment, lock_fd: int) -> None:
        self._segment = segment
        self.lock_fd = lock_fd
        self.cells = segment.memory.cast("Q")

    @classmethod
    def make(cls, workers: int) -> ControlPage:
        """Make the page for `workers` workers, all cells 0."""
        segment = create(8 * (_CLAIMS + 2 * workers))
        return cls(segment, os.memfd_create("penstock-lock", os.MFD_CLOEXEC))

    @classmethod
    def attach(cls, nbytes: int, fd: int, lock_fd: int) -> ControlPage:
        """Open the page in a worker."""
        return cls(attach(Handle(nbytes, fd)), lock_fd)

    def handle(self) -> Handle:
        """Return what `attach` needs."""
        return self._segment.handle()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the claim lock."""
        fcntl.lockf(self.lock_fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.lock_fd, fcntl.LOCK_UN)

    def plan_workers(self, workers: int) -> int:
        """Set how many workers there will be, unless that is settled; return how many there will be."""
        with self.lock():
            if not self.cells[_WORKERS] & 1:
                self.cells[_WORKERS] = 2 * workers
            return self.cells[_WORKERS] >> 1

    def settle_workers(self) -> int:
        """Return how many workers there are, which must not change from now on."""
        with self.lock():
            self.cells[_WORKERS] |= 1
            return self.cells[_WORKERS] >> 1

    @property
    def has_effects(self) -> bool:
        """Whether a sample has left something in its worker."""
        return bool(self.cells[_EFFECTS])

    def note_effects(self) -> None:
        """Note that a sample has left something in its worker."""
        self.cells[_EFFECTS] = 1

    @staticmethod
    def claim_cell(worker: int) -> int:
        """Return which cell has the claim of `worker`; the next one has its row."""
        return _CLAIMS + 2 * worker

    def claimed(self, worker: int) -> int | None:
        """Return the sequence number of the task that `worker` claimed last."""
        claim = self.cells[self.claim_cell(worker)]
        return claim - 1 if claim else None

    def row(self, worker: int) -> int:
        """Return the row that `worker` was making last."""
        return self.cells[self.claim_cell(worker) + 1]

    def is_idle(self, worker: int) -> bool:
        """Return whether `worker` has sent what it claimed last, and waits for more."""
        return self.row(worker) == IDLE

    def forget(self, worker: int) -> None:
        """Clear the cells of a worker that is being replaced."""
        claim = self.claim_cell(worker)
        self.cells[claim] = self.cells[claim + 1] = 0

    def close(self) -> None:
        """Unmap the page and close the lock file."""
        self.cells.release()
        self._segment.close()
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1
