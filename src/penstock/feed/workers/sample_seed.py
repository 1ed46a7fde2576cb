"""Randomness that belongs to a sample: the same in whatever worker, body or resumed run it is made.

    seed of a sample = hash of the epoch's seed and the sample's index; the epoch's = hash of the loader's and the epoch

Whoever makes samples says which it is at (`making`); a dataset asks here for its randomness.
"""

from __future__ import annotations

import hashlib
import operator
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch


class Maker(Protocol):
    """Who makes samples."""

    epoch_seed: int | None

    def current(self) -> tuple[Any, int, int]:
        """Return the index of the sample that is being made, and two numbers that tell it from all others."""
        ...


class _Here(threading.local):
    maker: Maker | None = None
    sample: tuple[Any, int, int] | None = None
    """The sample that `rng` is for."""
    rng: np.random.Generator


_here = _Here()


def sample_seed() -> int:
    """Return the seed of the sample that is being made, in [0, 2**63).

    It depends on the loader's seed (the one drawn from torch's random state for the epoch where it has none), the
    epoch and the sample's index, and on nothing else. Outside of a loader it is drawn from torch's random state.

    >>> import torch
    >>> class Noise(torch.utils.data.Dataset):
    ...     def __len__(self):
    ...         return 4
    ...
    ...     def __getitem__(self, index):
    ...         return torch.rand(2, generator=torch.Generator().manual_seed(sample_seed()))
    >>> import penstock
    >>> one, two = (torch.cat(list(penstock.DataLoader(Noise(), num_workers=n, seed=7))) for n in (0, 2))
    >>> bool((one == two).all())
    True
    """
    maker = _here.maker
    if maker is None or maker.epoch_seed is None:
        return int(torch.empty((), dtype=torch.int64).random_().item())
    return mixed(maker.epoch_seed, maker.current()[0])


def sample_rng() -> np.random.Generator:
    """Return NumPy's generator for the sample that is being made: the same one until the next sample is begun.

    >>> first, second = sample_rng().random(), sample_rng().random()
    >>> first != second
    True
    """
    maker = _here.maker
    if maker is None:
        return np.random.default_rng(sample_seed())
    sample = maker.current()
    if _here.sample is None or _here.sample[1:] != sample[1:]:
        _here.sample, _here.rng = sample, np.random.default_rng(sample_seed())
    return _here.rng


def mixed(seed: int, index: Any) -> int:
    """Return a seed in [0, 2**63) made of another one and an index: a whole number, or anything with a fixed `repr`.

    >>> mixed(1, 2) == mixed(1, np.int64(2)), mixed(1, 2) == mixed(2, 1)
    (True, False)
    """
    try:
        index = operator.index(index)
    except TypeError:
        index = repr(index)
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def making(maker: Maker) -> Iterator[None]:
    """Say that this thread makes samples, and which one, is what `maker` says."""
    outer, _here.maker = _here.maker, maker
    _here.sample = None
    try:
        yield
    finally:
        _here.maker = outer


def seed_states() -> None:
    """Have torch's, Python's and NumPy's random states begin with the sample's seed."""
    seed = sample_seed()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def states_kept() -> Iterator[None]:
    """Put torch's, Python's and NumPy's random states back at the end."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
