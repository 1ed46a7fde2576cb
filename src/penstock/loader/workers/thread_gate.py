"""Where worker threads stop between two samples: while their process forks, and for as long as somebody wishes.

A forked process has one thread, and the dataset's locks and open files as they were at that moment. A lock that
another thread held, in the middle of a sample, is held there for good; a file that it had opened and locked stays open
and locked. So whoever forks, with whatever loader, waits until each worker thread is between two samples. A sample that
forks does not: another may be waiting for a lock that it has. Nor does anybody wait forever, for the same reason.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  its hook locks what samples may need, so it has to run after the one here
import os
import threading
import warnings
import weakref

_PATIENCE_S = 60.0


class ThreadGate:
    """The threads of a pool pass it before each sample. Open at first.

    Example:
        >>> gate = ThreadGate()
        >>> gate.enter()  # a thread that is about to make samples
        >>> gate.is_closed
        False
        >>> gate.leave()
    """

    def __init__(self) -> None:
        self._reset()
        with _gates_lock:
            _gates.add(self)

    def _reset(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._times_closed = 0
        self._inside: set[int] = set()
        """The threads that may be making a sample."""

    @property
    def is_closed(self) -> bool:
        """Whether a thread has to stop before its next sample."""
        return self._times_closed > 0

    def enter(self) -> None:
        """Note that this thread makes samples from now on; wait until the gate is open."""
        with self._changed:
            self._changed.wait_for(lambda: not self._times_closed)
            self._inside.add(threading.get_ident())

    def leave(self) -> None:
        """Note that this thread makes no sample now."""
        with self._changed:
            self._inside.discard(threading.get_ident())
            self._changed.notify_all()

    def pass_through(self) -> None:
        """Stop here, between two samples, until the gate is open."""
        self.leave()
        self.enter()

    def close(self) -> None:
        """Have threads stop before their next sample; those that are making one finish it."""
        with self._changed:
            self._times_closed += 1

    def open(self) -> None:
        """Undo one `close`."""
        with self._changed:
            self._times_closed = max(0, self._times_closed - 1)  # an interrupted fork may not have closed it
            self._changed.notify_all()

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Wait until no thread is making a sample, once it is closed; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside, timeout_s)

    def holds_this_thread(self) -> bool:
        """Return whether this thread is making a sample."""
        with self._changed:
            return threading.get_ident() in self._inside


_gates_lock = threading.Lock()
_gates: weakref.WeakSet[ThreadGate] = weakref.WeakSet()


class _Fork(threading.local):
    """The gates that this thread has closed to fork."""

    closed: tuple[ThreadGate, ...] = ()


_fork = _Fork()


def _before_fork() -> None:
    with _gates_lock:
        gates = tuple(_gates)
    if any(gate.holds_this_thread() for gate in gates):
        return
    _fork.closed = gates
    for gate in gates:
        gate.close()
    if not all(gate.wait_until_empty(_PATIENCE_S) for gate in gates):
        warnings.warn(
            f"this process forks while a worker thread has been making a sample for {_PATIENCE_S:.0f} s; if the new "
            "process needs a lock that the sample holds, it will wait for it forever. Use one worker_type for all "
            "loaders, or multiprocessing_context='spawn'",
            stacklevel=2,
        )


def _after_fork_in_parent() -> None:
    closed, _fork.closed = _fork.closed, ()
    for gate in closed:
        gate.open()


def _after_fork_in_child() -> None:
    global _gates_lock
    _gates_lock = threading.Lock()
    _fork.closed = ()
    for gate in tuple(_gates):
        gate._reset()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
