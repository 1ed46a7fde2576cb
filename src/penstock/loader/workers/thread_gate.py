"""Where worker threads stop between two samples: while workers are forked, and for as long as somebody wishes.

A forked process has one thread, and the dataset's locks and open files as they were at that moment. A lock that
another thread held, in the middle of a sample, is held there for good; a file that it had opened and locked stays open
and locked. So whoever forks workers waits until each worker thread is between two samples: for a moment, because a
sample may be waiting for whoever forks.

Rejected: to do so in a hook of `os.fork`, for everybody's forks. Hooks run in the reverse order of their registration:
that of a library which is imported later (h5py, filelock) would hold a lock that samples need while this one waits for
them. And what a signal raises in a hook is lost.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.core.walking import walk

PATIENCE_S = 2.0
"""How long a sample is waited for."""


class ThreadGate:
    """The threads of a pool pass it before each sample.

    Example:
        >>> gate = ThreadGate()
        >>> gate.enter()  # a thread that is about to make samples
        >>> gate.is_closed
        False
        >>> gate.leave()
    """

    def __init__(self) -> None:
        self._is_paused = self._has_ended = False
        self._inside: set[int] = set()
        """The threads that may be making a sample."""
        with _state.changed:
            _state.gates.add(self)

    @property
    def is_closed(self) -> bool:
        """Whether a thread has to stop before its next sample."""
        return self._is_paused or bool(_state.forking)

    def enter(self) -> None:
        """Note that this thread makes samples from now on; wait until the gate is open."""
        with _state.changed:
            _state.changed.wait_for(lambda: not self.is_closed or self._has_ended)
            self._inside.add(threading.get_ident())

    def leave(self) -> None:
        """Note that this thread makes no sample now."""
        with _state.changed:
            self._inside.discard(threading.get_ident())
            _state.changed.notify_all()

    def pass_through(self) -> None:
        """Stop here, between two samples, until the gate is open."""
        self.leave()
        self.enter()

    def pause(self) -> bool:
        """Have the threads stop before their next sample, and wait for a moment; return whether all have stopped."""
        with _state.changed:
            self._is_paused = True
            return _state.changed.wait_for(lambda: not self._inside, PATIENCE_S)

    def resume(self) -> None:
        """Let them go on."""
        with _state.changed:
            self._is_paused = False
            _state.changed.notify_all()

    def end(self) -> None:
        """Stop nobody any more."""
        with _state.changed:
            self._has_ended = True
            _state.changed.notify_all()

    def forget_threads(self) -> None:
        """Have no thread inside: of a forked process, which has none."""
        self._inside.clear()


class _State:
    """What all gates share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()  # re-entrant: a signal handler may pause or resume, too
        self.gates: weakref.WeakSet[ThreadGate] = weakref.WeakSet()
        self.forking: set[object] = set()
        """One for each thread that forks now."""

    def inside(self) -> set[int]:
        """Return the threads that may be making a sample."""
        return {thread for gate in self.gates for thread in gate._inside}


_state = _State()


@contextmanager
def stopped_between_samples() -> Iterator[None]:
    """Fork in the body, while all worker threads of this process are between two samples.

    A sample that forks waits for nobody: another one may wait for a lock that it has. Warns where a sample has taken
    too long to be waited for.
    """
    token = object()
    try:
        with _state.changed:
            is_late = False
            if threading.get_ident() not in _state.inside():
                _state.forking.add(token)
                is_late = not _state.changed.wait_for(lambda: not _state.inside(), PATIENCE_S)
        if is_late:
            warnings.warn(
                f"worker processes are forked while a worker thread has been making a sample for {PATIENCE_S:.0f} s; "
                "if they need a lock that the sample holds, they will wait for it forever. Use the same worker_type "
                "for all loaders, or multiprocessing_context='spawn'",
                stacklevel=2,
            )
        yield
    finally:
        with _state.changed:
            _state.forking.discard(token)
            _state.changed.notify_all()


def _begin_child() -> None:
    _state.changed = threading.Condition()  # another thread may have held it
    _state.forking.clear()
    for gate in walk(_state.gates):
        gate.forget_threads()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_begin_child)
