"""Purity: a proof, made before the first batch, that no sample can tell which worker makes it, or what that has made.

    dataset      torch's TensorDataset; a list, tuple, range, tensor or array of plain data; a source that
                 `penstock.open` returns; and of such: Subset (random_split), ConcatDataset, StackDataset, and a
                 source's `select`, `filter`, `select_fields` `cached` and `map(Tokenized(...))`, and mixtures
    collate_fn   torch's default_collate or default_convert, or PadCollate
    nothing else of the program's runs in a worker: no worker_init_fn, no function for `errors`

Only then may any free worker make a batch, or some rows of one. Everything else may keep a generator, a counter or a
cache that changes what comes next, and no test of its samples could show that it does not. Types must be exactly
these, because a subclass may override anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate, default_convert
from torch.utils.data._utils.collate import default_collate_fn_map

from penstock.data import source as sources
from penstock.data.mixture import Mixture
from penstock.data.sample_cache.cached_dataset import CachedDataset
from penstock.loader.padding import PadCollate
from penstock.loader.workers.worker_spec import WorkerSpec

_SCALARS = frozenset({int, float, complex, bool, str, bytes, type(None), torch.Tensor})
_ARRAYS = frozenset({np.ndarray, np.memmap})
_COLLECTIONS = frozenset({list, tuple, dict})
_PLAIN = _SCALARS | _ARRAYS | _COLLECTIONS

_MOST_VALUES = 1_000_000
"""Lists with more values at one depth are not looked through: that would take longer than 0.1 s."""

_DEEPEST = 8
"""How deep lists are looked through; one may contain itself."""


def why_impure(worker_spec: WorkerSpec) -> str:
    """Return what may make samples depend on their worker; an empty string if it is proven that nothing does.

    >>> dataset = Subset(TensorDataset(torch.arange(4)), [1, 2])
    >>> spec = dict(iterable=False, auto_collation=True, drop_last=False)
    >>> why_impure(WorkerSpec(dataset=dataset, collate_fn=default_collate, **spec))
    ''
    >>> why_impure(WorkerSpec(dataset=dataset, collate_fn=lambda samples: samples, **spec))
    'collate_fn may keep a state'
    """
    if worker_spec.init_fn is not None:
        return "worker_init_fn may make workers differ"
    if callable(worker_spec.errors):
        return "the function for errors= may keep a state"
    if not _is_pure_collate(worker_spec.collate_fn):
        return "collate_fn may keep a state"
    impure = _impure_part(worker_spec.dataset)
    return "" if impure is None else f"{type(impure).__qualname__} may keep a state"


def _is_pure_collate(collate_fn: Any) -> bool:
    if type(collate_fn) is PadCollate:
        return True
    # A program may have registered functions of its own for types of samples.
    return collate_fn in (default_collate, default_convert) and all(
        function.__module__.startswith(("torch.", "penstock.")) for function in default_collate_fn_map.values()
    )


def _impure_part(dataset: Any) -> Any:
    """Return the part of a dataset of which nothing is known; None if all of it is pure.

    Without recursion: `dataset + other` in a loop nests a thousand of them.
    """
    left, seen = [dataset], set()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        parts = _parts_of(one)
        if parts is None:
            return one
        left += reversed([*parts])
    return None


def _parts_of(dataset: Any) -> Collection[Any] | None:
    """Return what a dataset takes its samples from; None if nothing is known of it."""
    if type(dataset) is TensorDataset:
        return [*dataset.tensors]
    if type(dataset) is Subset:
        return [dataset.dataset, dataset.indices]
    if type(dataset) is ConcatDataset:
        return dataset.datasets
    if type(dataset) is StackDataset:
        return dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
    if type(dataset) in (sources.Mapped, sources.Subset, sources.Cached, Mixture):
        return [*dataset.parts]
    if type(dataset) is CachedDataset:
        return [dataset.dataset]
    is_plain = type(dataset) is range or type(dataset).__module__.startswith("penstock.data.") or _is_plain(dataset)
    return [] if is_plain else None


def _is_plain(data: Any) -> bool:
    """Return whether `data` is numbers, text, tensors, arrays, or lists, tuples and dicts of such."""
    level = [data]
    for _ in range(_DEEPEST):
        kinds = set(map(type, level))
        if not all(kind in _PLAIN or _is_numpys(kind) for kind in kinds):
            return False
        if kinds & _ARRAYS and any(type(one) in _ARRAYS and one.dtype.hasobject for one in level):
            return False
        if not kinds & _COLLECTIONS:
            return True
        values = itertools.chain.from_iterable(_values(one) for one in level if type(one) in _COLLECTIONS)
        level = [*itertools.islice(values, _MOST_VALUES + 1)]
        if len(level) > _MOST_VALUES:
            return False
    return False


def _is_numpys(kind: type) -> bool:
    return issubclass(kind, np.generic) and kind.__module__ == "numpy"


def _values(collection: Any) -> Any:
    return itertools.chain(collection, collection.values()) if type(collection) is dict else collection
