"""Worker processes keep the memory that samples have freed."""

from __future__ import annotations

import resource
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from penstock import DataLoader
from penstock.loader.workers import process_main

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only glibc returns memory by these limits"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


class Arithmetic(Dataset):
    """Tells how many pages the system has cleared so far for the temporary arrays of each sample."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        values = np.full((400, 400), index, np.float32)
        for _ in range(3):
            values = np.sqrt(values * values + 1)
        return torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)


def pages_per_sample() -> float:
    first, *_, last = torch.cat([*DataLoader(Arithmetic(), batch_size=1, num_workers=1)])[8:].tolist()
    return (last - first) / 23


def test_temporary_arrays_take_the_pages_of_those_before_them() -> None:
    assert pages_per_sample() < 100  # of 160 pages each, and ten of them


def test_a_programs_own_limits_for_malloc_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits: list[tuple[int, int]] = []
    monkeypatch.setattr(process_main, "_MALLOPT", lambda *limit: set_limits.append(limit))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    process_main._keep_freed_memory()
    assert set_limits == []
