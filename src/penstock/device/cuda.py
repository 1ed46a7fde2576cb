"""Cuda: torch's streams and allocator, and two functions of the CUDA driver that torch does not have.

- Existing memory can be page-locked (`cuMemHostRegister`), so a slot is the source of the copy. torch's host allocator
  does not know of such memory and guards it with no event; that is done here.
- One event can stand for everything on every stream of the context (`cuCtxRecordEvent`, CUDA 12.5). It guards copies
  that the user makes. It would break a graph capture, so none is recorded during one.

The driver is called rather than the runtime, because an error of a runtime call would stay behind as its "last error"
and be raised by some later, unrelated call of torch.
Source: the CUDA driver API, sections on memory management, events and stream capture.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from penstock.core.host import memlock_nbytes
from penstock.core.numa import node_of_pci
from penstock.core.units import size_text
from penstock.device.accelerator import Accelerator
from penstock.device.base import Event, Registration

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: page-locked for every context
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Cuda(Accelerator):
    """An NVIDIA (or, through HIP's torch, an AMD) GPU; see `base.Device`."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        super().__init__(device)
        driver = None if torch.version.hip else _driver()
        self._driver: Any = driver
        self._context = _primary_context(driver, self.torch_device.index) if driver is not None else None
        self.has_fence = self._context is not None and _records_contexts(driver, self._context)
        self.numa_node = None if driver is None else node_of_pci(_pci_address(driver, self.torch_device.index))

    @contextlib.contextmanager
    def outside_capture(self) -> Iterator[None]:
        """During a capture: work on another stream, in a mode that allows it, and wait for it at the end.

        An event of the capturing stream would pull our streams into the graph, and waiting for or querying any other
        event would break it (the CUDA programming guide, "Prohibited and Unhandled Operations").
        """
        if not torch.cuda.is_current_stream_capturing():
            yield
            return
        with _relaxed(self._driver):
            outside = torch.cuda.Stream(self.torch_device)
            with torch.cuda.stream(outside):
                yield
            outside.synchronize()

    def register(self, memory: memoryview) -> Registration | None:
        """Page-lock `memory`; warn once if the system refuses."""
        if self._context is None:
            return None
        address = np.frombuffer(memory, np.uint8).ctypes.data
        with _current(self._driver, self._context):
            result = self._driver.cuMemHostRegister_v2(
                ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), _PORTABLE
            )
        if result:
            _warn_of_refusal(_error_name(self._driver, result), len(memory))
            return None
        return _HostRegistration(self._driver, self._context, address)

    def fence(self) -> Event | None:
        """Return an event after all work of the context; None during a capture."""
        if not self.has_fence or torch.cuda.is_current_stream_capturing():
            return None
        event = _ContextEvent(self._driver, self._context)
        return event if event.is_recorded else None


class _HostRegistration:
    def __init__(self, driver: Any, context: Any, address: int) -> None:
        self.close = weakref.finalize(self, _unregister, driver, context, address, os.getpid())


def _unregister(driver: Any, context: Any, address: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child must not touch CUDA, and the memory is its parent's
        return
    with _current(driver, context):
        driver.cuCtxSynchronize()  # a copy that still reads it would go wrong; this happens when a loader ends
        driver.cuMemHostUnregister(ctypes.c_void_p(address))


class _ContextEvent:
    """An event of the driver, after all work of a context."""

    def __init__(self, driver: Any, context: Any) -> None:
        self._driver = driver
        self._context = context
        self._event = ctypes.c_void_p()
        with _current(driver, context):
            is_created = driver.cuEventCreate(ctypes.byref(self._event), _NO_TIMING) == 0
        self.is_recorded = is_created and driver.cuCtxRecordEvent(context, self._event) == 0
        if is_created:
            weakref.finalize(self, _destroy, driver, self._event, os.getpid())

    def query(self) -> bool:
        with _current(self._driver, self._context):
            return bool(self._driver.cuEventQuery(self._event) != _NOT_READY)

    def synchronize(self) -> None:
        with _current(self._driver, self._context):
            self._driver.cuEventSynchronize(self._event)


def _destroy(driver: Any, event: Any, owner: int) -> None:
    if os.getpid() == owner:
        driver.cuEventDestroy_v2(event)


@contextlib.contextmanager
def _current(driver: Any, context: Any) -> Iterator[None]:
    """Make a context current for a block, in any thread, during a capture too."""
    with _relaxed(driver):
        driver.cuCtxPushCurrent_v2(context)
        try:
            yield
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@contextlib.contextmanager
def _relaxed(driver: Any) -> Iterator[None]:
    """Let this thread make calls that are not part of a capture in this or any other thread."""
    if driver is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # `mode` now holds the previous one
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@functools.cache
def _driver() -> Any:
    """Return the driver's library; None if it cannot be loaded."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            driver = ctypes.CDLL(name)
        except OSError:
            continue
        return driver if driver.cuInit(0) == 0 else None
    return None


def _primary_context(driver: Any, index: int) -> Any:
    """Return the context that torch uses on device `index` of those visible to this process, or None."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuDeviceGet(ctypes.byref(device), index):
        return None
    return None if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) else context


def _pci_address(driver: Any, index: int) -> str:
    """Return the PCI address of device `index`, as in "0000:3b:00.0"; empty if the driver does not report it."""
    device, address = ctypes.c_int(), ctypes.create_string_buffer(32)
    if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetPCIBusId(address, len(address), device):
        return ""
    return address.value.decode()


def _records_contexts(driver: Any, context: Any) -> bool:
    return hasattr(driver, "cuCtxRecordEvent") and _ContextEvent(driver, context).is_recorded


def _error_name(driver: Any, result: int) -> str:
    words = ctypes.c_char_p()
    driver.cuGetErrorName(result, ctypes.byref(words))
    return (words.value or b"unknown error").decode()


@functools.cache
def _warn_of_refusal(error: str, nbytes: int) -> None:
    limit = memlock_nbytes()
    bound = "" if limit >= nbytes else f" (RLIMIT_MEMLOCK is {size_text(int(limit))}: `ulimit -l` raises it)"
    warnings.warn(
        f"the system refuses to page-lock {size_text(nbytes)} of host memory ({error}); batches are copied from "
        f"pageable memory, which is slower. Give the container more memory{bound}, or lower ring_bytes or batch_size.",
        stacklevel=2,
    )
