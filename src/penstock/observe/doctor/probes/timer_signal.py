"""A timer that interrupts the main thread between two instructions of Python's, with a signal that no program uses.

SIGALRM and its timer belong to the program. On Linux each timer is one of the kernel's (`timer_create`), which sends
a real-time signal to the main thread. Elsewhere it is the timer of SIGALRM, unless the program has set one.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_CLOCK_MONOTONIC, _SIGEV_THREAD_ID = 1, 4
_TO_LAST = 5
"""The highest real-time signals are left to others."""


class _Event(ctypes.Structure):
    """Linux's `struct sigevent`."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("padding", ctypes.c_int * 11),
    )


class _Times(ctypes.Structure):
    """`struct itimerspec`: seconds and nanoseconds of the interval, and until the first signal."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns"))


class TimerSignal:
    """Calls `handle(number, frame)` every `seconds` in the main thread, from `start` to `stop`.

    Args:
        seconds: the interval.
        handle: a signal handler of Python's.
        place: which of the signals to use, from 0; two timers at the same time need two places.
    """

    def __init__(self, seconds: float, handle: Callable[[int, FrameType | None], None], place: int) -> None:
        self._seconds = seconds
        self._handle = handle
        self._library = _library()
        self._signal = int(signal.SIGRTMAX) - _TO_LAST - place if self._library is not None else signal.SIGALRM
        self._timer: Any = None
        self._before: Any = None

    def start(self) -> bool:
        """Begin; return whether it has: not outside of the main thread, nor where the program has a timer itself."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if self._library is None and signal.getitimer(signal.ITIMER_REAL)[0]:
            return False
        self._before = signal.signal(self._signal, self._handle)
        if self._library is None:
            signal.setitimer(signal.ITIMER_REAL, self._seconds, self._seconds)
            return True
        event = _Event(signal=self._signal, notify=_SIGEV_THREAD_ID, thread=threading.get_native_id())
        self._timer = ctypes.c_void_p()
        if self._library.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
            signal.signal(self._signal, self._before)
            return False
        self._set(self._seconds)
        return True

    def stop(self) -> None:
        """End; a signal that was sent before may still be handled by the handler that was there before."""
        if self._library is None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(self._signal, self._before)
            return
        self._set(0.0)
        self._library.timer_delete(self._timer)
        # The default of a real-time signal ends the process: one that is on its way must find a handler.
        signal.signal(self._signal, signal.SIG_IGN if self._before == signal.SIG_DFL else self._before)

    def _set(self, seconds: float) -> None:
        whole, rest = int(seconds), int(seconds % 1 * 1e9)
        times = _Times(whole, rest, whole, rest)
        assert self._library is not None
        self._library.timer_settime(self._timer, 0, ctypes.byref(times), None)


def _library() -> Any:
    """Return the library of C that has the kernel's timers; None where there are none."""
    if not hasattr(signal, "SIGRTMAX"):
        return None
    for name in (None, "librt.so.1"):  # glibc has had them in another library until 2.34
        try:
            library = ctypes.CDLL(name)
            if hasattr(library, "timer_create"):
                return library
        except OSError:
            continue
    return None
