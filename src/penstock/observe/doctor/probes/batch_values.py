"""Copies and comparisons of the batches that a loop receives."""

from __future__ import annotations

import contextlib
import io
import pickle
from typing import Any

import numpy as np
import torch


def copy_containers(batch: Any, *, copied: bool = False) -> Any:
    """Return `batch` in new lists and dictionaries, with the same tensors, or with copies of them if `copied`."""
    return torch.utils._pytree.tree_map(_copy if copied else _same, batch)


def batches_equal(one: Any, other: Any) -> bool:
    """Return whether two batches hold the same values.

    >>> batches_equal({"x": torch.ones(2), "y": [1]}, {"x": torch.ones(2), "y": [1]})
    True
    """
    leaves, others = torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(other)
    return len(leaves) == len(others) and all(map(_is_equal, leaves, others))


def all_finite(batch: Any) -> bool:
    """Return whether no tensor or array has a NaN or an infinite value.

    >>> all_finite([torch.ones(2), "label"]), all_finite({"x": np.array([1.0, np.nan])})
    (True, False)
    """
    return all(map(_is_finite, torch.utils._pytree.tree_leaves(batch)))


class _TensorPickler(pickle.Pickler):
    """Counts the tensors that it meets, in objects of any class, and leaves them out."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors = 0
        self.storages: dict[int, int] = {}

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor):
            return NotImplemented
        self.tensors += 1
        if thing.layout == torch.strided:
            storage = thing.untyped_storage()
            self.storages[storage._cdata] = storage.nbytes()
        return int, ()


def sent_tensors(batch: Any) -> tuple[int, int]:
    """Return how many tensors a worker of torch's sends for `batch`, one by one, and the bytes of their storages.

    >>> x = torch.zeros(4, 2)
    >>> sent_tensors([{"x": x, "first": x[0]}, torch.ones(1)])
    (3, 36)
    """
    pickler = _TensorPickler()
    with contextlib.suppress(Exception):  # the batch's own classes may raise anything
        pickler.dump(batch)
    return pickler.tensors, sum(pickler.storages.values())


def _is_finite(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return not leaf.is_floating_point() or leaf.is_sparse or bool(torch.isfinite(leaf).all())
    return (
        not isinstance(leaf, np.ndarray | float)
        or not np.issubdtype(np.asarray(leaf).dtype, np.floating)
        or bool(np.isfinite(leaf).all())
    )


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(np.all(one == other))


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _same(leaf: Any) -> Any:
    return leaf
