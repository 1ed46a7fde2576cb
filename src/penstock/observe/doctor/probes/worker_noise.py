"""Whether workers draw the same random numbers: in each of them, or again in each epoch.

Two workers make one sample several times each, in two epochs. Noise that repeats differs inside a worker, and is equal
between the workers, or between the epochs. A sample that is only flipped now and then is equal by chance: how often
versions are equal inside a worker tells how likely that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from torch.utils.data import DataLoader, default_convert

from penstock.observe.doctor.probe_results import WorkerNoise
from penstock.observe.doctor.probes.batch_values import batches_equal

_NOISE_CHANCE = 0.01
"""Probability: two workers that both flip an image with equal chance agree in every second sample."""

_WORKERS = 2
_VERSIONS = 4


def measure_worker_noise(loader: DataLoader[Any]) -> WorkerNoise | None:
    """Return how the random numbers of workers repeat; None where samples are not random.

    Raises:
        Exception: from the dataset.
    """
    index = next(iter(loader.sampler if loader.batch_sampler is None else loader._index_sampler))
    if loader.batch_sampler is not None:
        index = index[0]
    first, second = (_make_one_sample(loader, index) for _ in range(2))
    if all(batches_equal(versions[0], other) for versions in first for other in versions[1:]):
        return None
    is_no_chance = _equal_pairs(first) ** _VERSIONS < _NOISE_CHANCE
    return WorkerNoise(
        same_in_workers=is_no_chance and _are_equal(first[0], first[1]),
        same_in_epochs=is_no_chance and all(map(_are_equal, first, second)),
        has_init_fn=loader.worker_init_fn is not None,
    )


def _equal_pairs(workers: Sequence[Sequence[Any]]) -> float:
    """Return which fraction of two versions that one worker made are equal."""
    pairs = [batches_equal(one, other) for versions in workers for one, other in combinations(versions, 2)]
    return sum(pairs) / len(pairs)


def _are_equal(versions: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(map(batches_equal, versions, others))


def _make_one_sample(loader: DataLoader[Any], index: Any) -> list[list[Any]]:
    """Return the versions of one sample that each worker made, one after another."""
    versions: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_size=None,
        sampler=[index] * (_VERSIONS * _WORKERS),
        num_workers=_WORKERS,
        collate_fn=default_convert,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )
    made = list(versions)
    return [made[worker::_WORKERS] for worker in range(_WORKERS)]
