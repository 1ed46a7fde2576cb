"""Finds files that may be copies of each other, among those that datasets list: by size, then by bytes of their middle.

Loading tells whether two samples are the same, and takes long: of a large folder of images few would be compared.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from penstock.core.object_attributes import attributes_of
from penstock.observe.doctor.contents.origins import Origin

_MIDDLE_NBYTES = 4096
_MOST_TWINS = 64

_Place = tuple[Any, int]


def find_twins(
    origins: Iterable[Origin], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[_Place]:
    """Return datasets and indices of files of which there seem to be several: a few of them, found within `seconds`."""
    until = clock() + seconds
    by_size: dict[int, list[tuple[Any, int, str]]] = defaultdict(list)
    for dataset, index, file in _listed(origins):
        if clock() > until:
            break
        size = _size(file)
        if size:
            by_size[size].append((dataset, index, file))
    by_content: dict[tuple[int, bytes], list[_Place]] = defaultdict(list)
    for size, places in by_size.items():
        for dataset, index, file in places if len(places) > 1 else ():
            if clock() > until:
                break
            by_content[size, _middle(file, size)].append((dataset, index))
    groups = (places for (_, middle), places in by_content.items() if middle and len(places) > 1)
    return list(islice((place for places in groups for place in places), _MOST_TWINS))


def _listed(origins: Iterable[Origin]) -> Iterator[tuple[Any, int, str]]:
    """Yield each sample with its file, of the datasets that have a list of files."""
    seen: set[tuple[int, int]] = set()
    for origin in origins:
        files = _files_of(origin.dataset)
        for index in origin.indices.tolist() if files is not None else ():
            if (id(origin.dataset), index) not in seen:
                seen.add((id(origin.dataset), index))
                yield origin.dataset, index, _name(files[index])


def _files_of(dataset: Any) -> Any:
    """Return the attribute that lists a file for each sample, or a file with other things; None without one."""
    try:
        size, attributes = len(dataset), attributes_of(dataset)
    except (TypeError, NotImplementedError):
        return None
    for value in attributes.values():
        is_list = isinstance(value, list | tuple) and len(value) == size and size > 0
        if is_list and _name(value[0]) and os.path.isfile(_name(value[0])):
            return value
    return None


def _name(entry: Any) -> str:
    first = entry[0] if isinstance(entry, tuple | list) and entry else entry
    return os.fspath(first) if isinstance(first, str | os.PathLike) else ""


def _size(file: str) -> int:
    try:
        return os.stat(file).st_size if file else 0
    except OSError:
        return 0


def _middle(file: str, size: int) -> bytes:
    try:
        with open(file, "rb", buffering=0) as opened:
            opened.seek(max(0, (size - _MIDDLE_NBYTES) // 2))
            return hashlib.blake2b(opened.read(_MIDDLE_NBYTES), digest_size=16).digest()
    except OSError:
        return b""
