"""Holds Ctrl-C back while Python would lose it.

Python calls some functions from C, and prints and drops what they raise ("Exception ignored in ..."): the hooks of
`os.register_at_fork` (`logging` has some), `__del__`, the callbacks of weak references. A fork takes milliseconds, so
that a Ctrl-C often arrives during it; Python then raises KeyboardInterrupt at the next line that it runs, which is a
hook's.

Rejected: to block the signal (`signal.pthread_sigmask`). That is for one thread, and the kernel then gives the signal
to another; Python runs its handler in the main thread all the same.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ParamSpec

P = ParamSpec("P")


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Run the body without the handler of SIGINT; call that at the end, if a signal has come.

    The body must be short, and is not interrupted. A process that it forks notes the signal and does nothing. Without
    effect in threads other than the main one, where Python raises no KeyboardInterrupt, and where the program has no
    handler in Python.

    Raises:
        KeyboardInterrupt: at the end of the body, or what the program's own handler raises.
    """
    handler = signal.getsignal(signal.SIGINT)
    arrived: list[FrameType | None] = []
    try:
        with _noted(arrived):
            yield
    finally:
        if arrived and callable(handler):
            handler(signal.SIGINT, arrived[0])


def uninterrupted_finalizer(function: Callable[P, object]) -> Callable[P, None]:
    """Return `function` for `weakref.finalize`: a Ctrl-C that comes during it is raised when Python has left it.

    A finalizer has no line at which it could be raised without being lost. So a thread waits for the finalizer's end,
    and sends the signal again.
    """

    @functools.wraps(function)
    def finalizer(*args: P.args, **kwargs: P.kwargs) -> None:
        arrived: list[FrameType | None] = []
        try:
            with _noted(arrived):
                function(*args, **kwargs)
        finally:
            if arrived:
                weakrefs_own = sys._getframe(1)
                thread = threading.Thread(target=_interrupt_after, args=(weakrefs_own,), name="penstock-interrupt")
                with contextlib.suppress(RuntimeError):  # the program is ending, and starts no further thread
                    thread.start()

    return finalizer


@contextmanager
def _noted(arrived: list[FrameType | None]) -> Iterator[None]:
    """Add to `arrived` for each SIGINT, instead of calling its handler."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    signal.signal(signal.SIGINT, lambda _, frame: arrived.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _interrupt_after(frame: FrameType) -> None:
    """Interrupt the main thread when it has left `frame`."""
    while _is_running(frame):
        time.sleep(0.001)
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # wakes it, if it waits
    else:
        signal.raise_signal(signal.SIGINT)


def _is_running(frame: FrameType) -> bool:
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False
