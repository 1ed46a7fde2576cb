"""Whose samples a file has: a digest of what can be seen of a dataset without making a sample.

    class, length; the code of its __getitem__ and of functions that it holds; entries of lists and arrays with one for
    each sample; the size and the time of the local files that a source reads, or that such entries name (of 65 536 of
    them, if there are more); the same of the datasets that it holds

A file that passes may still be another's: `SampleCache` compares samples, too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from penstock.core.object_attributes import attributes_of

_ENTRIES = 1024
_FILES = 1 << 16
_DEEPEST = 6


def fingerprint(dataset: Any) -> bytes:
    """Return 32 bytes, the same for the same dataset in each program.

    >>> fingerprint([1, 2, 3]) == fingerprint([1, 2, 3]), fingerprint([1, 2, 3]) == fingerprint([1, 2, 4])
    (True, False)
    """
    return hashlib.sha256("\n".join(_lines(dataset, _DEEPEST)).encode("utf-8", "surrogatepass")).digest()


def _lines(dataset: Any, depth: int) -> Iterator[str]:
    kind = type(dataset)
    yield f"{kind.__module__}.{kind.__qualname__} {len(dataset)}"
    yield _code_text(getattr(kind, "__getitem__", None))
    yield from _source_texts(dataset)
    yield _entries_text(dataset, len(dataset))
    for name, value in sorted(attributes_of(dataset).items()):
        if isinstance(value, FunctionType | MethodType):
            yield f"{name} {_code_text(value)}"
        elif isinstance(value, Dataset) and hasattr(value, "__len__") and depth:
            yield name
            yield from _lines(value, depth - 1)
        elif callable(value):
            yield f"{name} {type(value).__module__}.{type(value).__qualname__} {_code_text(type(value).__call__)}"
        else:
            yield f"{name} {_entries_text(value, len(dataset))}"


def _code_text(function: Any) -> str:
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return ""
    constants = [one for one in code.co_consts if isinstance(one, int | float | str | bytes)]
    return f"{function.__qualname__} {hashlib.sha256(code.co_code).hexdigest()} {constants} {code.co_names}"


def _source_texts(dataset: Any) -> Iterator[str]:
    where = str(getattr(dataset, "where", ""))
    yield os.path.basename(where)
    if not hasattr(type(dataset), "read_paths") or dataset.parts:
        return
    paths = dataset.read_paths()
    for path in (paths[place] for place in _spread(len(paths), _FILES)):
        yield path.removeprefix(where)
        yield _file_text(path)
        if os.path.isdir(path):
            yield from map(_file_text, islice(_files_in(path), _FILES))


def _files_in(folder: str) -> Iterator[str]:
    for inside, folders, names in os.walk(folder):
        folders.sort()
        yield from (os.path.join(inside, name) for name in sorted(names))


def _file_text(path: Any) -> str:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return ""
    return f"{os.path.basename(path)} {status.st_size} {status.st_mtime_ns}"


def _spread(count: int, most: int) -> Iterable[int]:
    """Return some of `count` places, from the first to the last; all if they are not more than `most`."""
    return range(count) if count <= most else ((count - 1) * one // (most - 1) for one in range(most))


def _entries_text(value: Any, count: int) -> str:
    """Return some entries of what has one for each sample; an empty string if it has not, or they are no plain data."""
    if not isinstance(value, list | tuple | range | np.ndarray | torch.Tensor) or getattr(value, "ndim", 1) == 0:
        return ""
    if len(value) != count or not count:
        return ""
    first = value[0][0] if isinstance(value[0], list | tuple) and value[0] else value[0]
    most = _FILES if isinstance(first, str | PurePath) else _ENTRIES
    text = "\n".join(_entry_text(value[place]) for place in _spread(count, most))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _entry_text(entry: Any) -> str:
    if isinstance(entry, torch.Tensor):
        entry = entry.detach().cpu().numpy() if entry.layout is torch.strided else None
    if isinstance(entry, np.ndarray | np.generic):
        if entry.dtype.hasobject:
            return ""
        return f"{entry.dtype} {entry.shape} {hashlib.sha256(np.ascontiguousarray(entry).tobytes()).hexdigest()}"
    if isinstance(entry, tuple | list):
        return " ".join(map(_entry_text, entry))
    if isinstance(entry, str | PurePath) and os.sep in str(entry):
        return f"{entry!r} {_file_text(entry)}"
    return repr(entry) if isinstance(entry, int | float | str | bytes | PurePath) else ""
