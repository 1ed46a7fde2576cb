"""The fingerprint of a dataset and its sampler: digests of what they visibly consist of, so that a state is not resumed
with other data.

No sample is made. Before a loader's first pass, the things are read that decide which sample an index stands for:

    data       a tensor, array or list that is itself the dataset; the tensors of a TensorDataset, the indices of a
               Subset, the datasets inside of torch's own; a sampler's indices and weights
    text       lists and arrays of text with an entry for each sample; of files only the last part of the path counts,
               because folders move

Of data, the shape and some entries spread over the whole are digested. Other numbers with an entry for each sample may
be data or a cache (`entries`): a difference is only warned of. Everything else that an object holds may be a counter, a
folder or a rank, and is left out; so is what cannot be read (files, other devices).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from penstock.core.object_attributes import attributes_of
from penstock.data.mixture import Mixture
from penstock.data.sample_cache.cached_dataset import CachedDataset
from penstock.data.shared import SharedList
from penstock.data.source import Cached, Source
from penstock.distributed.rank import rank_and_world_size

_ENTRIES = 32
_PARTS = 64
_LONGEST = 256
"""Characters of a text that are digested, from its end."""


@dataclass(frozen=True, slots=True)
class DatasetFingerprint:
    """Digests by the name of the part."""

    parts: dict[str, str]
    """Of what surely decides which samples there are."""
    entries: dict[str, str]
    """Of what may be data, and may be a cache."""

    rank: int
    """Of the process that took it. Another's part of the data may be another."""

    @classmethod
    def of(cls, dataset: Any, sampler: Any) -> DatasetFingerprint:
        """Read a dataset and a sampler."""
        return cls(parts_of(dataset, sampler), entries_of(dataset), rank_and_world_size()[0])

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values, for a checkpoint."""
        return {"rank": self.rank, "parts": {**self.parts}, "entries": {**self.entries}}


def parts_of(dataset: Any, sampler: Any = None) -> dict[str, str]:
    """Return a digest of each readable part of a dataset and its sampler, by the name of the part.

    >>> one = parts_of(Subset(TensorDataset(torch.arange(8)), [0, 5]))
    >>> sorted(one)
    ['dataset.dataset.tensors.0', 'dataset.indices']
    >>> other = parts_of(Subset(TensorDataset(torch.arange(8)), [0, 6]))
    >>> [name for name in one if one[name] != other[name]]
    ['dataset.indices']
    """
    return _digests(lambda: (*_parts(dataset, "dataset"), *_sampler_parts(sampler, dataset)))


def entries_of(dataset: Any) -> dict[str, str]:
    """Return the digests of numbers with one entry for each sample, which may be the data or a cache.

    >>> class Numbers:
    ...     def __init__(self):
    ...         self.data, self.loss = torch.arange(8), 0.5
    ...     def __len__(self):
    ...         return 8
    >>> [*entries_of(Numbers())]
    ['dataset.data']
    """
    if isinstance(dataset, CachedDataset):
        return entries_of(dataset.dataset)
    if isinstance(dataset, IterableDataset | TensorDataset | Subset | ConcatDataset | Source):
        return {}
    return _digests(lambda: [*_columns(dataset, "dataset", lambda entry: not _is_word(entry))])


def _digests(parts: Callable[[], Sequence[tuple[str, Any]]]) -> dict[str, str]:
    found: dict[str, str] = {}
    with contextlib.suppress(Exception):  # whatever a user's class does when it is read: loops must run all the same
        for name, part in parts():
            with contextlib.suppress(Exception):
                if (found_bytes := _bytes_of(part)) is not None:
                    found[name] = hashlib.sha256(found_bytes).hexdigest()[:12]
    return found


def _parts(dataset: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts that decide which samples there are, with their names; at most `_PARTS`, in a few levels."""
    left = [(name, dataset)]
    for _ in range(_PARTS):
        if not left:
            return
        name, one = left.pop(0)
        if type(one) in (list, tuple, range, SharedList) or isinstance(one, torch.Tensor | np.ndarray):
            yield name, one
        elif isinstance(one, TensorDataset):
            yield from ((f"{name}.tensors.{place}", tensor) for place, tensor in enumerate(one.tensors[:_PARTS]))
        elif isinstance(one, Subset):
            yield f"{name}.indices", one.indices
            left.append((f"{name}.dataset", one.dataset))
        elif isinstance(one, ConcatDataset):
            left += [(f"{name}.datasets.{place}", inner) for place, inner in enumerate(one.datasets[:_PARTS])]
        elif isinstance(one, CachedDataset):  # a state of the dataset without a cache is one of it, too
            left.append((name, one.dataset))
        elif isinstance(one, Cached):
            left += [(name, inner) for inner in one.parts]
        elif isinstance(one, Source):
            yield f"{name}.where", [str(one.where)]
            left += [(f"{name}.{key}", inner) for key, inner in attributes_of(one).items() if isinstance(inner, Source)]
            if isinstance(one, Mixture):  # its `where` says its order
                left += [(f"{name}.parts.{place}", inner) for place, inner in enumerate(one.parts)]
            yield from _columns(one, name, lambda entry: True)  # which records were picked, say
        elif not isinstance(one, IterableDataset):  # a stream's state says its shards
            yield from _columns(one, name, _is_word)


