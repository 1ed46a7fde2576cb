"""Randomness that belongs to a sample: the same in every worker, worker type and resumed run.

    seed of a sample = hash of the epoch's seed and the sample's index; the epoch's = hash of the loader's and the epoch

A fetcher announces itself with `Making`; a dataset calls `sample_seed` or `sample_rng` for its randomness. In worker
threads, torch's `thread_safe_generator` (for transforms: threads share torch's own random state) returns a generator
that is seeded so, too.
"""

from __future__ import annotations

import hashlib
import operator
import random
import threading
from types import FunctionType
from typing import Any, Protocol

import numpy as np
import torch

from penstock.core.random_states import note_sample_draw


class Fetcher(Protocol):
    """Makes samples in this thread; see `SampleFetcher`."""

    epoch_seed: int | None

    def current(self) -> tuple[Any, int, int]:
        """Return the index of the sample that is being made, and two numbers that tell it from all others."""
        ...


class ThisThread(threading.local):
    """Whose samples a thread makes."""

    fetcher: Fetcher | None = None
    sample: tuple[Any, int, int] | None = None
    """The sample that `rng` and `torch_rng` are for."""
    rng: np.random.Generator | None = None
    torch_rng: torch.Generator | None = None
    is_worker: bool = False
    """Whether it is a worker thread."""


this_thread = ThisThread()
"""Set by `Making`, or without its calls where these would take a good part of a batch's time."""


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
    fetcher = this_thread.fetcher
    if fetcher is None or fetcher.epoch_seed is None:
        return int(torch.empty((), dtype=torch.int64).random_().item())
    note_sample_draw()
    return derive_seed(fetcher.epoch_seed, fetcher.current()[0])


def sample_rng() -> np.random.Generator:
    """Return NumPy's generator for the sample that is being made: the same one until the next sample is begun.

    >>> first, second = sample_rng().random(), sample_rng().random()
    >>> first != second
    True
    """
    fetcher = this_thread.fetcher
    if fetcher is None:
        return np.random.default_rng(sample_seed())
    _note_draw(fetcher)
    if this_thread.rng is None:
        this_thread.rng = np.random.default_rng(sample_seed())
    return this_thread.rng


def _note_draw(fetcher: Fetcher) -> None:
    """Note that a generator of the sample is asked for; those of another sample are dropped."""
    note_sample_draw()
    sample = fetcher.current()
    if this_thread.sample is None or this_thread.sample[1:] != sample[1:]:
        this_thread.sample, this_thread.rng, this_thread.torch_rng = sample, None, None


def begin_worker_thread() -> None:
    """Have `torch.thread_safe_generator` return a generator in this thread, as in torch's own worker threads.

    It is seeded for each sample, so that it does not matter which thread makes that. Transforms have torch's function
    by name, so it gets another body; elsewhere that calls the one which it had.
    """
    global _torchs_own
    this_thread.is_worker = True
    function: Any = getattr(torch, "thread_safe_generator", None)  # new in torch 2.13
    with _lock:
        if function is not None and _torchs_own is None:
            _torchs_own = FunctionType(function.__code__, function.__globals__)
            function.__code__ = _in_place_of_torchs.__code__


_lock = threading.Lock()
_torchs_own: Any = None


def _in_place_of_torchs() -> Any:
    from penstock.loader.workers.sample_seed import generator_of_thread

    return generator_of_thread()


def generator_of_thread() -> torch.Generator | None:
    """Return torch's generator for the sample that this worker thread makes; in others, what torch returns."""
    fetcher = this_thread.fetcher
    if not this_thread.is_worker or fetcher is None:
        found: torch.Generator | None = _torchs_own()
        return found
    _note_draw(fetcher)
    if this_thread.torch_rng is None:
        this_thread.torch_rng = torch.Generator().manual_seed(sample_seed())
    return this_thread.torch_rng


def derive_seed(seed: int, index: Any) -> int:
    """Return a seed in [0, 2**63) derived from another one and an index: an integer, or anything with a fixed `repr`.

    >>> derive_seed(1, 2) == derive_seed(1, np.int64(2)), derive_seed(1, 2) == derive_seed(2, 1)
    (True, False)
    """
    try:
        index = operator.index(index)
    except TypeError:
        index = repr(index)
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Making:
    """Has `sample_seed` and `sample_rng` ask `fetcher` which sample this thread makes, while the context lasts."""

    __slots__ = ("_fetcher", "_outer")

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._outer: Fetcher | None = None

    def __enter__(self) -> None:
        self._outer, this_thread.fetcher = this_thread.fetcher, self._fetcher
        this_thread.sample = None

    def __exit__(self, *exception: object) -> None:
        this_thread.fetcher = self._outer


def seed_states() -> None:
    """Seed torch's, Python's and NumPy's random states with the sample's seed."""
    seed = sample_seed()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
