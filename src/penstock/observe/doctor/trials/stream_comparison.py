"""Finds out from the first batches whether the workers of an IterableDataset all return the same samples."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind

from penstock.observe.doctor.probes.batch_values import batches_equal, copy_containers


class StreamComparison:
    """Keeps the first batches of a loader with n workers until they can be compared.

    The first n batches come from n workers, one each; batch n is the second of the first worker. A stream that is not
    sharded repeats the first batch in the second, and not in batch n.

    Args:
        loader: the examined loader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        is_comparable = loader._dataset_kind == _DatasetKind.Iterable and loader.num_workers >= 2
        self._missing = loader.num_workers + 1 if is_comparable else 0
        self._first: list[Any] = []
        self.repeats = False
        """Whether the workers were found to return the same samples."""

    @property
    def lacks_batches(self) -> bool:
        """Whether it needs more batches."""
        return self._missing > 0

    def add(self, batch: Any) -> None:
        """Take a batch into account, in the loader's order."""
        if not self._missing:
            return
        self._first.append(copy_containers(batch, copied=True))
        self._missing -= 1
        if not self._missing:
            first, other_worker, same_worker = self._first[0], self._first[1], self._first[-1]
            self.repeats = batches_equal(first, other_worker) and not batches_equal(first, same_worker)
            self._first.clear()
