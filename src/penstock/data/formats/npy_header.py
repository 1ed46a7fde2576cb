"""Headers of NumPy's .npy format, read and written by `numpy.lib.format`: token files, and members of tar archives."""

from __future__ import annotations

import io
import tokenize
from functools import lru_cache

import numpy as np

NBYTES = 10_000
"""The most that are read of one."""

_BROKEN = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    Warning,
    tokenize.TokenError,
)
"""What NumPy raises for broken headers, which are Python's words; also warnings, if they are errors."""
_MAGIC = b"\x93NUMPY"


def is_npy(data: bytes) -> bool:
    """Return whether a file begins as those of the format do."""
    return data.startswith(_MAGIC)


@lru_cache(maxsize=1024)
def read_header(head: bytes) -> tuple[int, np.dtype, bool, tuple[int, ...]]:
    """Return where an array's data begin, its dtype, whether it is in Fortran's order, and its shape.

    Args:
        head: the first `NBYTES` bytes of a file, or as many as the header has.

    Raises:
        ValueError: they are no header, or that of structs or objects.

    >>> read_header(write_header(np.dtype("<i4"), (3, 2)))
    (128, dtype('int32'), False, (3, 2))
    """
    file = io.BytesIO(head[:NBYTES])
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"version {version}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(file, max_header_size=NBYTES)
        if min(shape, default=0) < 0 or len(shape) > 32:
            raise ValueError(f"the shape {str(shape)[:80]}")
    except _BROKEN as error:
        raise ValueError(f"the header of its .npy file cannot be understood: {str(error)[:200]}") from error
    if dtype.kind not in "biufc" or dtype.shape:
        raise ValueError(f"its .npy file holds {str(dtype)[:80]}, and no array of numbers")
    return file.tell(), dtype, is_fortran, shape


@lru_cache(maxsize=1024)
def write_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the header of an array in C order, little-endian: of 128 bytes for a row, whatever its length.

    >>> len(write_header(np.dtype(np.uint16), (7,))), len(write_header(np.dtype(np.int64), (1 << 60,)))
    (128, 128)
    """
    file = io.BytesIO()
    words = {"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, words)
    return file.getvalue()
