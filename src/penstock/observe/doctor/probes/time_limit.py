"""A time limit for the user's code, which cannot be asked to stop."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_TICK_S = 0.25
_FINALIZING_S = 10.0
"""How much longer a finalizer may take: it may hang."""


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

    is_over = is_collecting = False

    def note(phase: str, _: object) -> None:
        nonlocal is_collecting
        is_collecting = phase == "start"

    def on_alarm(_: int, frame: FrameType | None) -> None:
        now = time.perf_counter()
        if is_over:  # an alarm that was delivered while the timer was being stopped
            return
        # Python reports and drops what is raised in a finalizer, or in a callback of the garbage collector.
        if now < until + _FINALIZING_S and (is_collecting or _is_finalizing(frame)):
            return
        if now > until:
            raise error
        tick()

    until = time.perf_counter() + seconds
    gc.callbacks.append(note)
    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)
    try:
        yield
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.callbacks.remove(note)


def _is_finalizing(frame: FrameType | None) -> bool:
    """Return whether a `__del__` method or a callback of the garbage collector runs."""
    codes = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None and frame.f_code not in codes and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None
