"""Cuda: torch's streams and allocator, and two functions of the CUDA driver that torch does not have.

- Existing memory can be page-locked (`cuMemHostRegister`), so a slot is the source of the copy. torch's host allocator
  does not know of such memory and guards it with no event; that is done here.
- One event can stand for everything on every stream of a context (`cuCtxRecordEvent`, CUDA 12.5). One for each GPU in
  use guards the copies that the user makes. It would break a graph capture, so none is recorded during one. Captures
  by other libraries than torch are seen on the current stream and on streams that synchronize with the default one.

The driver is called rather than the runtime, because an error of a runtime call would stay behind as its "last error"
and be raised by some later, unrelated call of torch.
Source: the CUDA driver API, sections on memory management, events and stream capture.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from penstock.core.host import memlock_nbytes
from penstock.core.numa import node_of_pci
from penstock.core.units import size_text
from penstock.device import captures
from penstock.device.accelerator import Accelerator
from penstock.device.base import Event, Registration

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: page-locked for every context
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_LEGACY_STREAM = ctypes.c_void_p(1)  # CU_STREAM_LEGACY
_CAPTURE_IMPLICIT = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT

if torch.version.cuda:
    captures.watch()  # not later: another thread may capture already when a loader makes the first device


class Cuda(Accelerator):
    """An NVIDIA (or, through HIP's torch, an AMD) GPU; see `base.Device`."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        self._driver: Any = None if torch.version.hip else _driver()
        self._contexts = None if self._driver is None else _contexts_of(self._driver)
        self._context = None if self._contexts is None else self._contexts.of(device.index)
        self.can_register = self._context is not None
        super().__init__(device)
        self._outside = self._new_stream()
        self.numa_node = None if self._driver is None else node_of_pci(_pci_address(self._driver, device.index))
        self.has_fence = self._context is not None and hasattr(self._driver, "cuCtxRecordEvent")
        if self.has_fence:
            with captures.held_back() as is_free:
                self.has_fence = not is_free or self._record_contexts() is not None

    @contextlib.contextmanager
    def outside_capture(self) -> Iterator[None]:
        """During a capture: work on another stream, in a mode that allows it, and wait for it at the end.

        An event of the capturing stream would pull our streams into the graph, and waiting for or querying any other
        event would break it (the CUDA programming guide, "Prohibited and Unhandled Operations").
        """
        if not torch.cuda.is_current_stream_capturing():
            yield
            return
        assert self._outside is not None
        with _relaxed(self._driver):
            with self._on(self._outside):
                yield
            self._outside.synchronize()

    def register(self, memory: memoryview) -> Registration | None:
        """Page-lock `memory`; warn once if the system refuses."""
        if self._context is None:
            return None
        captures.catch_up()
        array = np.frombuffer(memory, np.uint8)
        with _current(self._driver, self._context):
            result = self._driver.cuMemHostRegister_v2(
                ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(len(memory)), _PORTABLE
            )
        if result:
            _warn_of_refusal(_error_name(self._driver, result), len(memory))
            return None
        return _HostRegistration(self._driver, self._context, self._contexts, array)

    def fence(self) -> Event | None:
        """Return an event after all work of all GPUs that this process uses; None while a graph is captured.

        A user may copy a batch to any of them, whichever one is current.
        """
        if not self.has_fence:
            return None
        captures.catch_up()
        with captures.held_back() as is_free:
            return self._record_contexts() if is_free else None

    def _record_contexts(self) -> Event | None:
        assert self._contexts is not None
        events = [_ContextEvent(self._driver, context) for context in self._contexts.active()]
        if not all(event.is_recorded for event in events):
            return None
        return events[0] if len(events) == 1 else _Events(events)

    def _new_stream(self) -> torch.Stream | None:
        """Return a stream of its own: torch's come from a pool, where the user gets the same ones again."""
        if self._context is None:
            return super()._new_stream()
        stream = ctypes.c_void_p()
        with _current(self._driver, self._context):
            result = self._driver.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING)
        if result:
            return super()._new_stream()
        external = torch.cuda.ExternalStream(stream.value, device=self.torch_device)
        # torch.Stream.wait_event does not wait for an event that a torch.cuda.Stream has recorded.
        return torch.Stream(
            stream_id=external.stream_id, device_index=external.device_index, device_type=external.device_type
        )


def blas_workspace_nbytes(device: torch.device) -> int:
    """Return what matrix products of a thread take from torch's allocator for good: cuBLAS's and cuBLASLt's workspaces.

    Forward and backward of a step run in a thread each, and so take it twice.
    Source: torch's notes on CUDA semantics, "cuBLAS workspaces" (CUBLAS_WORKSPACE_CONFIG, CUBLASLT_WORKSPACE_SIZE).
    """
    if device.type != "cuda" or torch.version.hip:
        return 0
    chosen = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    is_hopper = torch.cuda.get_device_capability(device)[0] in (9, 10)
    default = [(4096, 8)] if is_hopper else [(4096, 2), (16, 8)]
    lt_kib = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "1024")
    kib = sum(int(size) * int(count) for size, count in chosen or default)
    return (kib + (int(lt_kib) if lt_kib.isdigit() else 1024)) << 10


def take_blas_workspaces(device: torch.device) -> None:
    """Have torch allocate the workspaces that matrix products of forward and backward take for good on this stream."""
    if blas_workspace_nbytes(device):
        with torch.enable_grad():
            x = torch.ones(8, 8, device=device, requires_grad=True)
            torch.autograd.grad(torch.addmm(x[0], x, x).sum(), x)


