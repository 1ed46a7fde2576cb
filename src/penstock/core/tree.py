"""Walking a batch: tensors inside dicts, lists, tuples and named tuples, to any depth."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of `batch`, in the order in which `map_leaves` visits them."""
    found: list[torch.Tensor] = []

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        return leaf

    map_leaves(collect, batch)
    yield from found


def map_leaves(change: Callable[[Any], Any], batch: Any) -> Any:
    """Return `batch` with `change` applied to its leaves; containers keep their type where that is possible.

    The containers are those of torch's `pin_memory`: mappings, named tuples, tuples and sequences other than strings.
    An object with a `to` method (a PackedSequence, a custom batch) is a leaf.
    """
    if isinstance(batch, (torch.Tensor, str, bytes)) or callable(getattr(batch, "to", None)):
        return change(batch)
    if isinstance(batch, Mapping):
        changed = {key: map_leaves(change, value) for key, value in batch.items()}
        return like_mapping(batch, changed)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_leaves(change, value) for value in batch))
    if isinstance(batch, tuple):
        return tuple(map_leaves(change, value) for value in batch)
    if isinstance(batch, Sequence):
        return like_sequence(batch, [map_leaves(change, value) for value in batch])
    return change(batch)


def call_with(function: Callable[..., Any], batch: Any) -> Any:
    """Return `function(batch)` for a tensor, `function(*batch)` for a tuple or list, `function(**batch)` for a dict."""
    if isinstance(batch, Mapping):
        return function(**batch)
    if isinstance(batch, (tuple, list)):
        return function(*batch)
    return function(batch)


def like_mapping(original: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """Return `changed` as a mapping of the type of `original`, or as a dict if that type cannot be constructed."""
    if type(original) is dict:
        return changed
    try:
        if hasattr(original, "__dataclass_fields__"):  # as the outputs of Hugging Face's models, which refuse `update`
            return dataclasses.replace(original, **changed)  # type: ignore[type-var]
        if isinstance(original, MutableMapping):
            clone = copy.copy(original)
            clone.update(changed)
            return clone
        return type(original)(changed)  # type: ignore[call-arg]
    except (TypeError, ValueError):
        return changed


def like_sequence(original: Sequence[Any], changed: list[Any]) -> Any:
    """Return `changed` as a sequence of the type of `original`, or as a list if that type cannot be constructed."""
    if type(original) is list:
        return changed
    try:
        if isinstance(original, MutableSequence):
            clone = copy.copy(original)
            for index, value in enumerate(changed):
                clone[index] = value
            return clone
        return type(original)(changed)  # type: ignore[call-arg]
    except TypeError:
        return changed