def _columns(thing: Any, name: str, wanted: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield the lists, arrays and tensors that an object has with an entry for each sample, where one is wanted."""
    for attribute, value in attributes_of(thing).items():
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
    return type(value) in (list, tuple, SharedList) and len(value) > 0


def _is_word(value: Any) -> bool:
    first = value[0] if type(value) is tuple and value else value  # (file, class), as torchvision's folders have
    return isinstance(first, str | bytes | os.PathLike)


class _OtherError(Exception):
    """An entry is of a kind that cannot be digested."""


def _bytes_of(thing: Any) -> bytes | None:
    """Return the bytes to digest for some data; None if it cannot be read, or is no data."""
    with contextlib.suppress(_OtherError):
        if isinstance(thing, torch.Tensor):
            return _tensor_bytes(thing)
        if isinstance(thing, np.ndarray):
            return None if isinstance(thing, np.memmap) else _entries_bytes(thing.shape, _array_entries(thing))
        if isinstance(thing, Sequence):
            return _entries_bytes((len(thing),), [thing[place] for place in _spread(len(thing))])
    return None


def _tensor_bytes(tensor: torch.Tensor) -> bytes | None:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    if not tensor.ndim or not tensor.numel():
        return _entries_bytes(tuple(tensor.shape), tensor.flatten().tolist())
    places = np.unravel_index(_spread(tensor.numel()), tuple(tensor.shape))
    entries = tensor.detach()[tuple(torch.from_numpy(np.asarray(place)) for place in places)]
    return _entries_bytes(tuple(tensor.shape), entries.tolist())


def _array_entries(array: np.ndarray) -> list[Any]:
    if not array.ndim or not array.size:
        return [*array.flat]
    return [*array[np.unravel_index(_spread(array.size), array.shape)]]


def _entries_bytes(shape: tuple[int, ...], entries: list[Any]) -> bytes:
    return f"{list(shape)} {[_entry(one, 2) for one in entries]}".encode("utf-8", "surrogatepass")


def _entry(value: Any, depth: int) -> str:
    """Return one entry as text: numbers whatever their type, paths by their last part.

    Raises:
        _OtherError: it is no number, text, path, data, or small collection of these.
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
    if depth and isinstance(value, torch.Tensor | np.ndarray) and (found_bytes := _bytes_of(value)) is not None:
        return hashlib.sha256(found_bytes).hexdigest()
    raise _OtherError


def _spread(count: int) -> list[int]:
    """Return some places among `count`, the first and the last among them."""
    if not count:
        return []
    return sorted({(count - 1) * number // max(1, min(count, _ENTRIES) - 1) for number in range(min(count, _ENTRIES))})
