"""What a dataset or sampler consists of, as far as it lies in the open; a state is not gone on from with another.

No sample is made. Looked at, before a loader's first pass, is what decides which sample an index stands for:

    data       a tensor, array or list that is itself the dataset; the tensors of a TensorDataset, the indices of a
               Subset, the datasets inside of torch's own; a sampler's indices and weights
    words      lists and arrays of words with an entry for each sample: files by the last part of their paths, for
               folders move

Of data its shape and some entries, spread over the whole. Other numbers with an entry for each sample may be data, and
may be a cache (`entries`: these are only warned of). Everything else that an object holds may be a count, a folder or a
rank, and is left out; so is what cannot be looked at (files, other devices).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from penstock.feed.sources.base import Source

_ENTRIES = 32
_PARTS = 64
_LONGEST = 256
"""Of a word, what is looked at: its end."""


def contents(dataset: Any, sampler: Any = None) -> dict[str, str]:
    """Return what lies in the open of a dataset and of its sampler: for the name of each such part, a digest of it.

    >>> one = contents(Subset(TensorDataset(torch.arange(8)), [0, 5]))
    >>> sorted(one)
    ['dataset.dataset.tensors.0', 'dataset.indices']
    >>> other = contents(Subset(TensorDataset(torch.arange(8)), [0, 6]))
    >>> [name for name in one if one[name] != other[name]]
    ['dataset.indices']
    """
    return _digests(lambda: (*_parts(dataset, "dataset"), *_sampler_parts(sampler, dataset)))


def entries(dataset: Any) -> dict[str, str]:
    """Return the same of what may be a dataset's data, and may be a cache: numbers, one entry for each sample.

    >>> class Numbers:
    ...     def __init__(self):
    ...         self.data, self.loss = torch.arange(8), 0.5
    ...     def __len__(self):
    ...         return 8
    >>> [*entries(Numbers())]
    ['dataset.data']
    """
    if isinstance(dataset, IterableDataset | TensorDataset | Subset | ConcatDataset | Source):
        return {}
    return _digests(lambda: [*_columns(dataset, "dataset", lambda entry: not _is_word(entry))])


def _digests(parts: Callable[[], Sequence[tuple[str, Any]]]) -> dict[str, str]:
    found: dict[str, str] = {}
    with contextlib.suppress(Exception):  # whatever a user's class does when it is looked at, loops run without this
        for name, part in parts():
            with contextlib.suppress(Exception):
                if (told := _told(part)) is not None:
                    found[name] = hashlib.sha256(told).hexdigest()[:12]
    return found


def _parts(dataset: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts that decide which samples there are, with their names; at most so many, in a few levels."""
    left = [(name, dataset)]
    for _ in range(_PARTS):
        if not left:
            return
        name, one = left.pop(0)
        if type(one) in (list, tuple, range) or isinstance(one, torch.Tensor | np.ndarray):
            yield name, one
        elif isinstance(one, TensorDataset):
            yield from ((f"{name}.tensors.{place}", tensor) for place, tensor in enumerate(one.tensors[:_PARTS]))
        elif isinstance(one, Subset):
            yield f"{name}.indices", one.indices
            left.append((f"{name}.dataset", one.dataset))
        elif isinstance(one, ConcatDataset):
            left += [(f"{name}.datasets.{place}", inner) for place, inner in enumerate(one.datasets[:_PARTS])]
        elif isinstance(one, Source):
            yield f"{name}.where", [str(one.where)]
            left += [(f"{name}.{key}", inner) for key, inner in vars(one).items() if isinstance(inner, Source)]
            yield from _columns(one, name, lambda entry: True)  # which records were picked, say
        elif not isinstance(one, IterableDataset):  # a stream's state says its shards
            yield from _columns(one, name, _is_word)


def _columns(thing: Any, name: str, wanted: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield the lists, arrays and tensors that an object has with an entry for each sample, where one is wanted."""
    for attribute, value in getattr(thing, "__dict__", {}).items():
        if _has_entries(value) and wanted(value[0]) and len(value) == len(thing):
            yield f"{name}.{attribute}", value


def _sampler_parts(sampler: Any, dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a sampler draws from: a sequence of indices, or torch's own sampler's indices or weights."""
    if type(sampler) in (list, tuple, range) or isinstance(sampler, torch.Tensor | np.ndarray):
        yield "sampler", sampler
    elif type(sampler).__module__ == torch.utils.data.Sampler.__module__:
        for attribute in ("indices", "weights"):
            if (value := getattr(sampler, attribute, None)) is not None and value is not dataset:
                yield f"sampler.{attribute}", value


def _has_entries(value: Any) -> bool:
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.ndim > 0 and len(value) > 0
    return type(value) in (list, tuple) and len(value) > 0


def _is_word(value: Any) -> bool:
    first = value[0] if type(value) is tuple and value else value  # (file, class), as torchvision's folders have
    return isinstance(first, str | bytes | os.PathLike)


class _OtherError(Exception):
    """An entry is something else."""


def _told(thing: Any) -> bytes | None:
    """Return what is to be known of data; None where that cannot be seen, or is no data."""
    with contextlib.suppress(_OtherError):
        if isinstance(thing, torch.Tensor):
            return _told_of_tensor(thing)
        if isinstance(thing, np.ndarray):
            return None if isinstance(thing, np.memmap) else _told_of_entries(thing.shape, _entries_of(thing))
        if isinstance(thing, Sequence):
            return _told_of_entries((len(thing),), [thing[place] for place in _spread(len(thing))])
    return None


def _told_of_tensor(tensor: torch.Tensor) -> bytes | None:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    if not tensor.ndim or not tensor.numel():
        return _told_of_entries(tuple(tensor.shape), tensor.flatten().tolist())
    places = np.unravel_index(_spread(tensor.numel()), tuple(tensor.shape))
    entries = tensor.detach()[tuple(torch.from_numpy(np.asarray(place)) for place in places)]
    return _told_of_entries(tuple(tensor.shape), entries.tolist())


def _entries_of(array: np.ndarray) -> list[Any]:
    if not array.ndim or not array.size:
        return [*array.flat]
    return [*array[np.unravel_index(_spread(array.size), array.shape)]]


def _told_of_entries(shape: tuple[int, ...], entries: list[Any]) -> bytes:
    return f"{list(shape)} {[_entry(one, 2) for one in entries]}".encode("utf-8", "surrogatepass")


def _entry(value: Any, depth: int) -> str:
    """Return one entry in words: numbers whatever their type, words by their last part.

    Raises:
        _OtherError: it is no number, word, path, data, or small collection of such.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str | bytes):
        end = value[-_LONGEST:]
        words = end.decode("utf-8", "replace") if isinstance(end, bytes) else end
        return os.path.basename(words.rstrip("/"))
    if isinstance(value, bool | int | float | complex):
        return repr(complex(value) + 0) if abs(value) < 1 << 64 else str(hash(value))
    if depth and type(value) in (tuple, list):
        return f"{len(value)} {[_entry(one, depth - 1) for one in value[:16]]}"
    if depth and isinstance(value, torch.Tensor | np.ndarray) and (told := _told(value)) is not None:
        return hashlib.sha256(told).hexdigest()
    raise _OtherError


def _spread(count: int) -> list[int]:
    """Return some places among `count`, the first and the last among them."""
    if not count:
        return []
    return sorted({(count - 1) * number // max(1, min(count, _ENTRIES) - 1) for number in range(min(count, _ENTRIES))})
