"""Every failure survived collects garbage, thousands of times in these tests: let it look at what they make only."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from scarcity import FailAt


@pytest.fixture(autouse=True, scope="module")
def _collect_quickly() -> Iterator[None]:
    with FailAt():
        torch.ones(1).add_(1)  # imports what is left of torch
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
