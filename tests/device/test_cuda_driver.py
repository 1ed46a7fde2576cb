"""What is asked of the CUDA driver, with a driver that only takes notes: no GPU is needed."""

from __future__ import annotations

import mmap
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.device import captures, cuda, cuda_driver
from penstock.device.base import Event
from penstock.device.cuda import DrivenCuda, cuda_device
from penstock.device.cuda_driver import Contexts


class Notes:
    """A driver whose every call succeeds, but those in `refusing`. The first `active` of its GPUs are in use."""

    def __init__(self, *, active: int = 1, **refusing: int) -> None:
        self.refusing = refusing
        self.active = active
        self.calls: list[str] = []
        self.recorded: list[int] = []
        self.events = 0
        self.current = 100

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 4
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = index
        return 0

    def cuDevicePrimaryCtxGetState(self, device: Any, flags: Any, is_active: Any) -> int:  # noqa: N802
        is_active._obj.value = device.value < self.active
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        assert device.value < self.active, "a context of a GPU that the program does not use"
        context._obj.value = 100 + device.value
        return 0

    def cuCtxRecordEvent(self, context: Any, event: Any) -> int:  # noqa: N802
        self.recorded.append(context)
        return self.refusing.get("cuCtxRecordEvent", 0)

    def cuEventCreate(self, event: Any, flags: int) -> int:  # noqa: N802
        self.events += 1
        event._obj.value = 1000 + self.events
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = self.current
        return 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*_: Any) -> int:
            if name not in {"cuThreadExchangeStreamCaptureMode", "cuStreamIsCapturing"}:  # around others
                self.calls.append(name)
            return self.refusing.get(name, 0)

        return call


def made(driver: Notes, *, has_fence: bool = True) -> DrivenCuda:
    device = object.__new__(DrivenCuda)
    device._driver, device._contexts, device.has_fence = driver, Contexts(driver), has_fence
    context = device._contexts.of(0)
    assert context is not None
    device._context, device._side, device._index, device.torch_device = context, 7, 0, torch.device("cuda", 0)
    return device


@pytest.fixture(autouse=True)
def _nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def page() -> memoryview:
    return memoryview(mmap.mmap(-1, 4096))


def test_memory_is_registered_in_the_context_and_unregistered_when_nothing_reads_it() -> None:
    driver = Notes()
    registration = made(driver).register(page())
    assert registration is not None
    assert driver.calls == ["cuCtxPushCurrent_v2", "cuMemHostRegister_v2", "cuCtxPopCurrent_v2"]
    driver.calls.clear()
    registration.close()
    registration.close()
    push, pop = "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"
    assert driver.calls == [push, "cuCtxSynchronize", pop, push, "cuMemHostUnregister", pop]


def test_a_refusal_is_one_warning_and_no_registration() -> None:
    cuda._warn_of_refusal.cache_clear()
    device = made(Notes(cuMemHostRegister_v2=2))
    with pytest.warns(UserWarning, match=r"refuses to page-lock 4\.0 KiB.*copied by way of torch's pinned memory"):
        assert device.register(page()) is None
    assert device.register(page()) is None  # without another warning, which would be an error


def test_a_refusal_names_the_limit_on_locked_memory_where_that_is_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda._warn_of_refusal.cache_clear()
    monkeypatch.setattr(cuda, "memlock_nbytes", lambda: 1024)
    with pytest.warns(UserWarning, match=r"RLIMIT_MEMLOCK is 1\.0 KiB: `ulimit -l` raises it"):
        made(Notes(cuMemHostRegister_v2=2)).register(page())


def test_every_call_is_made_in_a_mode_that_a_capture_allows() -> None:
    modes: list[int] = []

    class Exchanging(Notes):
        def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
            modes.append(mode._obj.value)
            mode._obj.value = 0  # the mode before
            return len(self.calls)

        def cuMemHostRegister_v2(self, *_: Any) -> int:  # noqa: N802
            assert modes == [cuda_driver.RELAXED]
            return 0

    registration = made(Exchanging()).register(page())
    assert registration is not None
    assert modes == [cuda_driver.RELAXED, 0]


