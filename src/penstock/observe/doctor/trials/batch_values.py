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


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(np.all(one == other))


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _same(leaf: Any) -> Any:
    return leaf
