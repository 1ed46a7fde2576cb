"""MicroBatchSizes: how many samples a micro-batch may have, learned from what ran out of memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


class MicroBatchSizes:
    """How many samples a micro-batch may have, by bucket (`split.bucket_of`).

    A size that runs out of memory is halved. The next steps search between the largest size that fitted and the
    smallest that failed. After `patience` steps without a failure a size that failed is tried again, because whatever
    else was in memory may be gone; each failed trial doubles the patience.

    Args:
        max_samples: the largest micro-batch to begin with; None for the whole batch.
        patience: steps without a failure before growing again.
    """

    def __init__(self, max_samples: int | None = None, patience: int = 64) -> None:
        self._max_samples = math.inf if max_samples is None else max_samples
        self._limit = math.inf
        self.is_limited = max_samples is not None
        """Whether anything keeps a micro-batch from being a whole batch."""
        self._patience = patience
        self._buckets: dict[tuple[Any, ...], _BucketSizes] = {}

    def count_parts(self, bucket: tuple[Any, ...], size: int) -> int:
        """Return into how many parts to cut a batch of `size` samples."""
        fewest = max(1, math.ceil(size / min(self._max_samples, self._limit)))
        found = self._buckets.get(bucket)
        if found is None:
            return fewest
        parts = max(fewest, -(-size // found.fits))
        wanted = parts
        if found.is_confirmed and found.clean_steps >= found.patience:
            wanted = parts // 2 if found.fails is None else min(-(-size // found.fails), parts - 1)
        elif found.is_confirmed and found.fails is not None and found.fails > 1:
            fewest_untried = -(-size // (found.fails - 1))
            wanted = min(parts, (fewest_untried + parts) // 2)
        wanted = max(fewest, wanted)
        found.is_probe = wanted < parts
        return wanted

    def is_probe(self, bucket: tuple[Any, ...]) -> bool:
        """Return whether the last `count_parts` for `bucket` was an attempt to grow."""
        return bucket in self._buckets and self._buckets[bucket].is_probe

    def record_success(self, bucket: tuple[Any, ...], micro_batch: int) -> None:
        """Record that a step with micro-batches of up to `micro_batch` samples succeeded."""
        found = self._buckets.get(bucket)
        if found is None:
            return
        found.is_confirmed = True
        if found.is_probe:
            found.is_probe, found.clean_steps = False, 0
            found.fits = max(found.fits, micro_batch)
            if found.fails is not None and found.fits >= found.fails:
                found.fails, found.patience = None, self._patience
        else:
            found.clean_steps += 1

    def record_failure(self, bucket: tuple[Any, ...], micro_batch: int) -> None:
        """Record that micro-batches of `micro_batch` samples ran out of memory."""
        self.is_limited = True
        found = self._buckets.setdefault(bucket, _BucketSizes(fits=micro_batch, patience=self._patience))
        if found.is_probe:
            if found.fails is None or micro_batch >= found.fails:
                found.patience *= 2
        else:
            found.fits, found.is_confirmed = max(1, min(found.fits, micro_batch // 2)), False
        found.is_probe, found.clean_steps = False, 0
        found.fails = micro_batch if found.fails is None else min(found.fails, micro_batch)

    def retry_or_shrink(self, bucket: tuple[Any, ...], micro_batch: int, retried: set[int]) -> bool:
        """Decide what follows a failure of micro-batches of `micro_batch` samples; return whether to try again.

        The first failure of a size is followed by a try at the same size, because memory may have been short for a
        moment only (pytorch#189504). `retried` holds the sizes that had that second try.
        """
        if self.is_probe(bucket):
            self.record_failure(bucket, micro_batch)
        elif micro_batch not in retried:
            retried.add(micro_batch)
        elif micro_batch > 1:
            self.record_failure(bucket, micro_batch)
        else:
            return False
        return True

    def largest_fitting(self, bucket: tuple[Any, ...]) -> float:
        """Return the largest micro-batch that is believed to fit; infinite while nothing has failed."""
        return self._buckets[bucket].fits if bucket in self._buckets else math.inf

    def least_fitting(self) -> int | None:
        """Return `largest_fitting` of the bucket that fits fewest; None while nothing has failed."""
        return min((found.fits for found in self._buckets.values()), default=None)

    def limit(self, micro_batch: float) -> None:
        """Make no larger micro-batch from now on: another rank has room for no more."""
        self._limit = micro_batch
        self.is_limited = self.is_limited or micro_batch != math.inf


@dataclass(slots=True)
class _BucketSizes:
    fits: int
    """Samples that are believed to fit in one micro-batch; known to fit once `is_confirmed`."""
    patience: int
    fails: int | None = None
    """The fewest samples that are known not to fit."""
    clean_steps: int = 0
    """Steps without a failure since the last change of size."""
    is_confirmed: bool = False
    is_probe: bool = False
