"""Which samples a loader may hand out, without loading any: indices of the datasets below its Subsets."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _DatasetKind
from torch.utils.data.distributed import DistributedSampler

from penstock.core.object_attributes import values_of
from penstock.core.random_states import keep_states

_MOST = 5_000_000
"""Indices; a set of all of them has to be computed within a second."""
_DEPTH = 8
_EPOCHS = 4
"""Times the length of the dataset: samplers that draw more are without an end."""

Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False, slots=True)
class Origin:
    """Samples of one dataset."""

    dataset: Any
    """What is called with an index: no Subset, and no ConcatDataset."""

    indices: Indices
    """int64 [samples]; one that is drawn several times is there several times."""

    @property
    def name(self) -> str:
        """The class of the dataset."""
        return type(self.dataset).__name__


def origins_of(loader: DataLoader[Any]) -> tuple[Origin, ...] | None:
    """Return all samples that a loader may hand out; None where that cannot be known, as of a stream.

    Of a sampler that is not torch's they are what a copy of it draws in one epoch.

    >>> halves = torch.utils.data.random_split(range(10), [5, 5])
    >>> [len(origin.indices) for origin in origins_of(DataLoader(halves[0]))]
    [5]
    """
    if loader._dataset_kind == _DatasetKind.Iterable:
        return None
    try:
        drawn = _drawn(loader)
        return None if drawn is None or len(drawn) > _MOST else tuple(_below(loader.dataset, drawn, _DEPTH))
    except (TypeError, ValueError, IndexError, NotImplementedError, AttributeError):
        return None  # indices that are no integers, a dataset without a length, a Subset that is none


def _drawn(loader: DataLoader[Any]) -> Indices | None:
    """Return the indices that the loader's sampler may draw."""
    sampler: Any = loader.sampler
    if loader.batch_sampler is not None:
        if type(loader.batch_sampler) is not BatchSampler:
            return _drawn_at_most(loader.batch_sampler, loader.dataset)
        sampler = loader.batch_sampler.sampler
    kind = type(sampler)
    if kind in (SequentialSampler, RandomSampler):
        return np.arange(_checked(len(sampler.data_source)))
    if kind is DistributedSampler:
        return np.arange(_checked(len(sampler.dataset)))
    if kind is SubsetRandomSampler:
        return _as_indices(sampler.indices)
    if kind is WeightedRandomSampler:
        return np.flatnonzero(np.asarray(sampler.weights))
    if isinstance(sampler, list | tuple | range | np.ndarray | torch.Tensor):
        return _as_indices(sampler)
    return _drawn_at_most(sampler, loader.dataset)


def _drawn_at_most(sampler: Any, dataset: Any) -> Indices | None:
    """Draw an epoch of a sampler that is not torch's."""
    most = min(_MOST, _EPOCHS * _checked(len(dataset)))
    drawn = drawn_by_copy(sampler, dataset, most + 1)
    if drawn is None or len(drawn) <= most:
        return drawn
    return np.unique(drawn)  # one without an end says nothing of how often


def drawn_by_copy(sampler: Any, dataset: Any, most: int) -> Indices | None:
    """Draw the first `most` indices of an epoch from a copy: the sampler's state stays, and that of random numbers."""
    inner = getattr(sampler, "sampler", None)
    values = [*values_of(sampler), *values_of(inner)]
    kept = [dataset, *(value for value in values if isinstance(value, Dataset))]
    with keep_states():
        try:
            copied = copy.deepcopy(sampler, {id(one): one for one in kept})
            return _as_indices(list(islice(_flat(copied), most)))
        except Exception:  # of the sampler's own code, or of what cannot be copied
            return None


def _flat(drawn: Iterable[Any]) -> Iterator[int]:
    for one in drawn:
        if isinstance(one, int | np.integer):
            yield int(one)
        else:
            yield from _flat(one.tolist() if isinstance(one, np.ndarray | torch.Tensor) else one)


def _checked(length: int) -> int:
    if length > _MOST:
        raise ValueError
    return length


def _as_indices(indices: Sequence[int] | Any) -> Indices:
    array = np.asarray(indices)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
        raise ValueError
    return array.astype(np.int64).reshape(-1)


def _below(dataset: Any, indices: Indices, depth: int) -> Iterator[Origin]:
    if depth and isinstance(dataset, Subset):
        chosen = _as_indices(dataset.indices)[indices]
        yield from _below(dataset.dataset, chosen, depth - 1)
    elif depth and type(dataset) is ConcatDataset:
        ends = np.asarray(dataset.cumulative_sizes)
        positive = np.where(indices < 0, indices + ends[-1], indices)
        parts = np.searchsorted(ends, positive, side="right")
        for number, part in enumerate(dataset.datasets):
            inside = positive[parts == number] - (ends[number - 1] if number else 0)
            if len(inside):
                yield from _below(part, inside, depth - 1)
    else:
        is_negative = indices < 0
        yield Origin(dataset, np.where(is_negative, indices + len(dataset), indices) if is_negative.any() else indices)
