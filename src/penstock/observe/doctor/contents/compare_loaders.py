"""Compares which samples a training loop and its evaluations draw, by their indices: nothing is loaded for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from penstock.core.object_attributes import attributes_of
from penstock.observe.doctor.content_results import Extent, SharedSamples
from penstock.observe.doctor.contents.origins import Indices, Origin, origins_of

_SHOWN = 3
_MOST_NBYTES = 256 << 20
"""Of an array that is compared with another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A loader of the program that evaluates."""

    name: str
    """Its name in the program, or its dataset's class."""

    loader: DataLoader[Any]
    """The loader."""


def compare_loaders(training: DataLoader[Any], evaluations: Sequence[Evaluation]) -> tuple[SharedSamples, ...]:
    """Return what evaluations have in common with the training, those without anything left out."""
    own = origins_of(training)
    if own is None:
        return ()
    others = [(one, found) for one in evaluations if (found := origins_of(one.loader)) is not None]
    shared = [_compare(one.name, own, origins) for one, origins in others]
    return tuple(one for one in shared if one is not None and one.samples)


def listed_twice(training: DataLoader[Any]) -> int:
    """Return how many samples a loader draws several times in an epoch, by their indices."""
    origins = origins_of(training) or ()
    counts = (np.unique(_indices_of(dataset, origins), return_counts=True)[1] for dataset in _datasets(origins))
    return sum(int((count > 1).sum()) for count in counts)


def _compare(name: str, own: Sequence[Origin], others: Sequence[Origin]) -> SharedSamples | None:
    """Compare indices; return None where no dataset of the one is one of the other."""
    examples: list[int] = []
    common, name_of_same = 0, ""
    for dataset in _datasets(others):
        theirs = np.unique(_indices_of(dataset, others))
        is_shared = np.zeros(len(theirs), bool)
        for same in (one for one in _datasets(own) if _is_same_data(one, dataset)):
            name_of_same = type(same).__name__
            is_shared |= np.isin(theirs, _indices_of(same, own))
        common += int(is_shared.sum())
        examples += theirs[is_shared][:_SHOWN].tolist()
    if not name_of_same:
        return None
    compared, trained = _count(others), _count(own)
    return SharedSamples(
        loader=name,
        dataset=name_of_same,
        samples=common,
        compared=compared,
        trained=trained,
        extent=_extent(common, compared, trained),
        examples=tuple(examples[:_SHOWN]),
    )


def _is_same_data(one: Any, other: Any) -> bool:
    """Return whether two datasets have the same samples, but for their transforms.

    They do if they are of one class and length, and hold the same arrays, tensors and lists, or lists of the same.
    """
    if one is other:
        return True
    if type(one) is not type(other) or _length(one) is None or _length(one) != _length(other):
        return False
    own, theirs = attributes_of(one), attributes_of(other)
    kept = [name for name, value in own.items() if _length(value) == _length(one)]
    return bool(kept) and all(name in theirs and _is_equal(own[name], theirs[name]) for name in kept)


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.nbytes <= _MOST_NBYTES and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.nbytes <= _MOST_NBYTES and np.array_equal(one, other)
    # of other objects, nobody knows what a comparison does
    return isinstance(one, list | tuple) and isinstance(one[0], str | int | float | tuple) and one == other


def _length(one: Any) -> int | None:
    try:
        return len(one)
    except Exception:  # of the user's own code
        return None


def _extent(common: int, compared: int, trained: int) -> Extent:
    if common < compared:
        return "partly"
    return "same" if common >= trained else "inside"


def _count(origins: Sequence[Origin]) -> int:
    """Return how many samples there are, each counted once."""
    return sum(len(np.unique(_indices_of(dataset, origins))) for dataset in _datasets(origins))


def _datasets(origins: Sequence[Origin]) -> list[Any]:
    return list({id(origin.dataset): origin.dataset for origin in origins}.values())


def _indices_of(dataset: Any, origins: Sequence[Origin]) -> Indices:
    return np.concatenate([one.indices for one in origins if one.dataset is dataset])
