"""Samples of a batch that are read together: gathered as columns, and kept for the thread that then asks for each.

A DataLoader that makes samples one by one, each with its own seed and error, enters `samples_ahead` for a batch: its
thread's `source[index]` takes the sample from there. What cannot be read ahead is read when it is asked for.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from penstock.core.errors import SourceError


class _Entered(threading.local):
    """What this thread has entered."""

    source: object = None
    samples: dict[Any, Any] = {}  # noqa: RUF012  empty, and never written to


entered = _Entered()


@contextlib.contextmanager
def samples_ahead(source: Any, indices: Iterable[Any]) -> Iterator[None]:
    """Read the samples of a batch that a source has ready at once when it is entered; see the module."""
    outer, samples = (entered.source, entered.samples), dict[Any, Any]()
    known = plain_indices(indices)
    if known is not None:
        with contextlib.suppress(SourceError):  # raised again by the sample that it belongs to
            ready = source.ready(known[(known >= 0) & (known < len(source))])
            samples = dict(zip(ready.tolist(), source.read_many(ready), strict=True))
    entered.source, entered.samples = source, samples
    try:
        yield
    finally:
        entered.source, entered.samples = outer


def plain_indices(indices: Iterable[Any]) -> np.ndarray | None:
    """Return the indices as an array; None if they are not all integers.

    >>> plain_indices([2, 0]), plain_indices([1.5]), plain_indices([])
    (array([2, 0]), None, None)
    """
    try:
        found = np.asarray(indices if isinstance(indices, Sequence) else [*indices])
    except (TypeError, ValueError):
        return None
    return found.astype(np.int64, copy=False) if found.ndim == 1 and found.dtype.kind == "i" else None


def samples_of(names: Sequence[str], columns: Sequence[Iterable[Any]]) -> list[dict[str, Any]]:
    """Return a dict for each row of some columns.

    >>> samples_of(["x", "y"], [[1, 2], "ab"])
    [{'x': 1, 'y': 'a'}, {'x': 2, 'y': 'b'}]
    """
    if len(names) == 1:
        (first,) = names
        return [{first: one} for one in columns[0]]
    if len(names) == 2:  # in half the time of the general way
        first, second = names
        return [{first: one, second: other} for one, other in zip(*columns, strict=True)]
    if len(names) == 3:
        first, second, third = names
        return [{first: one, second: other, third: last} for one, other, last in zip(*columns, strict=True)]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def as_slice(rows: np.ndarray) -> slice | None:
    """Return the slice that rows are, if they follow each other; else None.

    >>> as_slice(np.array([3, 4, 5])), as_slice(np.array([3, 5]))
    (slice(3, 6, None), None)
    """
    first, last = int(rows[0]), int(rows[-1])
    if last - first != len(rows) - 1 or (len(rows) > 2 and (np.diff(rows) != 1).any()):
        return None
    return slice(first, last + 1)


def put_in_order(parts: Sequence[tuple[np.ndarray | slice, list[Any]]], count: int) -> list[Any]:
    """Return the samples of several parts of a batch, each with their places in it.

    >>> put_in_order([(np.array([0, 2]), ["a", "c"]), (np.array([1]), ["b"])], 3)
    ['a', 'b', 'c']
    """
    if len(parts) == 1:
        return parts[0][1]
    found: list[Any] = [None] * count
    for places, samples in parts:
        if isinstance(places, slice):
            found[places] = samples
            continue
        for place, sample in zip(places.tolist(), samples, strict=True):
            found[place] = sample
    return found