def test_a_fence_is_an_event_of_the_context() -> None:
    driver = Notes(cuEventQuery=600)
    fence = made(driver).fence()
    assert fence is not None
    assert driver.recorded == [100]
    assert not fence.query()
    driver.refusing.clear()
    assert fence.query()
    fence.synchronize()
    del fence
    assert driver.calls[-1] == "cuEventDestroy_v2"


def test_there_is_no_fence_while_a_graph_is_captured_or_where_the_driver_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert made(Notes()).fence() is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert made(Notes(), has_fence=False).fence() is None
    assert made(Notes(cuCtxRecordEvent=900)).fence() is None


def test_a_forked_child_leaves_the_driver_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Notes()
    registration, fence = made(driver).register(page()), made(driver).fence()
    driver.calls.clear()
    assert registration is not None
    monkeypatch.setattr(cuda.os, "getpid", lambda: -1)
    del registration, fence
    assert driver.calls == []


def test_fences_and_waits_cover_every_gpu_in_use() -> None:
    driver = Notes(active=1)
    device = made(driver)
    assert device.fence() is not None
    driver.active = 3  # the program has copied something to two more
    fence = device.fence()
    assert driver.recorded == [100, 100, 101, 102]
    passed = iter([0, 0, 600])
    driver.cuEventQuery = lambda _: next(passed)  # type: ignore[method-assign]
    assert fence is not None
    assert not fence.query()
    registration = device.register(page())
    assert registration is not None
    driver.calls.clear()
    registration.close()
    assert driver.calls.count("cuCtxSynchronize") == 3


# ── events ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def _on_stream_five(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_raw_stream", lambda _: 5)


@pytest.mark.usefixtures("_on_stream_five")
def test_a_batch_takes_three_records_and_waits_of_one_event_that_is_used_again() -> None:
    driver, calls = Notes(), []
    driver.cuEventRecord = lambda event, stream: calls.append(("record", event, stream))  # type: ignore[attr-defined]
    driver.cuStreamWaitEvent = lambda stream, event, _: calls.append(("wait", event, stream))  # type: ignore[attr-defined]
    device, memory = made(driver), torch.empty(8, dtype=torch.uint8)
    driver.cuMemcpyHtoDAsync_v2 = lambda *call: calls.append(("copy", *call))  # type: ignore[attr-defined]
    for _ in range(3):
        event: Event = device.record_event()
        event = device.upload_parts([memory], 4096, [(512, 8)], event)
        device.wait_event(event)
        event.close()
        assert calls == [
            ("record", 1001, 5), ("wait", 1001, 7), ("copy", memory.data_ptr(), 4608, 8, 7), ("record", 1001, 7),
            ("wait", 1001, 5),
        ]  # fmt: skip
        calls.clear()
    assert driver.events == 1


@pytest.mark.usefixtures("_on_stream_five")
def test_an_event_that_is_not_over_in_a_thread_without_a_context_is_asked_in_its_own() -> None:
    driver = Notes(cuEventQuery=201)  # CUDA_ERROR_INVALID_CONTEXT
    event = made(driver).record_event()
    answers = iter([201, 600, 201, 0])
    driver.cuEventQuery = lambda _: next(answers)  # type: ignore[attr-defined]
    assert not event.query()
    assert event.query()
    assert driver.calls.count("cuCtxPushCurrent_v2") == 3


@pytest.mark.usefixtures("_on_stream_five")
def test_an_error_of_the_driver_is_one_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    device = made(Notes(cuEventRecord=700))
    with pytest.raises(torch.AcceleratorError, match="CUDA driver error: unknown error"):
        device.record_event()


def test_a_device_is_used_as_it_is_only_where_its_context_is_current_and_nothing_is_captured(
    graph: type[Graph],
) -> None:
    driver, capturing = Notes(), graph()
    device = made(driver)
    with device.outside_capture():
        assert driver.calls == []
    driver.current = 0  # a thread that has not called CUDA
    with device.outside_capture():
        assert driver.calls == ["cuCtxPushCurrent_v2"]
    driver.calls.clear()
    driver.current = 100
    capturing.capture_begin()
    with device.outside_capture():
        assert driver.calls == ["cuCtxPushCurrent_v2"]
    capturing.capture_end()


