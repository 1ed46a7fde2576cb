"""How much of a sample's time passes while it holds a lock that all workers share.

Such a lock is multiprocessing's (`with lock:`, `lock.acquire()`) or that of a file (`fcntl.flock`). How long it is held
shows in one process, on a busy machine too; how long workers wait for each other does not.
"""

from __future__ import annotations

import multiprocessing.synchronize
import multiprocessing.util
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from penstock.observe.doctor.probe_results import SharedLock
from penstock.observe.doctor.probes.line_sampler import find_line
from penstock.observe.doctor.probes.source_lines import line_text

_LOCK: Any = multiprocessing.synchronize.SemLock
_EXCLUSIVE = (multiprocessing.synchronize.Lock, multiprocessing.synchronize.RLock)


class LockRecorder:
    """Notes how long samples hold such locks; from the first that a sample takes to the last that it gives back."""

    def __init__(self) -> None:
        self._wall_s = 0.0
        self._held_s: dict[tuple[str, int], float] = {}
        self._line: tuple[str, int] | None = None
        self._depth = 0
        self._since = 0.0

    @contextmanager
    def sample(self) -> Iterator[None]:
        """Note what is held inside of the `with` block, which makes a sample."""
        enter, leave, files = _LOCK.__enter__, _LOCK.__exit__, sys.modules.get("fcntl")
        flock = getattr(files, "flock", None)

        def note_enter(lock: Any) -> Any:
            taken = enter(lock)
            if isinstance(lock, _EXCLUSIVE):
                self._take()
            return taken

        def note_exit(lock: Any, *error: Any) -> Any:
            if isinstance(lock, _EXCLUSIVE):
                self._give_back()
            return leave(lock, *error)

        def note_flock(file: Any, operation: int) -> Any:
            locked = flock(file, operation)  # type: ignore[misc]
            if operation & files.LOCK_EX:  # type: ignore[union-attr]
                self._take()
            elif operation & files.LOCK_UN:  # type: ignore[union-attr]
                self._give_back()
            return locked

        _LOCK.__enter__, _LOCK.__exit__ = note_enter, note_exit
        if flock is not None:
            files.flock = note_flock  # type: ignore[union-attr]
        began = time.perf_counter()
        try:
            with ExitStack() as noted:
                for lock in _locks_of_this_process():
                    noted.enter_context(self._noting_calls(lock))
                yield
        finally:
            self._wall_s += time.perf_counter() - began
            self._depth = min(1, self._depth)
            self._give_back()  # a file that was closed has given its lock back
            _LOCK.__enter__, _LOCK.__exit__ = enter, leave
            if flock is not None:
                files.flock = flock  # type: ignore[union-attr]

    @contextmanager
    def _noting_calls(self, lock: Any) -> Iterator[None]:
        """Note calls of `lock.acquire` and `lock.release`, which each lock has for itself, beside `with lock:`."""
        acquire, release = lock.acquire, lock.release

        def note_acquire(*block: Any, **timeout: Any) -> Any:
            taken = acquire(*block, **timeout)
            if taken:
                self._take()
            return taken

        def note_release() -> None:
            self._give_back()
            release()

        lock.acquire, lock.release = note_acquire, note_release
        try:
            yield
        finally:
            lock.acquire, lock.release = acquire, release

    def result(self) -> SharedLock | None:
        """Return the line that takes the lock which is held longest; None where there is none."""
        if not self._held_s or not self._wall_s:
            return None
        line = max(self._held_s, key=lambda one: self._held_s[one])
        return SharedLock(line=line_text(*line), fraction=min(1.0, self._held_s[line] / self._wall_s))

    def _take(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._line, self._since = find_line(sys._getframe(2)), time.perf_counter()

    def _give_back(self) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self._line is not None:
            self._held_s[self._line] = self._held_s.get(self._line, 0.0) + time.perf_counter() - self._since
            self._line = None


def _locks_of_this_process() -> list[Any]:
    """Return multiprocessing's locks that exist here: it keeps them, to initialise them again after a fork."""
    known = getattr(multiprocessing.util, "_afterfork_registry", {})
    return [one for one in list(known.values()) if isinstance(one, _EXCLUSIVE)]
