"""The CUDA driver, called by ctypes: contexts, events, and copies from page-locked memory.

torch has no function for some of it (page-locking existing memory, an event behind a whole context). For what is done
for every batch, torch's functions cost ten times as many of Python's instructions as a call of the driver.

The driver is called rather than the runtime, because an error of a runtime call would stay behind as its "last error"
and be raised by some later, unrelated call of torch.
Source: the CUDA driver API, sections on context management, memory management, events and stream capture.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from penstock.device import captures

NOT_READY = 600  # CUDA_ERROR_NOT_READY
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: page-locked for every context
LEGACY_STREAM = ctypes.c_void_p(1)  # CU_STREAM_LEGACY
CAPTURE_IMPLICIT = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_BLOCKING = 3  # CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING

_HANDLE, _SIZE, _FLAGS = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuCtxPushCurrent_v2": (_HANDLE,),
    "cuEventDestroy_v2": (_HANDLE,),
    "cuEventQuery": (_HANDLE,),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventSynchronize": (_HANDLE,),
    "cuMemcpyHtoDAsync_v2": (_HANDLE, _HANDLE, _SIZE, _HANDLE),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, _FLAGS),
}
"""Of the functions that are given plain numbers, which ctypes would take for ints of 32 bits."""


@functools.cache
def load() -> Any:
    """Return the driver's library; None if it cannot be loaded."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            driver = ctypes.CDLL(name)
        except OSError:
            continue
        for function, arguments in _ARGUMENTS.items():
            getattr(driver, function).argtypes = arguments
        if hasattr(driver, "cuCtxRecordEvent"):  # since CUDA 12.5
            driver.cuCtxRecordEvent.argtypes = _HANDLE, _HANDLE
        return driver if driver.cuInit(0) == 0 else None
    return None


