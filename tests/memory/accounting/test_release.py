"""release reports the bytes that each way of giving memory back returned."""

from __future__ import annotations

import gc

import torch

from penstock import release


class Knot:
    """Refers to itself, so that only a garbage collection frees it."""

    def __init__(self) -> None:
        self.own = self
        self.memory = torch.ones(64 << 20, dtype=torch.uint8)


def test_garbage_is_freed_and_counted() -> None:
    release()
    gc.disable()
    try:
        Knot()
        found = release()
    finally:
        gc.enable()
    assert found.host_garbage > 60 << 20
    assert "garbage on the host 6" in str(found)


def test_what_is_in_use_stays() -> None:
    kept = torch.arange(1 << 20)
    found = release()
    assert kept[-1] == (1 << 20) - 1
    assert found.device_garbage == found.device_cache == 0 or torch.accelerator.is_available()
