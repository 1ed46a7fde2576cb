"""The one thread, with an event loop, in which a process makes its requests of remote storage.

    begins      when the first user takes hold of it
    lingers     for half a second without users, so that shards read one after another share its connections
    ends        by itself, after closing them; at the latest when the interpreter does
    a fork      leaves it behind: the child has a line of its own, and never touches the sockets of its parent's

fsspec has a thread like it that never ends and is shared by all filesystems; ours are made so that they do not use it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Coroutine, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

LINGER_S = 0.5

_Result = TypeVar("_Result")
_lock = threading.RLock()  # a finalizer may let go of a line while this thread takes hold of one
_current: Line | None = None
_INHERITED: list[Any] = []


class Line:
    """A thread with an event loop, and what is connected in it. Made by `hold`."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.users = 0
        self.connected: dict[Hashable, Any] = {}
        """Things with a coroutine `close`; touched in the loop only."""
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="penstock remote", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Run a coroutine in the loop. Its future can be cancelled from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine in the loop, and wait for it."""
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()  # of use after an interrupt

    def let_go(self) -> None:
        """Say that one user has no more work. In any thread and process."""
        if self.pid != os.getpid():
            return
        with _lock:
            self.users -= 1
            if self.users == 0:
                self._soon(self._linger)

    def hang_up(self, timeout_s: float = 2.0) -> None:
        """End it now, whoever uses it."""
        _leave(self)
        self._soon(self._ended.set)
        self._thread.join(timeout_s)

    def _soon(self, function: Any) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(function)

    def _linger(self) -> None:
        self._loop.call_later(LINGER_S, self._end_if_idle)

    def _end_if_idle(self) -> None:
        with _lock:
            if self.users:
                return
            _leave(self)
        self._ended.set()

    def _run(self) -> None:
        with self._runner as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        await self._ended.wait()
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.gather(*(one.close() for one in self.connected.values()), return_exceptions=True)


def hold() -> Line:
    """Return this process's line, begun if there is none. To be let go of.

    >>> line = hold()
    >>> line.call(asyncio.sleep(0, "done"))
    'done'
    >>> line.let_go()
    """
    global _current
    with _lock:
        if _current is None:
            _current = Line()
        _current.users += 1
        return _current


def _leave(line: Line) -> None:
    global _current
    with _lock:
        if _current is line:
            _current = None


def _end_at_exit() -> None:
    if _current is not None and _current.pid == os.getpid():
        _current.hang_up()


def _forget_after_fork() -> None:
    global _current, _lock
    _INHERITED.append(_current)  # its finalizers must not run here
    _current, _lock = None, threading.RLock()


atexit.register(_end_at_exit)
os.register_at_fork(after_in_child=_forget_after_fork)
