"""Whether workers draw the same random numbers: in each of them, or again in each epoch.

Two workers make one sample twice each, in two epochs. Noise that repeats differs inside a worker, and is equal between
the workers, or between the epochs.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, default_convert

from penstock.observe.doctor.probe_results import WorkerNoise
from penstock.observe.doctor.probes.batch_values import batches_equal

_WORKERS = 2


def measure_worker_noise(loader: DataLoader[Any]) -> WorkerNoise | None:
    """Return how the random numbers of workers repeat; None where samples are not random.

    Raises:
        Exception: from the dataset.
    """
    index = next(iter(loader.sampler if loader.batch_sampler is None else loader._index_sampler))
    if loader.batch_sampler is not None:
        index = index[0]
    first, second = (_make_one_sample(loader, index) for _ in range(2))
    if batches_equal(first[0], first[_WORKERS]):
        return None
    return WorkerNoise(
        same_in_workers=batches_equal(first[0], first[1]) and batches_equal(first[_WORKERS], first[_WORKERS + 1]),
        same_in_epochs=batches_equal(first[0], second[0]) and batches_equal(first[_WORKERS], second[_WORKERS]),
    )


def _make_one_sample(loader: DataLoader[Any], index: Any) -> list[Any]:
    """Return the sample as the first and the second worker made it, then as each of them made it once more."""
    once_more: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_size=None,
        sampler=[index] * (2 * _WORKERS),
        num_workers=_WORKERS,
        collate_fn=default_convert,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )
    return list(once_more)
