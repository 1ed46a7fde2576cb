"""What an out-of-memory error says where the allocator is CUDA's: seen on figures, without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.memory import explain
from penstock.memory.accounting.ledger import DeviceBytes
from penstock.memory.recovery.out_of_memory import Failure

GIB = 1 << 30


def explained(monkeypatch: pytest.MonkeyPatch, *, cached: int, total: int = 8 * GIB) -> str:
    roles = {"weights": 4 * GIB, "gradients": GIB, "optimizer": GIB, "others": 0}
    device = DeviceBytes(device="cuda:0", total=total, allocated=6 * GIB, cached=cached, **roles)
    monkeypatch.setattr(explain, "ledger", lambda *_: type("Account", (), {"devices": [device]}))
    failure = Failure.of(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB."))
    return explain.explain_failure(failure, nn.Linear(1, 1), None)


def test_segments_that_can_grow_are_advised_only_where_the_pieces_would_suffice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "expandable_segments:True to join them" in explained(monkeypatch, cached=GIB)
    text = explained(monkeypatch, cached=0, total=7 * GIB)
    assert "this is exhaustion: 1.0 GiB of 7.0 GiB" in text
    assert "expandable_segments" not in text