class Graph:
    """In the place of torch's CUDAGraph."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if capture_error_mode == "refused":
            raise RuntimeError("it cannot begin")

    def capture_end(self) -> None:
        pass


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> type[Graph]:
    watched = type("Watched", (Graph,), {})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", watched)
    captures.watch.__wrapped__()
    return watched


def test_a_capture_in_another_thread_puts_off_what_would_break_it(graph: type[Graph]) -> None:
    driver = Notes()
    device = made(driver)
    registration = device.register(page())
    assert registration is not None
    capturing = graph()
    thread = threading.Thread(target=capturing.capture_begin)
    thread.start()
    thread.join()
    driver.calls.clear()
    assert device.fence() is None
    registration.close()
    assert driver.calls == driver.recorded == []
    capturing.capture_end()
    assert "cuMemHostUnregister" in driver.calls
    assert device.fence() is not None


def test_a_capture_that_could_not_begin_or_was_dropped_is_not_waited_for(graph: type[Graph]) -> None:
    device = made(Notes())
    refused, dropped = graph(), graph()
    with pytest.raises(RuntimeError, match="cannot begin"):
        refused.capture_begin(capture_error_mode="refused")
    dropped.capture_begin()
    assert device.fence() is None
    del dropped
    assert device.fence() is not None


def test_a_capture_of_another_library_on_a_blocking_stream_is_seen_by_the_default_stream() -> None:
    driver = Notes(cuStreamIsCapturing=cuda_driver.CAPTURE_IMPLICIT)
    assert made(driver).fence() is None
    assert driver.recorded == []


@pytest.mark.parametrize(
    ("capability", "chosen", "kib"),
    [((9, 0), None, 33 << 10), ((8, 0), None, 9344), ((9, 0), ":16:8", 1152), ((8, 0), ":4096:2:16:8", 9344)],
)
def test_the_workspaces_of_matrix_products_are_those_that_torch_takes(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], chosen: str | None, kib: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE", raising=False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", chosen)
    assert cuda.blas_workspace_nbytes(torch.device("cuda", 0)) == kib << 10
    assert cuda.blas_workspace_nbytes(torch.device("cpu")) == 0
    cuda.take_blas_workspaces(torch.device("cpu"))  # does nothing


def test_a_device_that_is_first_used_during_a_capture_records_nothing(
    monkeypatch: pytest.MonkeyPatch, graph: type[Graph]
) -> None:
    driver, capturing = Notes(), graph()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(cuda, "load", lambda: driver)
    monkeypatch.setattr(cuda, "contexts_of", Contexts)
    monkeypatch.setattr(DrivenCuda, "_new_stream", lambda _: object())
    monkeypatch.setattr(cuda, "_handle_of", lambda _: 7)
    capturing.capture_begin()
    assert cuda_device(torch.device("cuda", 0)).has_fence
    assert driver.recorded == []
    capturing.capture_end()
    assert cuda_device(torch.device("cuda", 0)).has_fence
    assert driver.recorded == [100]
    driver.refusing["cuCtxRecordEvent"] = 801  # not supported
    assert not cuda_device(torch.device("cuda", 0)).has_fence


def test_streams_are_made_by_the_driver_and_not_of_torchs_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Notes()
    monkeypatch.setattr(
        driver, "cuStreamCreate", lambda stream, flags: setattr(stream._obj, "value", 77), raising=False
    )
    external = SimpleNamespace(stream_id=5, device_index=0, device_type=1)
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: asked.append(handle) or external)
    monkeypatch.setattr(torch, "Stream", lambda **found: found)
    device = made(driver)
    assert device._new_stream() == vars(external)  # type: ignore[comparison-overlap]
    assert asked == [77]


@pytest.mark.parametrize(
    ("rows", "columns", "nbytes"),
    [(4096, 4096, 128 << 20), (64, 4096, 0), (4096, 4095, 4 * 4095 * 5 * 32), (1 << 20, 1, 4 * 128)],
)
def test_the_buffer_of_a_sum_is_that_of_torchs_kernels_on_an_h200(
    rows: int, columns: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(multi_processor_count=132, max_threads_per_multi_processor=2048)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    assert cuda.sum_buffer_nbytes(torch.device("cuda"), rows, columns, 4) == nbytes
    assert cuda.sum_buffer_nbytes(torch.device("cpu"), rows, columns, 4) == 0
