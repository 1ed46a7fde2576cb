"""Where the records of a TFRecord file begin: found by reading their lengths, or read from FILE.idx beside it.

FILE.idx is the text that NVIDIA DALI's and the `tfrecord` package's tools write: for each record a line of the byte at
which it begins, a space, and its bytes with its frame (the length and the two checksums: 16 more than the data).
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable

import numpy as np

from penstock.core.errors import RecordError, SourceError
from penstock.data.formats.tfrecord.framing import FRAME_NBYTES, HEADER, too_short_message, zlib_hint

_BLOCK_NBYTES = 4096


def scan_offsets(path: str, checksum: Callable[[bytes], int] | None) -> np.ndarray:
    """Return where each record of a local file begins, and the end of the last one, int64[n + 1].

    Reads nothing but their headers, whose checksums it compares if it is given what makes them; not of a gzip file.

    Raises:
        RecordError: the file is truncated, or a length is corrupt.
        SourceError: it cannot be read.
    """
    begins = array("q", [0])
    try:
        with open(path, "rb", buffering=0) as file:
            total = os.fstat(file.fileno()).st_size
            block, begin, at = b"", 0, 0
            while at < total:
                if at + HEADER.size > begin + len(block):
                    block, begin = os.pread(file.fileno(), _BLOCK_NBYTES, at), at
                length = _length(path, block[at - begin : at - begin + HEADER.size], at, len(begins) - 1, checksum)
                if FRAME_NBYTES + length > total - at:
                    raise RecordError(path, at, len(begins) - 1, too_short_message(length, total - at))
                at += FRAME_NBYTES + length
                begins.append(at)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}") from error
    return np.frombuffer(begins, np.int64).copy()


def _length(path: str, header: bytes, at: int, number: int, checksum: Callable[[bytes], int] | None) -> int:
    if len(header) < HEADER.size:
        raise RecordError(path, at, number, f"its header has {len(header)} bytes of {HEADER.size}")
    length, masked = HEADER.unpack(header)
    if checksum is not None and checksum(header[:8]) != masked:
        hint = zlib_hint(length) or "; gzip packed the file, or it is broken"
        raise RecordError(path, at, number, f"the checksum of its length is wrong{hint}")
    return int(length)


def load(path: str) -> np.ndarray | None:
    """Return what `scan_offsets` does, from FILE.idx of a local file; None if it is missing or of another file."""
    name = path + ".idx"
    try:
        nbytes = os.stat(path).st_size
        if not os.path.exists(name) or os.stat(name).st_mtime_ns < os.stat(path).st_mtime_ns:
            return None
        lines = np.loadtxt(name, np.int64, ndmin=2) if os.stat(name).st_size else np.zeros((0, 2), np.int64)
    except (OSError, ValueError, OverflowError):
        return None
    if lines.shape[1:] != (2,) or (lines < 0).any() or (lines[:, 1] < FRAME_NBYTES).any():
        return None
    begins = np.append(lines[:, 0], nbytes)
    return begins if begins[0] == 0 and (np.diff(begins) == lines[:, 1]).all() else None
