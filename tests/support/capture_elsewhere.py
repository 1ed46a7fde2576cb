"""A capture of a CUDA graph by another thread, on the simulated device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from penstock import Sim


@contextlib.contextmanager
def captured_elsewhere(device: Sim) -> Iterator[None]:
    """Have another thread capture on `device` meanwhile."""
    began, over = threading.Event(), threading.Event()

    def capture() -> None:
        device.capturing = True
        began.set()
        over.wait()
        device.capturing = False

    thread = threading.Thread(target=capture)
    thread.start()
    began.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()
