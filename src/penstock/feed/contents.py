"""What a dataset or sampler consists of, as far as it lies in the open; a state is not gone on from with another.

No sample is made. Looked at, when a loader is made, are

    tensors and arrays          their dtype, their shape, and some entries, spread over the whole
    lists and tuples            with an entry for each sample: some of them (paths by their last part: folders move)
    datasets inside             of Subset, ConcatDataset, a source that was mapped ...

and not single numbers and words, which may say where or on which rank it is rather than what; nor what is in files; nor
lists of which not every entry is a number, a word, a path, data, or a small collection of such: they may be caches.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from penstock.feed.sources.base import Source
from penstock.feed.sources.stream import Stream

_ENTRIES = 32
_PARTS = 64
_DEPTH = 8


def contents(dataset: Any, sampler: Any = None) -> dict[str, str]:
    """Return what lies in the open of a dataset and of its sampler: for the name of each such part, a digest of it.

    >>> from torch.utils.data import Subset, TensorDataset
    >>> one = contents(Subset(TensorDataset(torch.arange(8)), [0, 5]))
    >>> sorted(one)
    ['dataset.dataset.tensors.0', 'dataset.indices']
    >>> other = contents(Subset(TensorDataset(torch.arange(8)), [0, 6]))
    >>> [name for name in one if one[name] != other[name]]
    ['dataset.indices']
    """
    known = () if isinstance(dataset, Stream) else _parts(dataset, "dataset", 0)  # a stream's state says its shards
    both = itertools.chain(known, _parts(sampler, "sampler", 0, apart=dataset))
    return {name: hashlib.sha256(told).hexdigest()[:12] for name, told in itertools.islice(both, _PARTS)}


def _parts(thing: Any, name: str, depth: int, apart: Any = None) -> Iterator[tuple[str, bytes]]:
    """Yield the name of each part, and what is to be known of it; leave out the one that is `apart`."""
    told = _told(thing)
    if told is not None:
        yield name, told
        return
    if isinstance(thing, Source):
        yield _below(name, "where"), os.path.basename(str(thing.where)).encode()
    count = _length(thing)
    for attribute, value in sorted(getattr(thing, "__dict__", {}).items()):
        below = _below(name, attribute)
        if value is apart:
            continue
        if isinstance(value, torch.Tensor | np.ndarray) or (_is_list(value) and len(value) == count):
            if (told := _told(value)) is not None:
                yield below, told
        elif depth < _DEPTH and isinstance(thing, Dataset):  # a sampler's dataset is the loader's
            for place, part in _inside(value):
                yield from _parts(part, _below(below, place), depth + 1)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the datasets and tensors that an attribute is, or is a list of, with their places in it."""
    if isinstance(value, Dataset):
        yield "", value
    elif _is_list(value) and len(value) <= _PARTS:
        for place, part in enumerate(value):
            if isinstance(part, Dataset | torch.Tensor | np.ndarray):
                yield str(place), part


def _told(thing: Any) -> bytes | None:
    """Return what is to be known of data; None if it is none, or may be a cache."""
    if isinstance(thing, torch.Tensor):
        return f"{thing.dtype} {list(thing.shape)} ".encode() + _entries_of_tensor(thing)
    if isinstance(thing, np.ndarray):
        return f"{thing.dtype} {thing.shape} ".encode() + _entries_of_array(thing)
    if isinstance(thing, range):
        return repr(thing).encode()
    if _is_list(thing):
        with contextlib.suppress(_OtherError):
            return f"{len(thing)} {[_entry(thing[place], 2) for place in _spread(len(thing))]}".encode()
    return None


class _OtherError(Exception):
    """An entry is something else."""


def _entry(value: Any, depth: int) -> str:
    """Return one entry in words.

    Raises:
        _OtherError: it is no number, word, path, data, or small collection of such.
    """
    if isinstance(value, str):
        return os.path.basename(value.rstrip("/"))
    if isinstance(value, bool | int | float | complex | bytes):
        return repr(value[:256] if isinstance(value, bytes) else value)
    if isinstance(value, np.generic):
        return repr(value.item())
    if depth and isinstance(value, tuple | list):
        return f"{len(value)} {[_entry(one, depth - 1) for one in value[:16]]}"
    if depth and isinstance(value, torch.Tensor | np.ndarray):
        return hashlib.sha256(_told(value) or b"").hexdigest()
    if isinstance(value, os.PathLike):
        return _entry(os.fspath(value), 0)
    raise _OtherError


def _entries_of_tensor(tensor: torch.Tensor) -> bytes:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return b""
    with contextlib.suppress(Exception):  # a tensor without data (fake, meta), or of a kind of the user's
        places = np.unravel_index(_spread(tensor.numel()), tuple(tensor.shape))
        entries = tensor.detach()[tuple(torch.from_numpy(place) for place in places)]
        return entries.resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy().tobytes()
    return b""


def _entries_of_array(array: np.ndarray) -> bytes:
    if not array.size or isinstance(array, np.memmap):  # reading a file's entries may take its time
        return b""
    entries = array[np.unravel_index(_spread(array.size), array.shape)]
    if not array.dtype.hasobject:
        return entries.tobytes()
    with contextlib.suppress(_OtherError):
        return str([_entry(one, 1) for one in entries]).encode()
    return b""


def _spread(count: int) -> np.ndarray:
    """Return some places among `count`, the first and the last among them, int64."""
    return np.unique(np.linspace(0, count - 1, min(count, _ENTRIES)).astype(np.int64)) if count else np.arange(0)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | range) and isinstance(value, Sequence)


def _length(thing: Any) -> int | None:
    with contextlib.suppress(Exception):  # it may have none, or not know it yet
        return len(thing)
    return None


def _below(name: str, part: str) -> str:
    return f"{name}.{part}" if name and part else name or part
