"""be_rank: makes this process one rank of a job, as a launcher does."""

from __future__ import annotations

import pytest


def be_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    """Set the environment variables that torchrun gives its rank `rank` of `world_size`."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}.items():
        monkeypatch.setenv(name, str(value))
