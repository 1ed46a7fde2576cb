"""What torch offers for all accelerators, with backends that have only part of it."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock import OptionError
from penstock.device import accelerator
from penstock.device.accelerator import Accelerator, free_and_total_nbytes

DEVICE = torch.device("mps")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(__name__="torch.other")
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda _: 10)
    monkeypatch.delattr(torch.accelerator, "get_memory_info", raising=False)
    return module


def test_free_memory_is_what_the_backend_says(backend: SimpleNamespace) -> None:
    backend.mem_get_info = lambda _: (60, 100)
    assert free_and_total_nbytes(DEVICE) == (60, 100)
    backend.get_per_process_memory_fraction = lambda _: 0.5
    assert free_and_total_nbytes(DEVICE) == (40, 50)


def test_free_memory_is_what_torch_says_where_the_backend_does_not(
    backend: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (70, 100), raising=False)
    assert free_and_total_nbytes(DEVICE) == (70, 100)


def test_where_nobody_tells_a_budget_is_asked_for(backend: SimpleNamespace) -> None:
    with pytest.raises(OptionError, match=r"torch.other does not tell how much memory .* pass a budget"):
        free_and_total_nbytes(DEVICE)


class Owner:
    """Refers to itself, as a loader in the traceback of an error does."""

    def __init__(self) -> None:
        self.itself = self


def test_a_forked_child_does_not_collect_what_its_parent_left(monkeypatch: pytest.MonkeyPatch) -> None:
    in_child: list[Any] = []
    monkeypatch.setattr(os, "register_at_fork", lambda *, after_in_child: in_child.append(after_in_child))
    monkeypatch.setattr(accelerator, "_leave_garbage", accelerator._leave_garbage.__wrapped__)
    Accelerator(torch.device("cpu"))
    died: list[str] = []
    gc.collect()
    weakref.finalize(Owner(), died.append, "of the parent's")
    child = os.fork()
    if not child:
        for action in in_child:
            action()
        gc.collect()
        weakref.finalize(Owner(), died.append, "own")
        gc.collect()
        os._exit(0 if died == ["own"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    gc.collect()
    assert died == ["of the parent's"]


class Stream:
    """As torch's: `with` keeps what was current before on the stream, and a stream may be used by two threads."""

    def __enter__(self) -> None:
        self.before, current.stream = current.stream, self

    def __exit__(self, *_: object) -> None:
        current.stream = self.before


current = threading.local()


def test_a_stream_that_two_threads_use_at_once_leaves_each_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: current.stream)
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: setattr(current, "stream", stream))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    device, shared = Accelerator(torch.device("cpu")), Stream()
    inside, left = threading.Event(), threading.Event()
    found: dict[str, bool] = {}

    def first() -> None:
        current.stream = own = Stream()
        with device._on(shared):  # type: ignore[arg-type]
            inside.wait()
        found["first"] = current.stream is own
        left.set()

    def second() -> None:
        current.stream = own = Stream()
        with device._on(shared):  # type: ignore[arg-type]
            inside.set()
            left.wait()
        found["second"] = current.stream is own

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"first": True, "second": True}


def test_what_is_not_page_locked_is_staged_in_torchs_pinned_memory_while_there_is_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, large, small = Accelerator(torch.device("cpu")), torch.arange(1 << 16), torch.arange(8)
    staged: list[torch.Tensor] = []
    plain = torch.empty_strided

    def pinned(*args: Any, pin_memory: bool, **kwargs: Any) -> torch.Tensor:
        assert pin_memory
        if len(staged) == 1:
            raise RuntimeError("CUDA error: out of memory")
        staged.append(plain(*args, **kwargs))
        return staged[-1]

    monkeypatch.setattr(torch, "empty_strided", pinned)
    sent: list[Any] = []
    monkeypatch.setattr(device, "_copy", lambda copies, *_: sent.extend(source for _, source in copies))
    device._up = object()  # type: ignore[assignment]
    pairs = [(large, large), (small, small)]
    device.upload(pairs, device.record_event)  # type: ignore[arg-type]
    assert sent[0] is staged[0]
    assert torch.equal(staged[0], large)
    assert sent[1] is small
    device.upload(pairs, device.record_event)  # type: ignore[arg-type]
    assert sent[2] is large
