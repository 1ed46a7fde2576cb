"""PerProcess: what a process that is forked, or gets a pickle, has to open for itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_Handle = TypeVar("_Handle")

_INHERITED: list[Any] = []

_first = threading.Lock()
"""Held by the thread that is the first to use what was inherited."""


def _renew_lock() -> None:
    global _first
    _first = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_renew_lock)


class PerProcess(Generic[_Handle]):
    """Something that each process opens for itself: a file handle, a database environment.

    It is closed with the object, too.

    Args:
        make: opens it.
        close: closes it; None where it ends with the last reference to it.

    >>> opened = PerProcess(lambda: [os.getpid()], lambda handle: handle.clear())
    >>> opened.get() == [os.getpid()]
    True
    """

    def __init__(self, make: Callable[[], _Handle], close: Callable[[_Handle], None] | None = None) -> None:
        self._make = make
        self._close = close
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._opened: tuple[int, _Handle] | None = None
        """The process that has opened it, and the handle. One attribute: a thread that reads two of them after a fork
        might get the parent's handle with the pid of this process."""

    def get(self) -> _Handle:
        """Return this process's handle; the first call in a process opens it."""
        opened, pid = self._opened, os.getpid()
        if opened is not None and opened[0] == pid:
            return opened[1]
        with _first:
            if self._pid != pid:
                # The parent's handle is kept: its finalizer would close a file or connection that the parent uses. Its
                # lock may be held, by a thread that this process does not have.
                _INHERITED.append(self._opened)
                self._forget()
            lock = self._lock
        with lock:
            if self._opened is None:
                self._opened = pid, self._make()
            return self._opened[1]

    def close(self) -> None:
        """Close this process's handle, if it is open."""
        opened, self._opened = self._opened, None
        if opened is not None and self._close is not None and opened[0] == os.getpid():
            self._close(opened[1])

    def __del__(self) -> None:
        """Close the handle of a source that was dropped."""
        try:  # noqa: SIM105  at the interpreter's end contextlib is gone, too
            self.close()
        except Exception:  # noqa: BLE001  and half of what closing needs
            pass

    def __getstate__(self) -> dict[str, Any]:
        return {"_make": self._make, "_close": self._close}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()
