"""Samples without their random augmentations: the dataset's transforms are left out while it is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import Dataset

from penstock.core.object_attributes import attributes_of

_WORDS = ("transform", "augment")
_DEPTH = 3


@contextmanager
def untransformed(dataset: Any) -> Iterator[None]:
    """Let a dataset return what its transforms would get: attributes that are named so return what they are given.

    The datasets that it is made of are treated like it.

    >>> class Noisy(Dataset):
    ...     transform = None
    ...     def __init__(self):
    ...         self.transform = lambda value: value + 0.5
    ...     def __getitem__(self, index):
    ...         return self.transform(index)
    >>> noisy = Noisy()
    >>> with untransformed(noisy):
    ...     noisy[3]
    3
    >>> noisy[3]
    3.5
    """
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for one, name, value in _attributes(dataset, _DEPTH):
            if any(word in name.lower() for word in _WORDS) and callable(value) and not isinstance(value, type):
                replaced.append((one, name, value))
                object.__setattr__(one, name, _unchanged)
        yield
    finally:
        for one, name, value in reversed(replaced):
            object.__setattr__(one, name, value)


def _attributes(dataset: Any, depth: int) -> Iterator[tuple[Any, str, Any]]:
    values = attributes_of(dataset) if depth else {}
    yield from ((dataset, name, value) for name, value in values.items())
    for value in values.values():
        if isinstance(value, Dataset) and value is not dataset:
            yield from _attributes(value, depth - 1)


def _unchanged(*args: Any, **named: Any) -> Any:
    """Return what a transform got, as the usual libraries return what they made of it."""
    if named:
        return named
    return args[0] if len(args) == 1 else args
