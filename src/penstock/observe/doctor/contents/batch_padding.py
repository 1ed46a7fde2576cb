"""Batches that a program's own collate function pads beyond the largest of their samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from penstock.observe.doctor.probe_results import Padding
from penstock.observe.doctor.thresholds import THRESHOLDS


def find_padding(samples: Sequence[Any], batch: Any) -> Padding | None:
    """Return the tensor of a batch that is much longer than its samples, and has one value beyond them; else None.

    Args:
        samples: the batch's, as the dataset made them.
        batch: what the collate function made of them.

    >>> samples = [(torch.ones(3), 0), (torch.ones(20), 1)]
    >>> find_padding(samples, torch.nn.utils.rnn.pad_sequence([samples[0][0], torch.ones(20), torch.ones(0)])[:, :2])
    >>> find_padding(samples, torch.nn.functional.pad(torch.arange(40).view(2, 20), (0, 60)))
    Padding(shape=(2, 80), longest=20, padded=80)
    """
    sizes = list(_varying_sizes(samples))
    for tensor in _leaves(batch, torch.Tensor):
        for dimension, padded in enumerate(tensor.shape):
            for rest, longest in sizes:
                is_padded = padded - longest >= max(THRESHOLDS.padded_columns, THRESHOLDS.padded_fraction * padded)
                others = [size for at, size in enumerate(tensor.shape) if at != dimension]
                if not is_padded or len(samples) not in others or not _has(others, (len(samples), *rest)):
                    continue
                beyond = tensor.narrow(dimension, longest, padded - longest)
                within = tensor.narrow(dimension, 0, longest)
                if _is_one_value(beyond) and not _is_one_value(within):
                    return Padding(shape=tuple(tensor.shape), longest=longest, padded=padded)
    return None


def _varying_sizes(samples: Sequence[Any]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield, of each array of samples that differs in one dimension, its other sizes, and the largest of that one."""
    columns = [[*map(_shape, _leaves(one, (torch.Tensor, np.ndarray, list)))] for one in samples]
    if len({len(shapes) for shapes in columns}) != 1:
        return
    for shapes in zip(*columns, strict=True):
        if len({len(shape) for shape in shapes}) != 1:
            continue
        varying = [at for at, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
        if len(varying) == 1:
            (dimension,) = varying
            rest = tuple(size for at, size in enumerate(shapes[0]) if at != dimension)
            yield rest, max(shape[dimension] for shape in shapes)


def _leaves(tree: Any, kinds: Any) -> list[Any]:
    def is_leaf(one: Any) -> bool:
        return isinstance(one, list) and bool(one) and isinstance(one[0], int | float)

    found = torch.utils._pytree.tree_leaves(tree, is_leaf=is_leaf)
    return [one for one in found if isinstance(one, kinds) and (not isinstance(one, torch.Tensor) or _is_dense(one))]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has sizes, and values that lie in memory: not one that is sparse, nested or meta."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def _shape(one: Any) -> tuple[int, ...]:
    return (len(one),) if isinstance(one, list) else tuple(one.shape)


def _has(sizes: list[int], wanted: tuple[int, ...]) -> bool:
    """Return whether all wanted sizes are there, and nothing else of more than one element."""
    left = [size for size in sizes if size != 1]
    for size in wanted:
        if size != 1:
            if size not in left:
                return False
            left.remove(size)
    return not left


def _is_one_value(tensor: torch.Tensor) -> bool:
    first = tensor.reshape(-1)[:1]
    return bool(tensor.numel()) and bool((tensor == first).all())
