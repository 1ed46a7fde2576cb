"""Micro-batches: the options of how batches are cut, checked, and how large their parts may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypedDict

from penstock.core.errors import OptionError
from penstock.memory.cutting.split import BatchDims, Dims, LayerNames, Split, count_samples, split_batch


class CuttingOptions(TypedDict, total=False):
    """The arguments of `Cutting`, for those that pass them on."""

    micro_batch: int | None
    split: Split | None
    batch_size: Callable[[Any], int] | None
    batch_dims: Dims | None
    also: Sequence[Any]
    allow_batch_dependent: LayerNames | bool


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """How batches are cut.

    Raises:
        OptionError: micro_batch is out of range, or how to cut was said in two ways.
    """

    micro_batch: int | None = None
    """The most samples at once to begin with; None for the whole batch."""
    split: Split | None = None
    batch_size: Callable[[Any], int] | None = None
    batch_dims: Dims | None = None
    """Which dimension of a batch's tensors has the samples."""
    also: Sequence[Any] = ()
    """What else to put back before another try."""
    allow_batch_dependent: LayerNames | bool = ()
    """Layers that may see smaller micro-batches although their result depends on the samples in them; True for all."""
    cut: Split = field(init=False)
    """`(batch, parts) -> batches`."""
    count: Callable[[Any], int] = field(init=False)
    """`batch -> samples`."""

    @classmethod
    def of(cls, caller: str, options: CuttingOptions) -> Cutting:
        """Return what a class was given.

        Raises:
            TypeError: there is no such option.
            OptionError: micro_batch is out of range, or how to cut was said in two ways.
        """
        for name in options.keys() - CuttingOptions.__annotations__.keys():
            raise TypeError(f"{caller} has no argument {name!r}; it takes {', '.join(CuttingOptions.__annotations__)}")
        return cls(**options)

    def __post_init__(self) -> None:
        given: object = self.micro_batch
        if given is not None and not (isinstance(given, Integral) and int(given) >= 1):
            raise OptionError(f"micro_batch must be a number of samples, at least 1, or None, not {given!r}")
        cut, count = self.split or split_batch, self.batch_size or count_samples
        if self.batch_dims is not None:
            if self.split is not None or self.batch_size is not None:
                raise OptionError("batch_dims= says how to cut and count; pass it, or split= and batch_size=, not both")
            dims = BatchDims(self.batch_dims)
            cut, count = dims.split, dims.count
        object.__setattr__(self, "cut", cut)
        object.__setattr__(self, "count", count)

    def size_of(self, batch: Any) -> int:
        """Return the number of samples; 1 where that is not known, and `why_uncountable` says why."""
        try:
            return self.count(batch)
        except OptionError:
            return 1

    def why_uncountable(self, batch: Any) -> str:
        """Return why the samples of a batch cannot be counted; empty where they can be."""
        try:
            self.count(batch)
        except OptionError as error:
            return str(error)
        return ""

    @property
    def is_allowed(self) -> bool:
        """Whether batches may be cut whatever that changes."""
        return self.allow_batch_dependent is True


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
        found.is_confirmed = found.was_confirmed = True
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

    def has_failed(self, bucket: tuple[Any, ...]) -> bool:
        """Return whether batches of a bucket ran out of memory."""
        return bucket in self._buckets

    def is_untried(self, bucket: tuple[Any, ...]) -> bool:
        """Return whether they did, and none of them has succeeded in smaller parts."""
        return bucket in self._buckets and not self._buckets[bucket].was_confirmed

    def forget(self, bucket: tuple[Any, ...]) -> None:
        """Forget what was learned about a bucket."""
        self._buckets.pop(bucket, None)

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
    was_confirmed: bool = False
    is_probe: bool = False
