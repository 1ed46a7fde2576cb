"""CUDA opens threads and descriptors when it is first used; the leak check is to see them as there from the start."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _cuda_is_up() -> None:
    if torch.cuda.is_available():
        torch.zeros(8, device="cuda").sum().item()
        torch.cuda.synchronize()
