"""Samples that change the data they are made of, so that an augmentation piles up from epoch to epoch.

A sample is made again, between copies of what the dataset stores. Much of what changes there is legitimate: caches that
are filled, counters, buffers that each sample overwrites, rows that are shuffled in place. So a change counts only if
the same sample, made of the same random numbers, is another one for it by more than rounding, and is the first one
again once the stored data are as they were, which is how they are left then; and if samples change other data each: a
state that they all move on, as that of a simulation, is meant to move.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.core.random_states import get_states, keep_states, set_states
from penstock.observe.doctor.contents.stored_attributes import datasets_below, stored_values
from penstock.observe.doctor.probes.batch_values import batches_equal
from penstock.observe.doctor.stored_results import ChangedData

_MOST_WHOLE_NBYTES = 32 << 20
_MOST_NBYTES = 64 << 20
"""Copied for one sample; of larger arrays only its row."""
_MOST_ROW_NBYTES = 16 << 20
_MOST_SHORT = 16
_ENOUGH = 3
_ROUNDING = 100
"""Times the precision of a number: what is normalised again, in place, changes by a few of these."""
_LEAST_NUMBERS = 8
"""A row of fewer may be a count, or a score that belongs to the sample."""

Make = Callable[[], Any]
Array = np.ndarray[Any, Any]


def find_changed_data(dataset: Any, calls: Sequence[tuple[Any, Make]], until: float) -> ChangedData | None:
    """Make samples again that were made before; return what changes of the dataset's data each time.

    Args:
        dataset: whose attributes are looked at.
        calls: the index of each sample, and what makes it.
        until: the time, by `time.perf_counter`, from which no other sample is tried, after the first few.

    Raises:
        Exception: from the dataset.
    """
    found: list[_Change] = []
    tried = 0
    with keep_states():
        for index, make in _of_other_indices(calls):
            if len(found) == _ENOUGH or (tried >= _ENOUGH and time.perf_counter() > until):
                break
            tried += 1
            if (changed := _try_sample(dataset, index, make)) is not None:
                found.append(changed)
    names = [one.name for one in found]
    if len(found) < 2 or len(set(names)) > 1 or not _are_apart([one.places for one in found]):
        return None
    # One that was cropped or converted is no copy of what is stored; but all are made alike.
    is_returned = any(one.is_returned for one in found)
    return ChangedData(attribute=names[0], samples=len(found), tried=tried, is_returned=is_returned)


class _Change(NamedTuple):
    """Data that a sample changes."""

    name: str
    is_returned: bool
    """Whether the sample consists of them."""
    places: Array
    """Where they are in memory."""


class _Stored:
    """The data that a dataset stores, or the row of it that belongs to a sample, beside a copy."""

    def __init__(self, dataset: Any, index: Any) -> None:
        self._places = list(_arrays(dataset, index))
        self._copies = [array.copy() for _, array in self._places]

    def changes(self) -> list[tuple[str, Array, Array]]:
        """Return name, copy and data of what is other than it was."""
        both = zip(self._places, self._copies, strict=True)
        return [(name, copy, array) for (name, array), copy in both if not _is_same(copy, array)]


def _try_sample(dataset: Any, index: Any, make: Make) -> _Change | None:
    """Return which data a sample changes that it is made of; these are put back, all others are left as it leaves them.

    What is changed otherwise may belong to something that is no array, as the rows of a cache to the names in it.
    """
    stored = _Stored(dataset, index)
    states = get_states()
    first = _copied(made := make())
    changes = [one for one in stored.changes() if _piles_up(*one[1:])]
    if len(changes) != 1:
        return None
    name, before, data = changes[0]
    is_returned = _consists_of(made, before, data)
    make()  # with other random numbers
    set_states(states)
    again = _copied(make())
    if batches_equal(first, again) or not _piles_up(before, data):
        return None
    places, after = _places(before, data), data.copy()
    data[...] = before
    try:
        set_states(states)
        is_first = batches_equal(first, make())
    except BaseException:
        data[...] = after
        raise
    data[...] = before if is_first else after  # it depends on something else, too
    return _Change(name, is_returned, places) if is_first else None


def _of_other_indices(calls: Sequence[tuple[Any, Make]]) -> list[tuple[Any, Make]]:
    """Return one call for each index, where a sampler draws some again."""
    return list({repr(index): (index, make) for index, make in calls}.values())


def _arrays(dataset: Any, index: Any) -> Iterator[tuple[str, Array]]:
    """Yield the writable arrays of numbers that a dataset and those below it store, whole or one row."""
    left, seen = _MOST_NBYTES, set()
    for one, place in datasets_below(dataset, _as_index(index)):
        size = _length(one)
        for path, value in stored_values(one):
            for array, is_row in _arrays_in(value, place, size):
                key = (array.__array_interface__["data"][0], array.shape)
                if key in seen or not array.size:
                    continue
                seen.add(key)
                if array.nbytes > _MOST_WHOLE_NBYTES or array.nbytes > left or isinstance(array, np.memmap):
                    if is_row or place is None or not array.ndim or len(array) != size:
                        continue
                    array = array[place : place + 1]
                if array.nbytes <= min(left, _MOST_ROW_NBYTES if is_row else _MOST_WHOLE_NBYTES):
                    left -= array.nbytes
                    yield f"{type(one).__name__}.{path}", array


def _arrays_in(value: Any, index: int | None, size: int | None) -> Iterator[tuple[Array, bool]]:
    if (array := _as_array(value)) is not None:
        yield array, False
    elif isinstance(value, dict | list | tuple):
        for leaf in torch.utils._pytree.tree_leaves(_items(value, index, size))[:_MOST_SHORT]:
            if (array := _as_array(leaf)) is not None:
                yield array, False


def _items(value: Any, index: int | None, size: int | None) -> Any:
    """Return what a container has for a sample, or all of a short one."""
    of_rows = isinstance(value, list | tuple) and len(value) == size and index is not None and index < size
    if of_rows or (isinstance(value, dict) and index in value):
        return value[index]
    return list(value.values() if isinstance(value, dict) else value) if len(value) <= _MOST_SHORT else []


def _as_array(value: Any) -> Array | None:
    """Return an array or tensor of several numbers that can be written to, as an array that shares its memory."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout != torch.strided or value.requires_grad:
            return None
        with suppress(TypeError, RuntimeError):
            value = value.detach().numpy()
    if not isinstance(value, np.ndarray) or not value.flags.writeable or value.dtype.kind not in "fciu":
        return None
    return value if value.size >= _LEAST_NUMBERS else None