@contextlib.contextmanager
def relaxed(driver: Any) -> Iterator[None]:
    """Let this thread make calls that are not part of a capture in this or any other thread."""
    mode = ctypes.c_int(RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # `mode` now holds the previous one
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def error_name(driver: Any, result: int) -> str:
    """Return the driver's name of an error."""
    words = ctypes.c_char_p()
    driver.cuGetErrorName(result, ctypes.byref(words))
    return (words.value or b"unknown error").decode()


class DriverEvent:
    """An event of the driver, recorded again and again; see `base.Event`."""

    __slots__ = ("__weakref__", "_context", "handle")

    def __init__(self, context: Context, handle: int) -> None:
        self.handle = handle
        self._context = context
        weakref.finalize(self, _destroy, context.driver, handle, os.getpid()).atexit = False

    def query(self) -> bool:
        """Return whether it has passed; an error of the device counts as that, since nothing runs there any more."""
        context = self._context
        if captures.under_way:
            with context.current():
                return bool(context.driver.cuEventQuery(self.handle) != NOT_READY)
        result = context.driver.cuEventQuery(self.handle)
        if result in (0, NOT_READY):
            return bool(result == 0)
        with context.current():  # this thread had another context, or none
            return bool(context.driver.cuEventQuery(self.handle) != NOT_READY)

    def synchronize(self) -> None:
        """Wait until it has passed, without using a core.

        Raises:
            torch.AcceleratorError: the device is broken.
        """
        if result := self._context.wait(self.handle):  # of its own, or of something that failed before
            self._context.raise_error(result)

    def close(self) -> None:
        """Let the device record it again."""
        self._context.events.append(self)


def _destroy(driver: Any, handle: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not touch CUDA
        driver.cuEventDestroy_v2(handle)


class Context:
    """The primary context of a GPU, which torch uses, and its events."""

    def __init__(self, driver: Any, index: int, handle: int) -> None:
        self.driver = driver
        self.handle = handle
        self.index = index
        self.events: deque[DriverEvent] = deque()
        """Those that nobody uses."""
        self._wakers: deque[tuple[int, int]] = deque()
        """Streams, and an event on each, that nobody waits on."""

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make it current for a block, in any thread, during a capture too."""
        driver = self.driver
        with relaxed(driver):
            driver.cuCtxPushCurrent_v2(self.handle)
            try:
                yield
            finally:
                driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def is_current(self) -> bool:
        """Return whether calls of this thread reach it. A thread that has not called CUDA yet has no context."""
        found = ctypes.c_void_p()
        return self.driver.cuCtxGetCurrent(ctypes.byref(found)) == 0 and found.value == self.handle

    def take_event(self) -> DriverEvent:
        """Return an event to record."""
        try:
            return self.events.pop()
        except IndexError:
            pass
        handle = ctypes.c_void_p()
        with self.current():
            result = self.driver.cuEventCreate(ctypes.byref(handle), _NO_TIMING)
        if result:
            self.raise_error(result)
        return DriverEvent(self, handle.value or 0)

    def wait(self, event: int) -> int:
        """Wait for an event without using a core; return the driver's result.

        An event that can wake the host has the GPU interrupt it each time that it is recorded, so those of batches
        cannot. The few that are waited for are waited for by a stream, and an event that can is recorded behind them.
        """
        with self.current():
            stream, waker = self._wakers.pop() if self._wakers else self._new_waker()
            result = (
                self.driver.cuStreamWaitEvent(stream, event, 0)
                or self.driver.cuEventRecord(waker, stream)
                or self.driver.cuEventSynchronize(waker)
            )
        self._wakers.append((stream, waker))
        return int(result)

    def _new_waker(self) -> tuple[int, int]:
        stream, event = ctypes.c_void_p(), ctypes.c_void_p()
        result = self.driver.cuStreamCreate(ctypes.byref(stream), NON_BLOCKING) or self.driver.cuEventCreate(
            ctypes.byref(event), _BLOCKING
        )
        if result:
            self.raise_error(result)
        return stream.value or 0, event.value or 0

    def record_all(self) -> DriverEvent | None:
        """Return an event after all work of the context, whatever its stream; None where none can be recorded.

        It would break a capture in this context: the caller holds `captures.lock` and knows of none.
        """
        event = self.take_event()
        if self.is_current():
            is_recorded = self._record(event)
        else:
            with self.current():
                is_recorded = self._record(event)
        if is_recorded:
            return event
        event.close()
        return None

    def _record(self, event: DriverEvent) -> bool:
        status = ctypes.c_int()
        if self.driver.cuStreamIsCapturing(LEGACY_STREAM, ctypes.byref(status)) == CAPTURE_IMPLICIT:
            return False
        return bool(self.driver.cuCtxRecordEvent(self.handle, event.handle) == 0)

    def raise_error(self, result: int) -> None:
        """Raise what the driver has returned, as torch does: its own error first, if the whole device is broken."""
        torch.cuda.synchronize(self.index)
        raise torch.AcceleratorError(f"CUDA driver error: {error_name(self.driver, result)}")


class Contexts:
    """The primary contexts of all GPUs that this process uses."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        count = ctypes.c_int()
        driver.cuDeviceGetCount(ctypes.byref(count))
        self._unused = [*range(count.value)]
        self._used: dict[int, Context] = {}

    def of(self, index: int) -> Context | None:
        """Return the context that torch uses on device `index` of those visible to this process, or None."""
        if index not in self._used:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            if self._driver.cuDeviceGet(ctypes.byref(device), index) or self._driver.cuDevicePrimaryCtxRetain(
                ctypes.byref(context), device
            ):
                return None
            self._used[index] = Context(self._driver, index, context.value or 0)
            self._unused = [other for other in self._unused if other != index]
        return self._used[index]

    def active(self) -> list[Context]:
        """Return those that are in use. A copy to a device cannot have begun before its context was."""
        for index in self._unused:
            device, flags, is_active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
            self._driver.cuDeviceGet(ctypes.byref(device), index)
            self._driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active))
            if is_active.value:
                self.of(index)
        return [*self._used.values()]


@functools.cache
def contexts_of(driver: Any) -> Contexts:
    """Return the contexts of the one driver of this process."""
    return Contexts(driver)
