"""What is asked of the CUDA driver, with a driver that only takes notes: no GPU is needed."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest
import torch

from penstock.device import cuda
from penstock.device.cuda import Cuda


class Notes:
    """A driver whose every call succeeds, but those in `refusing`."""

    def __init__(self, **refusing: int) -> None:
        self.refusing = refusing
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*_: Any) -> int:
            if name != "cuThreadExchangeStreamCaptureMode":  # around every other
                self.calls.append(name)
            return self.refusing.get(name, 0)

        return call


def made(driver: Notes, *, has_fence: bool = True) -> Cuda:
    device = object.__new__(Cuda)
    device._driver, device._context, device.has_fence = driver, ctypes.c_void_p(1), has_fence
    return device


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
    assert driver.calls == ["cuCtxPushCurrent_v2", "cuCtxSynchronize", "cuMemHostUnregister", "cuCtxPopCurrent_v2"]


def test_a_refusal_is_one_warning_and_no_registration() -> None:
    cuda._warn_of_refusal.cache_clear()
    device = made(Notes(cuMemHostRegister_v2=2))
    with pytest.warns(UserWarning, match=r"refuses to page-lock 4\.0 KiB.*copied from pageable memory"):
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
            assert modes == [cuda._RELAXED]
            return 0

    registration = made(Exchanging()).register(page())
    assert registration is not None
    assert modes == [cuda._RELAXED, 0]


def test_a_fence_is_an_event_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    driver = Notes(cuEventQuery=600)
    fence = made(driver).fence()
    assert fence is not None
    assert "cuCtxRecordEvent" in driver.calls
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
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    driver = Notes()
    registration, fence = made(driver).register(page()), made(driver).fence()
    driver.calls.clear()
    monkeypatch.setattr(cuda.os, "getpid", lambda: -1)
    del registration, fence
    assert driver.calls == []
