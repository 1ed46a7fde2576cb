"""Processes that the program forks while it holds batches: they see the same slots, and may read them at any time.

A slot of shared memory that was held when a process was forked must not be reused while that process lives, although
the program's own views have died. Nobody has to ask the process: it inherits the end of a pipe, which the kernel closes
with it and with all that it forks in turn.
"""

from __future__ import annotations

import os
import select
import weakref
from typing import Protocol

from penstock.core.walking import walk


class Forkable(Protocol):
    """Whoever has memory that forked processes see, too. Python calls it in the thread that forks."""

    def before_fork(self) -> None:
        """Note in the parent what the process that comes may read."""
        ...

    def after_fork_in_child(self) -> None:
        """Give up, in the forked process, what is the parent's."""
        ...


class ForkedReaders:
    """The processes that are forked from now until `have_gone` is first called."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._may_join = True
        weakref.finalize(self, _close_in, os.getpid(), self._read).atexit = False
        self._close_write = weakref.finalize(self, _close_in, os.getpid(), self._write)
        self._close_write.atexit = False

    def have_gone(self) -> bool:
        """Return whether all of them have ended."""
        if self._may_join:
            if _is_forking:
                return False
            self._may_join = False
            self._close_write()
        poll = select.poll()
        poll.register(self._read)
        return bool(poll.poll(0))

    @classmethod
    def current(cls) -> ForkedReaders | None:
        """Return the readers that the next forked process joins; None where no descriptor is left for a pipe."""
        global _current
        readers = _current() if _current is not None else None
        if readers is not None and readers._may_join:
            return readers
        try:
            readers = cls()
        except OSError:
            return None
        _current = weakref.ref(readers)
        return readers


def _close_in(pid: int, descriptor: int) -> None:
    if os.getpid() == pid:  # in a forked process it stays open: that is how the parent sees that the process lives
        os.close(descriptor)


_current: weakref.ref[ForkedReaders] | None = None
_is_forking = False

watched: weakref.WeakSet[Forkable] = weakref.WeakSet()
"""Who is called when Python forks."""


def _before_fork() -> None:
    global _is_forking
    _is_forking = True
    for forkable in walk(watched):
        forkable.before_fork()


def _after_fork() -> None:
    global _is_forking
    _is_forking = False


def _after_fork_in_child() -> None:
    global _current
    _current = None
    _after_fork()
    for forkable in walk(watched):
        forkable.after_fork_in_child()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
