"""A limit of time for code that is not ours, and cannot be asked to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN_S = 1.0


@contextmanager
def at_most(seconds: float, error: type[BaseException]) -> Iterator[None]:
    """Raise `error` inside of the block when it runs longer than `seconds`, and again if that was swallowed.

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
        if not over:
            raise error

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds), _AGAIN_S)
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
