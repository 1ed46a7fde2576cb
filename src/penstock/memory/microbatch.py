"""Cutting a batch into micro-batches, and remembering how large they may be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from penstock.core.errors import OptionError
from penstock.core.tree import like_mapping

Split = Callable[[Any, int], Sequence[Any]]
"""`(batch, parts) -> batches`, in order, as even as can be."""

_BY_HAND = "say how to cut it with split=, and how many samples it has with batch_size="


def batch_size(batch: Any) -> int:
    """Return the number of samples in `batch`: the first dimension of its first tensor that has one.

    Tensors with a single row count only where there are no others: they go to every part (positions, say).

    Raises:
        OptionError: it has no such tensor.

    >>> batch_size({"positions": torch.zeros(1, 3), "x": torch.zeros(8, 3), "scale": torch.tensor(2.0)})
    8
    """
    sizes = [int(tensor.shape[0]) for tensor in arrays_of(batch) if tensor.ndim > 0]
    if sizes:
        return next((size for size in sizes if size != 1), 1)
    raise OptionError(
        f"a batch of type {type(batch).__name__} has no tensor whose first dimension could be its samples; {_BY_HAND}"
    )


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Cut a batch along the first dimension of its tensors, and of its lists of as many items.

    Tensors and arrays are cut into views, not copied. Those without dimensions or with one row only, numbers, strings
    and None go to every part as they are. Dicts, lists, tuples, named tuples and dataclasses keep their type.

    Args:
        batch: of n samples.
        parts: at least 1; no more than n are made, sizes differ by at most one, the larger ones come first.

    Raises:
        OptionError: a tensor has another first dimension than the first one, or something cannot be cut at all.

    Example:
        >>> [part["x"].tolist() for part in split_batch({"x": torch.arange(5), "name": "five"}, 2)]
        [[0, 1, 2], [3, 4]]
    """
    size = batch_size(batch)
    parts = max(1, min(parts, size))
    if parts == 1:
        return [batch]
    return [_cut(batch, start, stop, size) for start, stop in bounds(size, parts)]


def bounds(size: int, parts: int) -> Iterator[tuple[int, int]]:
    """Yield where each of `parts` parts of `size` samples starts and stops.

    >>> list(bounds(5, 2))
    [(0, 3), (3, 5)]
    """
    least, more = divmod(size, parts)
    start = 0
    for number in range(parts):
        stop = start + least + (number < more)
        yield start, stop
        start = stop


def bucket_of(batch: Any) -> tuple[Any, ...]:
    """Return the bucket of a batch: dtype and dimensions of each tensor but the first one, rounded up to powers of two.

    Batches of one bucket need about the same memory for a sample.

    >>> bucket_of([torch.zeros(8, 100), torch.zeros(8)]) == bucket_of([torch.zeros(3, 128), torch.zeros(3)])
    True
    """
    return tuple((str(one.dtype), *(_power_of_two(int(size)) for size in one.shape[1:])) for one in arrays_of(batch))


