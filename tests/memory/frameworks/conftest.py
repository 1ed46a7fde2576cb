"""Accelerate keeps its settings for the whole process; each test here has its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _own_settings() -> Iterator[None]:
    _forget_settings()
    yield
    _forget_settings()


def _forget_settings() -> None:
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