def _piles_up(before: Array, data: Array) -> bool:
    """Return whether enough numbers changed by more than rounding, and not only their order."""
    is_other = _differs(before, data)
    if data.dtype.kind in "fc" and is_other.any():
        with np.errstate(invalid="ignore", over="ignore"):
            rounding = (
                _ROUNDING * np.finfo(data.dtype).eps * np.abs(before[is_other & np.isfinite(before)]).max(initial=0)
            )
            is_other &= ~(np.abs(data - before) <= rounding)
    if int(is_other.sum()) < _LEAST_NUMBERS:
        return False
    return not np.array_equal(np.sort(before[is_other]), np.sort(data[is_other]))


def _places(before: Array, data: Array) -> Array:
    """Return where in memory the numbers are that changed."""
    indices = np.nonzero(_differs(before, data))
    offsets = sum(index * stride for index, stride in zip(indices, data.strides, strict=True))
    return np.asarray(data.__array_interface__["data"][0] + offsets)


def _are_apart(places: Sequence[Array]) -> bool:
    """Return whether each sample changes numbers of its own."""
    return not any(np.intersect1d(*both).size for both in itertools.combinations(places, 2))


def _consists_of(sample: Any, before: Array, data: Array) -> bool:
    """Return whether a sample has a tensor or array that is what changed, in some order."""
    changed = data[_differs(before, data)]
    for leaf in torch.utils._pytree.tree_leaves(sample):
        array = leaf.detach().numpy() if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" else leaf
        if not isinstance(array, np.ndarray) or array.size < _LEAST_NUMBERS:
            continue
        if np.may_share_memory(array, data) and np.shares_memory(array, data):
            return True
        if array.size >= changed.size and np.isin(changed, array).all():
            return True
    return False


def _is_same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and (np.array_equal(one, other) or not _differs(one, other).any())


def _differs(one: Array, other: Array) -> Any:
    return (one != other) & ~(_is_nan(one) & _is_nan(other))


def _is_nan(array: Array) -> Any:
    return np.isnan(array) if array.dtype.kind in "fc" else np.False_


def _copied(sample: Any) -> Any:
    return torch.utils._pytree.tree_map(_copy, sample)


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _as_index(index: Any) -> int | None:
    is_number = isinstance(index, int | np.integer) or (isinstance(index, torch.Tensor) and index.numel() == 1)
    return int(index) if is_number and int(index) >= 0 else None


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:
        return None
