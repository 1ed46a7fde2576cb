"""Samples without their random augmentations: the dataset's transforms are left out while it is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import Dataset

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
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for values in _attributes(dataset, _DEPTH):
            for name in [name for name in values if any(word in name.lower() for word in _WORDS)]:
                if callable(values[name]) and not isinstance(values[name], type):
                    replaced.append((values, name, values[name]))
                    values[name] = _unchanged
        yield
    finally:
        for values, name, value in reversed(replaced):
            values[name] = value


def _attributes(dataset: Any, depth: int) -> Iterator[dict[str, Any]]:
    values = getattr(dataset, "__dict__", None)
    if not isinstance(values, dict) or not depth:
        return
    yield values
    for value in list(values.values()):
        if isinstance(value, Dataset) and value is not dataset:
            yield from _attributes(value, depth - 1)


def _unchanged(*args: Any, **named: Any) -> Any:
    """Return what a transform got, as the usual libraries return what they made of it."""
    if named:
        return named
    return args[0] if len(args) == 1 else args
