"""A time limit for the user's code, which cannot be asked to stop."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from torch.multiprocessing.reductions import rebuild_storage_fd

from penstock.observe.doctor.probes.timer_signal import TimerSignal

_TICK_S = 0.25
_UNINTERRUPTED_S = 10.0
"""How much longer what is not interrupted may take: it may hang."""


@contextmanager
def time_limit(seconds: float, error: type[BaseException], tick: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Raise `error` inside the block when it runs longer than `seconds`, and again if the block swallowed it.

    Until then, `tick` is called four times a second, wherever the block is.

    Signals reach the main thread only: elsewhere there is no limit. A call into C that never checks for signals is not
    interrupted before it returns.

    >>> with time_limit(60.0, TimeoutError):
    ...     pass
    """
    is_over = is_collecting = False

    def note(phase: str, _: object) -> None:
        nonlocal is_collecting
        is_collecting = phase == "start"

    def on_tick(_: int, frame: FrameType | None) -> None:
        now = time.perf_counter()
        if is_over:  # a signal that was delivered while the timer was being stopped
            return
        if now < until + _UNINTERRUPTED_S and (is_collecting or _would_lose(frame)):
            return
        if now > until:
            raise error
        tick()

    until = time.perf_counter() + seconds
    timer = TimerSignal(_TICK_S, on_tick, place=0)
    if not timer.start():
        yield
        return
    gc.callbacks.append(note)
    try:
        yield
    finally:
        is_over = True
        timer.stop()
        gc.callbacks.remove(note)


def _would_lose(frame: FrameType | None) -> bool:
    """Return whether something would be lost if an exception were raised in `frame`.

    Python reports and drops what is raised in a `__del__` method or a callback of the garbage collector. A descriptor
    that a worker has sent for a tensor would stay open.
    """
    codes = {getattr(callback, "__code__", None) for callback in gc.callbacks} | {rebuild_storage_fd.__code__}
    while frame is not None and frame.f_code not in codes and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None
