"""The fingerprint of a dataset and its sampler: what they visibly consist of, so that a state is not resumed with other
data.

No sample is made. Looked at are, before a loader's first pass:

    data          a list, tensor or array that is itself the dataset; what torch's own datasets and penstock's sources
                  consist of; the indices or weights of torch's own samplers
    attributes    by the names that datasets commonly give to what has an entry for each sample (`_KNOWN`)

Of each the length counts, and the first and the last entry. Of files that is the last part of the path, because folders
move. What cannot be read is left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from penstock.core.object_attributes import attributes_of
from penstock.data.mixture import Mixture
from penstock.data.sample_cache.cached_dataset import CachedDataset
from penstock.data.shared import SharedList
from penstock.data.source import Cached, Source

_KNOWN = (
    *("data", "samples", "items", "files", "filenames", "filepaths", "paths", "names", "ids"),
    *("images", "imgs", "image_paths", "targets", "labels"),
)
_PARTS = 64
_LONGEST = 256
"""Characters of a text that count, from its end, and numbers of an array, spread over it."""


def fingerprint(dataset: Any, sampler: Any = None) -> dict[str, str]:
    """Return the length and a digest of each readable part of a dataset and its sampler, by the name of the part.

    >>> one = fingerprint(Subset(TensorDataset(torch.arange(8)), [0, 5]))
    >>> sorted(one)
    ['dataset.dataset.tensors.0', 'dataset.indices']
    >>> other = fingerprint(Subset(TensorDataset(torch.arange(8)), [0, 6]))
    >>> [name for name in one if one[name] != other[name]]
    ['dataset.indices']
    """
    found: dict[str, str] = {}
    with contextlib.suppress(Exception):  # whatever a user's class does when it is read: loops must run all the same
        for name, part in itertools.chain(_parts(dataset), _sampler_parts(sampler, dataset)):
            with contextlib.suppress(Exception):
                ends = [_entry(part[place], 2) for place in (0, -1)] if len(part) else []
                digest = hashlib.sha256(str(ends).encode("utf-8", "surrogatepass")).hexdigest()
                found[name] = f"{len(part)} {digest[:12]}"
    return found


def _parts(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts that decide which samples there are, with their names; of `_PARTS` objects at most."""
    left = [("dataset", dataset)]
    for _ in range(_PARTS):
        if not left:
            return
        name, one = left.pop(0)
        if _is_data(one):
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
            own = attributes_of(one)
            left += [(f"{name}.{key}", inner) for key, inner in own.items() if isinstance(inner, Source)]
            if isinstance(one, Mixture):  # its `where` says its order
                left += [(f"{name}.parts.{place}", inner) for place, inner in enumerate(one.parts)]
            yield from _columns(one, name, own)  # which records were picked, say
        elif not isinstance(one, IterableDataset):  # a stream's state says its shards
            own = attributes_of(one)
            yield from _columns(one, name, {known: own[known] for known in _KNOWN if known in own})


def _columns(thing: Any, name: str, attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield those of an object's attributes that have an entry for each sample."""
    for attribute, value in attributes.items():
        if _is_data(value) and len(value) == len(thing):
            yield f"{name}.{attribute}", value


def _sampler_parts(sampler: Any, dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a sampler draws from: a sequence of indices, or torch's own sampler's indices or weights."""
    if _is_data(sampler):
        yield "sampler", sampler
    elif type(sampler).__module__ == torch.utils.data.Sampler.__module__:
        for attribute in ("indices", "weights"):
            if (value := getattr(sampler, attribute, None)) is not None and value is not dataset:
                yield f"sampler.{attribute}", value


def _is_data(thing: Any) -> bool:
    if isinstance(thing, torch.Tensor | np.ndarray):
        return thing.ndim > 0
    return type(thing) in (list, tuple, range, SharedList)


def _entry(value: Any, depth: int) -> Any:
    """Return one entry as text, a number, or a list of these.

    Raises:
        TypeError: it is nothing that can be told.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, bytes):
        value = value[-_LONGEST:].decode("utf-8", "replace")
    if isinstance(value, str):
        return os.path.basename(value[-_LONGEST:].rstrip("/"))
    if isinstance(value, torch.Tensor | np.ndarray):
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            raise TypeError("to look at it would wait for its device")
        flat = value.reshape(-1)
        spread = flat[:: max(1, len(flat) // _LONGEST)].tolist()
        return [list(value.shape), *(_entry(one, 0) for one in spread)]
    if isinstance(value, bool | int | float | complex | np.number | np.bool_):
        return value.item() if isinstance(value, np.generic) else value
    if depth and isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    if depth and type(value) in (tuple, list):
        return [len(value), *(_entry(one, depth - 1) for one in value[:16])]
    raise TypeError(f"an entry of type {type(value).__name__} cannot be told")
