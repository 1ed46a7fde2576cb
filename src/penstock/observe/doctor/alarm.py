"""A limit of time for code that is not ours, and cannot be asked to stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_TICK_S = 0.25


@contextmanager
def at_most(seconds: float, error: type[BaseException], tick: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Raise `error` inside of the block when it runs longer than `seconds`, and again if that was swallowed.

    Before, `tick` is called four times a second, wherever the block is.

    Signals reach the main thread only: elsewhere there is no limit. A call into C that never looks for signals is
    not interrupted before it returns.

    >>> with at_most(60.0, TimeoutError):
    ...     pass
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    over = False

    def ring(_: int, __: FrameType | None) -> None:
        if over:
            return
        if time.perf_counter() > until:
            raise error
        tick()

    until = time.perf_counter() + seconds
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