def sum_buffer_nbytes(device: torch.device, inputs: int, outputs: int, itemsize: int) -> int:
    """Return what torch takes while it sums the rows of a contiguous (inputs, outputs), as for the gradient of a bias.

    Where the rows are many, several blocks of threads sum parts of a column, and their results are summed then.
    Source: setReduceConfig and global_memory_size in ATen/native/cuda/Reduce.cuh. (`itemsize` is that of the sums.)
    """
    if device.type != "cuda" or torch.version.hip or not inputs or not outputs:
        return 0
    found = torch.cuda.get_device_properties(device)
    vector = next(size for size in (4, 2, 1) if outputs % size == 0)
    most = 512 // vector
    wide, high = (min(most, 1 << (size.bit_length() - 1)) for size in (outputs // vector, inputs))
    height = min(high, most // min(wide, 32))
    width = min(wide, most // height)
    if inputs < min(16 * height, 256):
        return 0
    of_a_thread, columns = -(-inputs // height), -(-outputs // vector // width)
    target = found.multi_processor_count * (found.max_threads_per_multi_processor // (width * height))
    if of_a_thread < 256 or columns > target:
        return 0
    blocks = max(min(-(-target // columns), -(-of_a_thread // 16)), -(-of_a_thread // 256))
    return itemsize * outputs * blocks * width * vector if blocks > 1 else 0


class _Contexts:
    """The primary context of every GPU that this process uses."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        count = ctypes.c_int()
        driver.cuDeviceGetCount(ctypes.byref(count))
        self._unused = [*range(count.value)]
        self._used: dict[int, Any] = {}

    def of(self, index: int) -> Any:
        """Return the context that torch uses on device `index` of those visible to this process, or None."""
        if index not in self._used:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            if self._driver.cuDeviceGet(ctypes.byref(device), index) or self._driver.cuDevicePrimaryCtxRetain(
                ctypes.byref(context), device
            ):
                return None
            self._used[index] = context
            self._unused = [other for other in self._unused if other != index]
        return self._used[index]

    def active(self) -> list[Any]:
        """Return those that are in use. A copy to a device cannot have begun before its context was."""
        for index in self._unused:
            device, flags, is_active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
            self._driver.cuDeviceGet(ctypes.byref(device), index)
            self._driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active))
            if is_active.value:
                self.of(index)
        return [*self._used.values()]


@functools.cache
def _contexts_of(driver: Any) -> _Contexts:
    return _Contexts(driver)


class _HostRegistration:
    def __init__(self, driver: Any, context: Any, contexts: Any, array: np.ndarray) -> None:
        # The finalizer keeps the memory: during a capture it is unlocked later.
        self.close = weakref.finalize(self, _unregister, driver, context, contexts, array, os.getpid())


def _unregister(driver: Any, context: Any, contexts: _Contexts, array: np.ndarray, owner: int) -> None:
    if os.getpid() != owner:  # a forked child must not touch CUDA, and the memory is its parent's
        return

    def unregister() -> None:
        for used in contexts.active():
            with _current(driver, used):
                driver.cuCtxSynchronize()  # a copy that still reads it would go wrong; this happens when a loader ends
        with _current(driver, context):
            driver.cuMemHostUnregister(ctypes.c_void_p(array.ctypes.data))

    captures.after_captures(unregister)


class _ContextEvent:
    """An event of the driver, after all work of a context."""

    def __init__(self, driver: Any, context: Any) -> None:
        self._driver = driver
        self._context = context
        self._event = ctypes.c_void_p()
        self.is_recorded = False
        with _current(driver, context):
            status = ctypes.c_int()
            if driver.cuStreamIsCapturing(_LEGACY_STREAM, ctypes.byref(status)) == _CAPTURE_IMPLICIT:
                return
            if driver.cuEventCreate(ctypes.byref(self._event), _NO_TIMING):
                return
            self.is_recorded = driver.cuCtxRecordEvent(context, self._event) == 0
        weakref.finalize(self, _destroy, driver, self._event, os.getpid())

    def query(self) -> bool:
        with _current(self._driver, self._context):
            return bool(self._driver.cuEventQuery(self._event) != _NOT_READY)

    def synchronize(self) -> None:
        with _current(self._driver, self._context):
            self._driver.cuEventSynchronize(self._event)


class _Events:
    """Passes when all of several events have passed."""

    def __init__(self, events: list[_ContextEvent]) -> None:
        self._events = events

    def query(self) -> bool:
        return all(event.query() for event in self._events)

    def synchronize(self) -> None:
        for event in self._events:
            event.synchronize()


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


def _pci_address(driver: Any, index: int) -> str:
    """Return the PCI address of device `index`, as in "0000:3b:00.0"; empty if the driver does not report it."""
    device, address = ctypes.c_int(), ctypes.create_string_buffer(32)
    if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetPCIBusId(address, len(address), device):
        return ""
    return address.value.decode()


def _error_name(driver: Any, result: int) -> str:
    words = ctypes.c_char_p()
    driver.cuGetErrorName(result, ctypes.byref(words))
    return (words.value or b"unknown error").decode()


@functools.cache
def _warn_of_refusal(error: str, nbytes: int) -> None:
    limit = memlock_nbytes()
    bound = "" if limit >= nbytes else f" (RLIMIT_MEMLOCK is {size_text(int(limit))}: `ulimit -l` raises it)"
    warnings.warn(
        f"the system refuses to page-lock {size_text(nbytes)} of host memory ({error}); batches are copied by way "
        f"of torch's pinned memory, which is slower. Give the container more memory{bound}, or lower ring_bytes or "
        f"batch_size.",
        stacklevel=2,
    )
