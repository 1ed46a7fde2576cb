"""Holds Ctrl-C back while Python would lose it.

Python calls some functions from C, and prints and drops what they raise ("Exception ignored in ..."): the hooks of
`os.register_at_fork` (`logging` has some), `__del__`, the callbacks of weak references. A fork takes milliseconds, so
that a Ctrl-C often arrives during it; Python then raises KeyboardInterrupt at the next line that it runs, which is a
hook's.

Rejected: to block the signal (`signal.pthread_sigmask`). That is for one thread, and the kernel then gives the signal
to another; Python runs its handler in the main thread all the same.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    arrived: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: arrived.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(signal.SIGINT, arrived[0])