class Sizes:
    """How many samples a micro-batch may have, by bucket; learned from what ran out of memory.

    A size that ran out of memory is halved. Between the largest that went through and the smallest that did not, the
    next steps look for the largest that fits. After `patience` clean steps a size that failed is tried again, for what
    was in memory besides may be gone; each failed attempt doubles the patience.

    Args:
        most: the largest micro-batch to begin with; None for the whole batch.
        patience: clean steps before growing again.
    """

    def __init__(self, most: int | None = None, patience: int = 64) -> None:
        self._most = math.inf if most is None else most
        self._imposed = math.inf
        self._patience = patience
        self._buckets: dict[tuple[Any, ...], _Bucket] = {}

    def parts(self, bucket: tuple[Any, ...], size: int) -> int:
        """Return into how many parts to cut a batch of `size` samples."""
        fewest = max(1, math.ceil(size / min(self._most, self._imposed)))
        found = self._buckets.get(bucket)
        if found is None:
            return fewest
        parts = max(fewest, -(-size // found.fits))
        wanted = parts
        if found.is_confirmed and found.clean >= found.patience:
            wanted = parts // 2 if found.fails is None else min(-(-size // found.fails), parts - 1)
        elif found.is_confirmed and found.fails is not None and found.fails > 1:
            fewest_untried = -(-size // (found.fails - 1))
            wanted = min(parts, (fewest_untried + parts) // 2)
        wanted = max(fewest, wanted)
        found.is_probe = wanted < parts
        return wanted

    def is_probe(self, bucket: tuple[Any, ...]) -> bool:
        """Return whether what `parts` said last for `bucket` is an attempt to grow."""
        return bucket in self._buckets and self._buckets[bucket].is_probe

    def succeeded(self, bucket: tuple[Any, ...], micro_batch: int) -> None:
        """Take note that a step with parts of up to `micro_batch` samples went through."""
        found = self._buckets.get(bucket)
        if found is None:
            return
        found.is_confirmed = True
        if found.is_probe:
            found.is_probe, found.clean = False, 0
            found.fits = max(found.fits, micro_batch)
            if found.fails is not None and found.fits >= found.fails:
                found.fails, found.patience = None, self._patience
        else:
            found.clean += 1

    def failed(self, bucket: tuple[Any, ...], micro_batch: int) -> None:
        """Take note that parts of `micro_batch` samples ran out of memory."""
        found = self._buckets.setdefault(bucket, _Bucket(fits=micro_batch, patience=self._patience))
        if found.is_probe:
            if found.fails is None or micro_batch >= found.fails:
                found.patience *= 2
        else:
            found.fits, found.is_confirmed = max(1, min(found.fits, micro_batch // 2)), False
        found.is_probe, found.clean = False, 0
        found.fails = micro_batch if found.fails is None else min(found.fails, micro_batch)

    def shrink(self, bucket: tuple[Any, ...], micro_batch: int, retried: set[int]) -> bool:
        """Decide what follows a failure of parts of `micro_batch` samples; return whether there is another try.

        The first failure of a size is followed by a try at the same size, for memory may have been short for a moment
        (pytorch#189504); `retried` remembers that.
        """
        if self.is_probe(bucket):
            self.failed(bucket, micro_batch)
        elif micro_batch not in retried:
            retried.add(micro_batch)
        elif micro_batch > 1:
            self.failed(bucket, micro_batch)
        else:
            return False
        return True

    def learned(self, bucket: tuple[Any, ...]) -> float:
        """Return the most samples that a part is believed to have room for; infinite while nothing has failed."""
        return self._buckets[bucket].fits if bucket in self._buckets else math.inf

    def impose(self, micro_batch: float) -> None:
        """Cut no larger parts than this from now on: another rank has room for no more."""
        self._imposed = micro_batch


@dataclass(slots=True)
class _Bucket:
    fits: int
    """Samples in a part that are believed to fit, or known to, once that is `is_confirmed`."""
    patience: int
    fails: int | None = None
    """The fewest samples in a part that are known not to fit."""
    clean: int = 0
    """Steps without a failure since the last change."""
    is_confirmed: bool = False
    is_probe: bool = False


# ── cutting ─────────────────────────────────────────────────────────────────────────────────────────────────────


def arrays_of(value: Any) -> Iterator[Tensor | np.ndarray]:
    """Yield all tensors and arrays inside of a batch."""
    if isinstance(value, (Tensor, np.ndarray)):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from arrays_of(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from arrays_of(one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from arrays_of(getattr(value, field.name))


def _cut(value: Any, start: int, stop: int, size: int) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        return _cut_array(value, start, stop, size)
    if isinstance(value, Mapping):
        return like_mapping(value, {key: _cut(one, start, stop, size) for key, one in value.items()})
    if isinstance(value, PackedSequence):
        raise OptionError(f"a PackedSequence in a batch cannot be cut; {_BY_HAND}")
    if isinstance(value, (list, tuple)):
        if _is_list_of_samples(value, size):
            return value[start:stop]
        parts = [_cut(one, start, stop, size) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: _cut(getattr(value, name), start, stop, size) for name in fields})
    if callable(getattr(value, "to", None)) or hasattr(value, "__next__"):
        raise OptionError(f"a {type(value).__name__} in a batch cannot be cut; {_BY_HAND}")
    return value


def _cut_array(array: Tensor | np.ndarray, start: int, stop: int, size: int) -> Tensor | np.ndarray:
    if array.ndim == 0 or (array.shape[0] == 1 and size > 1):
        return array
    if isinstance(array, Tensor) and (array.is_nested or array.layout is not torch.strided):
        raise OptionError(f"a nested or sparse tensor in a batch cannot be cut; {_BY_HAND}")
    if array.shape[0] != size:
        raise OptionError(
            f"a tensor of shape {tuple(array.shape)} in a batch of {size} samples cannot be cut by samples; {_BY_HAND}"
        )
    return array[start:stop]


def _is_list_of_samples(values: Sequence[Any], size: int) -> bool:
    """Return whether `values` holds one item for each sample, rather than tensors that hold all samples."""
    if hasattr(values, "_fields"):
        return False
    rows = [one.shape[0] for one in arrays_of(values) if one.ndim > 0]
    return len(values) == size and not (rows and set(rows) <= {size, 1} and size in rows)


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
