r"""One array as the bytes of an .npy file, and back, without pickle.

    6 bytes     \x93NUMPY
    2 bytes     version: 1.0, 2.0 or 3.0
    2 bytes     length of the header, little-endian (4 bytes from version 2.0 on)
    header      a Python dict as text: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
    the rest    the array's bytes

Only arrays of numbers are read: a structured dtype or one of objects is refused. The header is never evaluated.
https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

import numpy as np

_MAGIC = b"\x93NUMPY"
_ALIGNED = 64
_MOST_HEADER_NBYTES = 10_000
_DESCR = re.compile(r"""['"]descr['"]\s*:\s*['"]([<>|=]?[biufc?]\d*)['"]""")
_ORDER = re.compile(r"""['"]fortran_order['"]\s*:\s*(True|False)""")
_SHAPE = re.compile(r"""['"]shape['"]\s*:\s*\(([\d,\sL]*)\)""")


def packed(value: np.ndarray | np.generic) -> bytes:
    """Return the bytes of an .npy file that holds an array or a number.

    >>> unpacked(packed(np.arange(3)))
    array([0, 1, 2])
    """
    array = np.asarray(value)
    array = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
    return _header(array.dtype, array.shape) + array.tobytes()


@lru_cache(maxsize=1024)
def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    nbytes = len(_MAGIC) + 4 + len(text) + 1
    text += b" " * (-nbytes % _ALIGNED) + b"\n"
    return _MAGIC + b"\x01\x00" + len(text).to_bytes(2, "little") + text


def unpacked(data: bytes) -> np.ndarray:
    """Return the array that these bytes of an .npy file hold, in the machine's byte order.

    Raises:
        ValueError: they hold none, or not one of numbers.
    """
    if data[:6] != _MAGIC or len(data) < 10 or data[6] not in (1, 2, 3):
        raise ValueError(f"it is no .npy file: it begins with {data[:8]!r}")
    begin = 10 if data[6] == 1 else 12
    begins = begin + int.from_bytes(data[8:begin], "little")
    if not begin <= begins <= min(len(data), _MOST_HEADER_NBYTES):
        raise ValueError(f"the header of its .npy file is {begins - begin} bytes long, of {len(data)}")
    dtype, is_fortran, shape = _understood(data[begin:begins])
    nbytes = math.prod(shape) * dtype.itemsize
    if len(data) - begins != nbytes:
        raise ValueError(f"its .npy file holds {len(data) - begins} bytes; shape {shape} of {dtype} takes {nbytes}")
    try:
        array: np.ndarray = np.ndarray(shape, dtype, data, begins, order="F" if is_fortran else "C")
    except (ValueError, OverflowError) as error:  # no bytes, and yet a dimension that is too large
        raise ValueError(f"its .npy file has the shape {shape}: {error}") from error
    return array.astype(dtype.newbyteorder("="), order="C")


@lru_cache(maxsize=1024)
def _understood(header: bytes) -> tuple[np.dtype, bool, tuple[int, ...]]:
    text = header.decode("latin-1")
    descr, order, shape = _DESCR.search(text), _ORDER.search(text), _SHAPE.search(text)
    if descr is None or order is None or shape is None:
        raise ValueError(f"the header of its .npy file tells of no array of numbers: {text.strip()[:200]}")
    try:
        dtype = np.dtype(descr[1])
        sizes = tuple(int(size) for size in re.findall(r"\d+", shape[1]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the header of its .npy file cannot be understood: {text.strip()[:200]}") from error
    if len(sizes) > 32:
        raise ValueError(f"its .npy file has {len(sizes)} dimensions; 32 are the most")
    return dtype, order[1] == "True", sizes
