"""DrivenCuda: an NVIDIA GPU, by torch's allocator and streams, and calls of the CUDA driver.

- Existing memory can be page-locked (`cuMemHostRegister`), so a slot is the source of the copy. torch's host allocator
  does not know of such memory and guards it with no event; that is done here.
- One event can stand for everything on every stream of a context (`cuCtxRecordEvent`, CUDA 12.5). One for each GPU in
  use guards the copies that the user makes. It would break a graph capture, so none is recorded during one.
- A batch's copy takes six calls of the driver, on events that are recorded again and again (see `cuda_driver`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import torch

from penstock.core.host import memlock_nbytes
from penstock.core.units import size_text
from penstock.device import captures
from penstock.device.accelerator import STAGED_NBYTES, Accelerator
from penstock.device.base import CopyPairs, Event, Memory, Parts, Registration, TensorSpec
from penstock.device.cuda_driver import (
    NON_BLOCKING,
    PORTABLE,
    Context,
    Contexts,
    DriverEvent,
    contexts_of,
    error_name,
    load,
)

if torch.version.cuda:
    captures.watch()  # not later: another thread may capture already when a loader makes the first device


def cuda_device(device: torch.device) -> Accelerator:
    """Return the device for "cuda:N", by the driver where that can be reached."""
    torch.cuda.init()
    driver = None if torch.version.hip else load()
    context = None if driver is None else contexts_of(driver).of(device.index)
    return Cuda(device) if context is None else DrivenCuda(device, context)


class Cuda(Accelerator):
    """An AMD GPU (by HIP's torch, as any accelerator), or an NVIDIA one whose driver is out of reach."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._outside = self._new_stream()

    def outside_capture(self) -> contextlib.AbstractContextManager[object]:
        """During a capture: work on another stream, and wait for it at the end.

        An event of the capturing stream would pull our streams into the graph, and waiting for or querying any other
        event would break it (the CUDA programming guide, "Prohibited and Unhandled Operations").
        """
        return self._aside() if torch.cuda.is_current_stream_capturing() else _ORDINARY

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        assert self._outside is not None
        with self._on(self._outside):
            yield
        self._outside.synchronize()


class DrivenCuda(Cuda):
    """An NVIDIA GPU; see `base.Device`. Its streams, events and uploads are calls of the driver.

    Device memory stays that of torch's allocator, on the consumer's stream.
    """

    can_register = True

    def __init__(self, device: torch.device, context: Context) -> None:
        self._context = context
        self._driver = context.driver
        self._contexts = contexts_of(context.driver)
        self._index: int = device.index
        super().__init__(device)
        assert self._up is not None
        assert self._down is not None
        self._side, self._down_handle = _handle_of(self._up), _handle_of(self._down)
        self.has_fence = hasattr(self._driver, "cuCtxRecordEvent")
        if self.has_fence:
            with captures.lock:
                first = None if captures.any_under_way() else context.record_all()
                self.has_fence = captures.any_under_way() or first is not None
            if first is not None:
                first.close()

    def outside_capture(self) -> contextlib.AbstractContextManager[object]:
        """In an ordinary loop nothing is to be done; else make the context current, and step aside from captures."""
        if captures.under_way or torch.cuda.is_current_stream_capturing() or not self._context.is_current():
            return self._in_context()
        return _ORDINARY

    @contextlib.contextmanager
    def _in_context(self) -> Iterator[None]:
        with self._context.current(), super().outside_capture():
            yield

    def current_stream(self) -> int:
        """Return the driver's handle of torch's current stream of this device in this thread."""
        return _raw_stream(self._index)

    def record_event(self) -> DriverEvent:
        """Return an event on the current stream."""
        event = self._context.take_event()
        if result := self._driver.cuEventRecord(event.handle, _raw_stream(self._index)):
            self._context.raise_error(result)
        return event

    def allocate(self, specs: Sequence[TensorSpec]) -> Memory:
        """Return memory from torch's caching allocator, on the current stream, with an event on that."""
        device, empty, stream = self.torch_device, torch.empty_strided, _raw_stream(self._index)
        tensors = [empty(size, stride, dtype=dtype, device=device) for size, stride, dtype in specs]
        event = self._context.take_event()
        if result := self._driver.cuEventRecord(event.handle, stream):
            self._context.raise_error(result)
        return Memory(tensors, event, stream)

    def wait_event(self, event: Event) -> int:
        """Make the current stream wait."""
        stream, own = _raw_stream(self._index), cast(DriverEvent, event)
        if result := self._driver.cuStreamWaitEvent(stream, own.handle, 0):
            self._context.raise_error(result)
        return stream

    def upload(self, copies: CopyPairs, after: Event) -> Event:
        """Copy on the upload stream; what is neither page-locked nor small goes by way of torch's pinned memory."""
        event, h2d, side = cast(DriverEvent, after), self._driver.cuMemcpyHtoDAsync_v2, self._side
        result = self._driver.cuStreamWaitEvent(side, event.handle, 0)
        others: list[tuple[torch.Tensor, torch.Tensor]] = []
        for there, source in copies:
            if there.stride() != source.stride() or not (source.nbytes < STAGED_NBYTES or source.is_pinned()):
                others.append((there, source))
            elif source.nbytes:
                result = result or h2d(there.data_ptr(), source.data_ptr(), source.nbytes, side)
        if others and self._up is not None:
            with self._on(self._up):
                for there, source in others:
                    there.copy_(self._page_locked(source), non_blocking=True)
        if result := result or self._driver.cuEventRecord(event.handle, side):
            self._context.raise_error(result)
        return event

    def upload_parts(self, tensors: Sequence[torch.Tensor], address: int, parts: Parts, after: Event) -> Event:
        """Copy on the upload stream: one call of the driver for each tensor."""
        driver, side, handle = self._driver, self._side, cast(DriverEvent, after).handle
        result = driver.cuStreamWaitEvent(side, handle, 0)
        for tensor, (offset, nbytes) in zip(tensors, parts, strict=True):
            result = result or driver.cuMemcpyHtoDAsync_v2(tensor.data_ptr(), address + offset, nbytes, side)
        # Recorded again, behind the copies: what waits for it already waits for where it was recorded before
        # (cuStreamWaitEvent, "captures the contents of hEvent at the time of this call").
        if result := result or driver.cuEventRecord(handle, side):
            self._context.raise_error(result)
        return after

    def download(self, copies: CopyPairs) -> Event:
        """Copy on the download stream, so that results do not queue behind batches."""
        assert self._down is not None
        event, down = self.record_event(), self._down_handle
        result = self._driver.cuStreamWaitEvent(down, event.handle, 0)
        with self._on(self._down):
            for destination, source in copies:
                destination.copy_(source, non_blocking=True)
        if result := result or self._driver.cuEventRecord(event.handle, down):
            self._context.raise_error(result)
        return event

    def register(self, memory: memoryview) -> Registration | None:
        """Page-lock `memory`; warn once if the system refuses."""
        captures.catch_up()
        array = np.frombuffer(memory, np.uint8)
        with self._context.current():
            result = self._driver.cuMemHostRegister_v2(
                ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(len(memory)), PORTABLE
            )
        if result:
            _warn_of_refusal(error_name(self._driver, result), len(memory))
            return None
        return _HostRegistration(self._context, self._contexts, array)

    def fence(self) -> Event | None:
        """Return an event after all work of all GPUs that this process uses; None while a graph is captured.

        A user may copy a batch to any of them, whichever one is current. Captures by other libraries than torch are
        seen on the current stream and on streams that synchronize with the default one.
        """
        if not self.has_fence:
            return None
        captures.catch_up()
        with captures.lock:
            if captures.any_under_way():
                return None
            events = [context.record_all() for context in self._contexts.active()]
        recorded = [event for event in events if event is not None]
        if len(recorded) == len(events):
            return recorded[0] if len(recorded) == 1 else _Events(recorded)
        for event in recorded:
            event.close()
        return None

    def _new_stream(self) -> torch.Stream | None:
        """Return a stream of its own: torch's come from a pool, where the user gets the same ones again."""
        stream = ctypes.c_void_p()
        with self._context.current():
            result = self._driver.cuStreamCreate(ctypes.byref(stream), NON_BLOCKING)
        if result:
            return super()._new_stream()
        external = torch.cuda.ExternalStream(stream.value, device=self.torch_device)
        # torch.Stream.wait_event does not wait for an event that a torch.cuda.Stream has recorded.
        return torch.Stream(
            stream_id=external.stream_id, device_index=external.device_index, device_type=external.device_type
        )


_ORDINARY = contextlib.nullcontext()

_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)
"""The handle of a device's current stream in this thread: the name is torch's own, which its compiled code calls."""


def _handle_of(stream: torch.Stream) -> int:
    found: int = torch.cuda.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    ).cuda_stream
    return found


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


class _HostRegistration:
    def __init__(self, context: Context, contexts: Contexts, array: np.ndarray) -> None:
        # The finalizer keeps the memory: during a capture it is unlocked later.
        self.close = weakref.finalize(self, _unregister, context, contexts, array, os.getpid())


def _unregister(context: Context, contexts: Contexts, array: np.ndarray, owner: int) -> None:
    if os.getpid() != owner:  # a forked child must not touch CUDA, and the memory is its parent's
        return

    def unregister() -> None:
        for used in contexts.active():
            with used.current():
                used.driver.cuCtxSynchronize()  # a copy that still reads it would go wrong; it is a loader's end
        with context.current():
            context.driver.cuMemHostUnregister(ctypes.c_void_p(array.ctypes.data))

    captures.after_captures(unregister)


class _Events:
    """Passes when all of several events have passed."""

    def __init__(self, events: list[DriverEvent]) -> None:
        self._events = events

    def query(self) -> bool:
        return all(event.query() for event in self._events)

    def synchronize(self) -> None:
        for event in self._events:
            event.synchronize()

    def close(self) -> None:
        for event in self._events:
            event.close()


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
