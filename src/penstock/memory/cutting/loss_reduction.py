"""How a loss was reduced over its samples, read from its graph: a mean, of how many items, or a sum."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MEAN, _SUM = 1, 2
"""torch's numbers of reductions, as the nodes of its losses keep them."""
_DEPTH = 12
_SAME = ("ToCopy", "View", "UnsafeView", "Squeeze", "Alias", "Clone", "Reshape", "Select", "Neg")
"""Nodes that leave a loss as it is."""


class Reduction(NamedTuple):
    """What a loss is of its items."""

    is_mean: bool

    factor: float
    """What the mean or the sum was multiplied by."""

    items: float | None
    """How many items a mean is of, where its graph says so."""


def reduction_of(loss: Tensor) -> Reduction | None:
    """Return how a loss was reduced; None where its graph does not say so.

    >>> reduction_of(torch.ones(3, requires_grad=True).mean())
    Reduction(is_mean=True, factor=1.0, items=3.0)
    """
    return _reduction(loss.grad_fn, 1.0, _DEPTH)


def _reduction(node: Any, factor: float, depth: int) -> Reduction | None:
    if node is None or not depth:
        return None
    name, kept = type(node).__name__, getattr(node, "_saved_reduction", None)
    if kept in (_MEAN, _SUM):
        return Reduction(kept == _MEAN, factor, _items_of(node) if kept == _MEAN else None)
    if name.startswith("SumBackward"):
        return Reduction(False, factor, None)
    if name.startswith("MeanBackward"):
        return Reduction(True, factor, _items_of(node))
    followers = [one for one, _ in node.next_functions if one is not None]
    if name.startswith(("Add", "Sub")) and followers:
        return _reduction_of_terms([_reduction(one, factor, depth - 1) for one in followers])
    if name.startswith(("Mul", "Div")) and len(followers) == 1:
        other = getattr(node, "_saved_other", None)
        if isinstance(other, Tensor) and other.numel() != 1:
            return None
        number = math.nan if other is None else _number(other)
        if not number:
            return None
        return _reduction(followers[0], factor / number if name.startswith("Div") else factor * number, depth - 1)
    return _reduction(followers[0], factor, depth - 1) if name.startswith(_SAME) and len(followers) == 1 else None


def _reduction_of_terms(terms: list[Reduction | None]) -> Reduction | None:
    """Return how a loss of several terms was reduced: if all of them are means, or all are sums."""
    known = [one for one in terms if one is not None]
    if len(known) < len(terms) or len({one.is_mean for one in known}) > 1:
        return None
    return Reduction(known[0].is_mean, max(one.factor for one in known), known[0].items)


def _number(other: Any) -> float:
    """Return the number that a loss was multiplied by; a dispatch mode would be given it as no tensor."""
    with torch._C._DisableTorchDispatch():
        return float(other)


def _items_of(node: Any) -> float | None:
    total = getattr(node, "_saved_total_weight", None)  # of labels that are not ignored
    if isinstance(total, Tensor) and total.numel() == 1:
        return float(total)
    numel = getattr(node, "_saved_self_sym_numel", None)
    if numel is None and isinstance(own := getattr(node, "_saved_self", None), Tensor):
        numel = own.numel()
    return None if numel is None else float(numel)
