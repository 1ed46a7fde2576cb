"""Copies and comparisons of the batches that a loop receives."""

from __future__ import annotations

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
