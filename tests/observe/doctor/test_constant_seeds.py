"""A seed that every sample sets again is found with its line, of whichever library it is and however it is called."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.random import default_rng

from penstock.observe.doctor.probe_results import ConstantSeed
from penstock.observe.doctor.probes.constant_seeds import SeedRecorder


def _watch(make: Callable[[int], object], samples: int = 6) -> ConstantSeed | None:
    recorder = SeedRecorder()
    for index in range(samples):
        with recorder.sample(index):
            make(index)
    return recorder.result()


SEEDING = {
    "torch": lambda index: torch.manual_seed(42),
    "NumPy": lambda index: np.random.seed(42),
    "Python": lambda index: random.seed(42),
    "a generator of NumPy's, imported by name": lambda index: default_rng(42).random(),
}


@pytest.mark.parametrize("kind", SEEDING)
def test_a_seed_that_every_sample_sets_is_named_with_its_line(kind: str) -> None:
    found = _watch(SEEDING[kind])
    assert found is not None
    assert (found.seed, found.samples) == (42, 6)
    assert found.line.startswith("test_constant_seeds.py:")
    assert "42" in found.line.partition(": ")[2]


def test_other_seeds_are_nobodys_fault() -> None:
    assert _watch(lambda index: torch.manual_seed(index)) is None
    assert _watch(lambda index: default_rng().random()) is None
    assert _watch(lambda index: torch.manual_seed(42) if index == 3 else None) is None
    assert _watch(lambda index: torch.manual_seed(42), samples=2) is None


def test_the_libraries_are_left_as_they_were() -> None:
    before = torch.manual_seed, np.random.seed, random.seed, np.random.default_rng

    def fail(index: int) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        _watch(fail)
    assert before == (torch.manual_seed, np.random.seed, random.seed, np.random.default_rng)
