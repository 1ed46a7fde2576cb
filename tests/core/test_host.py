"""What this process may use of its machine."""

from __future__ import annotations

import os

import pytest

from penstock.core import host


@pytest.mark.parametrize(
    ("local_ranks", "affinity", "cores"),
    [(None, 8, 8), ("4", 8, 2), ("16", 8, 1), ("4", 2, 2)],
)
def test_ranks_share_the_cores_of_a_machine_unless_each_has_its_own(
    monkeypatch: pytest.MonkeyPatch, local_ranks: str | None, affinity: int, cores: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)), raising=False)
    monkeypatch.setattr(host, "_quota_cores", lambda: float("inf"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if local_ranks is not None:
        for name, value in (
            ("RANK", "0"),
            ("WORLD_SIZE", "16"),
            ("LOCAL_RANK", "0"),
            ("LOCAL_WORLD_SIZE", local_ranks),
        ):
            monkeypatch.setenv(name, value)
    assert host.cores_of_rank() == cores
