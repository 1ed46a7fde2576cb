"""What torch offers for all accelerators, with backends that have only part of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from penstock import OptionError
from penstock.device.accelerator import free_and_total_nbytes

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
