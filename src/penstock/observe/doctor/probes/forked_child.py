"""A forked child that measures something, and sends it back."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

_GRACE_S = 1.0


def measure_in_child(run: Callable[..., None], *arguments: Any, seconds: float) -> Any:
    """Call `run(*arguments, pipe)` in a forked child, which is to send one thing in about so many seconds.

    Returns:
        What it sent; None where it took too long, or was ended.
    """
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=run, args=(*arguments, there), daemon=True)
    child.start()
    there.close()
    try:
        return here.recv() if here.poll(seconds + _GRACE_S) else None
    except EOFError:  # it was ended
        return None
    finally:
        child.kill()
        child.join()
        child.close()
        here.close()
