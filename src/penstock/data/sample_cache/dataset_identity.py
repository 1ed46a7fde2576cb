"""Whose samples a file has: a digest of what can be seen of a dataset without making a sample.

    class, length; the code of its __getitem__ and of functions that it holds; entries of lists and arrays with one for
    each sample; the size and the time of the file that a source reads; the same of the datasets that it holds

A file that passes may still be another's: `SampleCache` compares samples, too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

_ENTRIES = 1024
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
    yield _file_text(getattr(dataset, "where", ""))
    yield _entries_text(dataset, len(dataset))
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
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


def _file_text(where: Any) -> str:
    try:
        status = os.stat(where)
    except (OSError, TypeError, ValueError):
        return str(where)
    return f"{os.path.basename(where)} {status.st_size} {status.st_mtime_ns}"


def _entries_text(value: Any, count: int) -> str:
    """Return some entries of what has one for each sample; an empty string if it has not, or they are no plain data."""
    if not isinstance(value, list | tuple | range | np.ndarray | torch.Tensor) or getattr(value, "ndim", 1) == 0:
        return ""
    if len(value) != count:
        return ""
    places = range(count) if count <= _ENTRIES else [(count - 1) * one // (_ENTRIES - 1) for one in range(_ENTRIES)]
    text = "\n".join(_entry_text(value[place]) for place in places)
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
    return repr(entry) if isinstance(entry, int | float | str | bytes | PurePath) else ""
