"""BatchSpec: the layout of a batch in a slot, whose rows several workers may write.

A `BatchSpec` is a tree with the structure of one sample. Its leaves are of two kinds: `RowsSpec`, an array in the slot
with one row per sample, and `ColumnSpec`, a list of one Python value per sample (numbers, strings ...), which is
collated when all rows are written. Two specs are equal if workers with them write every byte to the same offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class RowsSpec:
    """A tensor of `size` (rows first) and `dtype` at byte `offset` of the slot."""

    offset: int
    size: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One Python value per sample, kept beside the slot as column number `number`.

    torch's collate gets the column of a sequence's field as a tuple, of a mapping's as a list, and keeps that for text.
    """

    number: int
    as_tuple: bool = False


@dataclass(frozen=True, slots=True)
class DictSpec:
    """A dict with these keys, in this order."""

    items: tuple[tuple[Any, BatchSpec], ...]


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """A list, or the named tuple `type`, of these parts. A plain tuple becomes a list, as in torch's collate."""

    parts: tuple[BatchSpec, ...]
    type: type[tuple[Any, ...]] | None = None


BatchSpec = RowsSpec | ColumnSpec | DictSpec | SequenceSpec


def leaves(spec: BatchSpec) -> list[RowsSpec | ColumnSpec]:
    """Return the leaves of `spec`, left to right."""
    match spec:
        case DictSpec(items):
            return [leaf for _, part in items for leaf in leaves(part)]
        case SequenceSpec(parts):
            return [leaf for part in parts for leaf in leaves(part)]
        case _:
            return [spec]


def build(spec: BatchSpec, values: Sequence[Any]) -> Any:
    """Return a batch with the structure of `spec` and `values` as its leaves, left to right.

    >>> build(DictSpec((("x", ColumnSpec(0)), ("y", SequenceSpec((ColumnSpec(1), ColumnSpec(2)))))), [1, 2, 3])
    {'x': 1, 'y': [2, 3]}
    """
    return _build(spec, iter(values))


# Not a closure: one that calls itself is a reference cycle, and would hold the batch's slot until the next gc.
def _build(spec: BatchSpec, values: Iterator[Any]) -> Any:
    match spec:
        case DictSpec(items):
            return {key: _build(part, values) for key, part in items}
        case SequenceSpec(parts, None):
            return [_build(part, values) for part in parts]
        case SequenceSpec(parts, named) if named is not None:
            return named(*[_build(part, values) for part in parts])
        case _:
            return next(values)
