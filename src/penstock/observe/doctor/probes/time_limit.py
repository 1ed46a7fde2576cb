"""A time limit for the user's code, which cannot be asked to stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_TICK_S = 0.25


@contextmanager
def time_limit(seconds: float, error: type[BaseException], tick: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Raise `error` inside the block when it runs longer than `seconds`, and again if the block swallowed it.

    Until then, `tick` is called four times a second, wherever the block is.

    Signals reach the main thread only: elsewhere there is no limit. A call into C that never checks for signals is not
    interrupted before it returns.

    >>> with time_limit(60.0, TimeoutError):
    ...     pass
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    is_over = False

    def on_alarm(_: int, __: FrameType | None) -> None:
        if is_over:  # an alarm that was delivered while the timer was being stopped
            return
        if time.perf_counter() > until:
            raise error
        tick()

    until = time.perf_counter() + seconds
    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)
    try:
        yield
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
