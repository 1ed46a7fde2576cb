"""How many bytes a sample's values take."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.data.schema import Sample, plain


def nbytes_of(sample: Sample) -> int:
    """Return the bytes of a sample's values: elements of arrays, UTF-8 of text.

    Raises:
        SourceError: a field holds something that no field may hold.

    >>> nbytes_of({"x": np.zeros(3, np.float32), "t": "äb"})
    15
    """
    return sum(_nbytes(plain(value)) for value in sample.values())


def _nbytes(value: Any) -> int:
    if isinstance(value, np.ndarray | np.generic):
        return value.nbytes
    return len(value.encode("utf-8", "surrogatepass")) if isinstance(value, str) else len(value)
