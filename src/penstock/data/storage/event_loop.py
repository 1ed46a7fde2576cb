"""The one thread, with an event loop, in which a process makes its requests of remote storage.

    start      at the first `acquire`
    idle       half a second after the last `release` it stops, so that shards read one after another share connections
    stop       after closing the connections; at the latest at the exit of the interpreter
    fork       a child starts another thread, and never touches the sockets of its parent's

fsspec has a similar thread, which never stops and serves all filesystems; the backends here are created without it.
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
_lock = threading.RLock()  # reentrant: a finalizer may call `release` while this thread is in `acquire`
_current: EventLoopThread | None = None
_INHERITED: list[Any] = []


class EventLoopThread:
    """A thread with an event loop, and the backends that live in the loop. Created by `acquire`."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.users = 0
        self.backends: dict[Hashable, Any] = {}
        """Objects with a coroutine `close`. Accessed in the loop only."""
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="penstock remote", daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Run a coroutine in the loop. Its future can be cancelled from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine in the loop, and wait for it."""
        future = self.start(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()  # has an effect only after an interrupt

    def release(self) -> None:
        """Give up one `acquire`. May be called in any thread, and in a forked child."""
        if self.pid != os.getpid():
            return
        with _lock:
            self.users -= 1
            if self.users == 0:
                self._call_soon(lambda: self._loop.call_later(LINGER_S, self._end_if_idle))

    def shutdown(self, timeout_s: float = 2.0) -> None:
        """Stop the thread now, whether it is in use or not."""
        _detach(self)
        self._call_soon(self._stopping.set)
        self._thread.join(timeout_s)

    def _call_soon(self, function: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    def _end_if_idle(self) -> None:
        with _lock:
            if self.users:
                return
            _detach(self)
        self._stopping.set()

    def _run(self) -> None:
        with self._runner as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        await self._stopping.wait()
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.gather(*(one.close() for one in self.backends.values()), return_exceptions=True)


def acquire() -> EventLoopThread:
    """Return this process's thread, started if there is none. Each call needs one `release`.

    >>> loop_thread = acquire()
    >>> loop_thread.call(asyncio.sleep(0, "done"))
    'done'
    >>> loop_thread.release()
    """
    global _current
    with _lock:
        if _current is None:
            _current = EventLoopThread()
        _current.users += 1
        return _current


def _detach(loop_thread: EventLoopThread) -> None:
    global _current
    with _lock:
        if _current is loop_thread:
            _current = None


def _end_at_exit() -> None:
    if _current is not None and _current.pid == os.getpid():
        _current.shutdown()


def _forget_after_fork() -> None:
    global _current, _lock
    _INHERITED.append(_current)  # its finalizers must not run here
    _current, _lock = None, threading.RLock()


atexit.register(_end_at_exit)
if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forget_after_fork)
