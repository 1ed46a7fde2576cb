"""Begin to use CUDA, and skip what the stand-in for it cannot do.

CUDA opens threads and descriptors when it is first used; the leak check is to see them as there from the start.
"""

from __future__ import annotations

import ctypes

import pytest
import torch


def _is_standin() -> bool:
    try:
        return hasattr(ctypes.CDLL("libcuda.so.1"), "fake_counts")
    except OSError:
        return False


@pytest.fixture(autouse=True, scope="session")
def _cuda_is_up() -> None:
    if torch.cuda.is_available():
        torch.zeros(8, device="cuda").sum().item()
        torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def _can_run_here(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("standin") and not _is_standin():
        pytest.skip("not on the stand-in for CUDA; `make standin` builds it")
    if request.node.get_closest_marker("standin") and torch.cuda.device_count() < 2:
        pytest.skip("the stand-in has one GPU; set FAKE_GPUS=2")
    if request.node.get_closest_marker("arithmetic") and _is_standin():
        pytest.skip("kernels compute nothing on the stand-in for CUDA")
