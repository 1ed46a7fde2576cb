"""Graph captures under way in this process, during which some calls of CUDA must not be made.

An event behind all work of a context, and waiting for a context, invalidate every capture in it, whichever thread
captures and in whichever mode (CUDA driver API: cuCtxRecordEvent, cuCtxSynchronize). torch reports captures of the
current stream only. So its CUDAGraph notes here when a capture begins and ends, from the import of `device.cuda` on.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

_lock = threading.RLock()  # a finalizer may need it in a thread that has it
_under_way: weakref.WeakSet[Any] = weakref.WeakSet()
_postponed: deque[Callable[[], object]] = deque()


@contextlib.contextmanager
def held_back() -> Iterator[bool]:
    """Let no capture begin during a block, which must be short; yield whether none is under way."""
    with _lock:
        yield not _under_way and not torch.cuda.is_current_stream_capturing()


def after_captures(action: Callable[[], object]) -> None:
    """Call `action` now; while a capture is under way, at the first call of this or `catch_up` after it."""
    _postponed.append(action)
    catch_up()


def catch_up() -> None:
    """Do what was postponed, if no capture is under way any more."""
    with held_back() as is_free:
        while is_free and _postponed:
            _postponed.popleft()()


@functools.cache
def watch() -> None:
    """Have torch's CUDAGraph note its captures, from now on."""
    graph = torch.cuda.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        with _lock:
            _under_way.add(self)
        try:
            begin(self, *args, **kwargs)
        except BaseException:
            with _lock:
                _under_way.discard(self)
            raise

    @functools.wraps(end)
    def capture_end(self: Any) -> None:
        try:
            end(self)
        finally:
            with _lock:
                _under_way.discard(self)
            catch_up()

    graph.capture_begin, graph.capture_end = capture_begin, capture_end  # type: ignore[method-assign]
