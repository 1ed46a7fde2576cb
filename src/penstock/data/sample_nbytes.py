"""How many bytes a sample's values take."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.data.schema import Sample

_OBJECT_NBYTES = 8
"""Of what has no size of its own: a number of Python's, a date, None."""


def nbytes_of(sample: Sample) -> int:
    """Return the bytes of a sample's values: elements of arrays, UTF-8 of text, all of them in lists and dicts.

    >>> nbytes_of({"x": np.zeros(3, np.float32), "t": "äb"}), nbytes_of({"turns": [{"role": "user"}, None]})
    (15, 16)
    """
    return sum(map(_nbytes, sample.values()))


def _nbytes(value: Any) -> int:
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.nbytes
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes | bytearray | memoryview):
        return len(value)
    if isinstance(value, dict):
        return sum(_nbytes(part) for pair in value.items() for part in pair)
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else _OBJECT_NBYTES
