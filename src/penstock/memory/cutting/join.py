"""Joining the outputs of the parts of a batch, so that they are what the whole batch would have given."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import OptionError
from penstock.core.tree import like_mapping
from penstock.memory.cutting.split import is_list_of_samples

_REMEDY = "have forward= return what belongs to single samples, or pass join="
_OF_LENGTHS = (
    "pad them to one length in forward=, or take them one by one: join=lambda outputs, sizes: [row for one in outputs "
    "for row in one]"
)
_WITHOUT_CACHE = "leave it out: forward=lambda model, batch: model(**batch, use_cache=False)"


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return one output for those of the parts of a batch.

    Tensors with a row for each sample of their part are joined by rows, lists with an item for each one after another.
    What is the same object or text in all parts stays as it is. Dicts, tuples, lists, named tuples and dataclasses keep
    their type.

    Args:
        outputs: of each part, in order.
        sizes: samples of each part.

    Raises:
        OptionError: something is neither, as a number is: it may be a count, a sum or a mean.

    >>> join_outputs([{"x": torch.zeros(2), "names": ["a", "b"]}, {"x": torch.ones(1), "names": ["c"]}], [2, 1])
    {'x': tensor([0., 0., 1.]), 'names': ['a', 'b', 'c']}
    """
    return outputs[0] if len(outputs) == 1 else _joined(list(outputs), list(sizes), "the output")


def _joined(values: list[Any], sizes: list[int], where: str) -> Any:
    first = values[0]
    is_number = isinstance(first, int | float) and not isinstance(first, bool)  # a count of samples, or a mean
    if not is_number and all(value is first for value in values):
        return first
    if len({type(value) for value in values}) > 1:
        raise _error(where, f"is of another type in each part of a batch ({_types_text(values)})")
    if isinstance(first, Tensor):
        return _joined_tensors(values, sizes, where)
    if isinstance(first, Mapping):
        if any(value.keys() != first.keys() for value in values):
            raise _error(where, "has other keys in each part of a batch")
        return like_mapping(
            first, {key: _joined([value[key] for value in values], sizes, f"{where}[{key!r}]") for key in first}
        )
    if isinstance(first, list | tuple):
        return _joined_sequences(values, sizes, where)
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        joined = {name: _joined([getattr(value, name) for value in values], sizes, f"{where}.{name}") for name in names}
        return dataclasses.replace(first, **joined)  # type: ignore[type-var]
    if isinstance(first, str | bytes) and all(value == first for value in values):
        return first
    remedy = _WITHOUT_CACHE if type(first).__name__.endswith("Cache") else _REMEDY
    raise _error(where, f"is a {type(first).__name__} of each part of a batch", remedy)


def _joined_tensors(values: list[Tensor], sizes: list[int], where: str) -> Tensor:
    has_rows = all(one.ndim > 0 and one.shape[0] == size for one, size in zip(values, sizes, strict=True))
    are_alike = len({one.shape[1:] for one in values}) == 1
    if not has_rows or not are_alike:
        shapes = ", ".join(str(tuple(one.shape)) for one in values[:3])
        what = f"has the shapes {shapes} for parts of {', '.join(map(str, sizes[:3]))} samples"
        raise _error(where, what, _OF_LENGTHS if has_rows else _REMEDY)
    return torch.cat(values)


def _joined_sequences(values: list[Any], sizes: list[int], where: str) -> Any:
    first = values[0]
    if all(is_list_of_samples(value, size) for value, size in zip(values, sizes, strict=True)):
        return type(first)(item for value in values for item in value)
    if any(len(value) != len(first) for value in values):
        raise _error(where, f"has {', '.join(str(len(value)) for value in values[:3])} items")
    parts = [_joined([value[place] for value in values], sizes, f"{where}[{place}]") for place in range(len(first))]
    return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)


def _types_text(values: list[Any]) -> str:
    return ", ".join(sorted({type(value).__name__ for value in values}))


def _error(where: str, what: str, remedy: str = _REMEDY) -> OptionError:
    return OptionError(f"the outputs of a batch that was cut cannot be joined: {where} {what}; {remedy}")
