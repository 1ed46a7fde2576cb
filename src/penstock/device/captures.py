"""Graph captures under way in this process, during which some calls of CUDA must not be made.

An event behind all work of a context, and waiting for a context, invalidate every capture in it, whichever thread
captures and in whichever mode (CUDA driver API: cuCtxRecordEvent, cuCtxSynchronize). torch reports captures of the
current stream only. So its CUDAGraph notes here when a capture begins and ends, from the import of `device.cuda` on.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

lock = threading.RLock()  # a finalizer may need it in a thread that has it
"""While it is held no capture begins: hold it around what would break one, from asking `any_under_way` on, briefly."""

under_way: dict[int, weakref.ref[Any]] = {}
"""The graphs that are captured just now, by id."""

_postponed: deque[Callable[[], object]] = deque()


def any_under_way() -> bool:
    """Return whether some thread captures a graph, as far as torch knows."""
    return bool(under_way) or torch.cuda.is_current_stream_capturing()


def after_captures(action: Callable[[], object]) -> None:
    """Call `action` now; while a capture is under way, at the first call of this or `catch_up` after it."""
    _postponed.append(action)
    catch_up()


def catch_up() -> None:
    """Do what was postponed, if no capture is under way any more."""
    if _postponed:
        with lock:
            while _postponed and not any_under_way():
                _postponed.popleft()()


@functools.cache
def watch() -> None:
    """Have torch's CUDAGraph note its captures, from now on."""
    graph = torch.cuda.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        key = id(self)
        with lock:
            under_way[key] = weakref.ref(self, lambda _: under_way.pop(key, None))  # it may be dropped before its end
        try:
            begin(self, *args, **kwargs)
        except BaseException:
            under_way.pop(key, None)
            raise

    @functools.wraps(end)
    def capture_end(self: Any) -> None:
        try:
            end(self)
        finally:
            under_way.pop(id(self), None)
            catch_up()

    graph.capture_begin, graph.capture_end = capture_begin, capture_end  # type: ignore[method-assign]
