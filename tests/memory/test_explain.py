"""What an out-of-memory error says where the allocator is CUDA's: seen on figures, without a GPU."""

from __future__ import annotations

import pickle
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.memory import explain
from penstock.memory.accounting.ledger import DeviceBytes
from penstock.memory.recovery.out_of_memory import Failure

GIB = 1 << 30


def explained(monkeypatch: pytest.MonkeyPatch, traces: list[Any], *, cached: int, total: int = 8 * GIB) -> str:
    roles = {"weights": 4 * GIB, "gradients": GIB, "optimizer": GIB, "others": 0}
    device = DeviceBytes(device="cuda:0", total=total, allocated=6 * GIB, cached=cached, **roles)
    monkeypatch.setattr(explain, "ledger", lambda *_: type("Account", (), {"devices": [device]}))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": [], "device_traces": traces})
    failure = Failure.of(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB."))
    return explain.explain_failure(failure, nn.Linear(1, 1), None)


def test_a_recorded_history_lies_beside_the_explanation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    text = explained(monkeypatch, [[{"action": "oom", "size": 3}]], cached=GIB)
    found = re.search(r"is in (\S+\.pickle), for https://docs.pytorch.org/memory_viz", text)
    assert found is not None
    assert pickle.loads(Path(found[1]).read_bytes())["device_traces"] == [[{"action": "oom", "size": 3}]]


def test_without_a_recorded_history_nothing_is_written_and_it_says_how(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert "_record_memory_history() before the step" in explained(monkeypatch, [[]], cached=GIB)
    assert list(tmp_path.iterdir()) == []


def test_a_history_that_cannot_be_written_spoils_no_explanation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    text = explained(monkeypatch, [[{"action": "oom"}]], cached=GIB)
    assert "1.5 GiB more was needed" in text
    assert "memory_viz" not in text


def test_segments_that_can_grow_are_advised_only_where_the_pieces_would_suffice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "expandable_segments:True to join them" in explained(monkeypatch, [[]], cached=GIB)
    text = explained(monkeypatch, [[]], cached=0, total=7 * GIB)
    assert "this is exhaustion: 1.0 GiB of 7.0 GiB" in text
    assert "expandable_segments" not in text
