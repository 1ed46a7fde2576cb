"""Token files: the integers of .npy and .bin files as one long row, and where documents lie in it.

Tokens are read, not mapped: a file that becomes shorter while it is read is an error, and not the process's end.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.core.per_process import PerProcess
from penstock.data.formats.npy_header import NBYTES, is_npy, read_header, write_header
from penstock.data.formats.tokens.foreign_headers import find_megatron_index, parse_llm_c, read_megatron_index
from penstock.data.rows import ConcatIndex
from penstock.data.storage.foreign_files import refuse_foreign
from penstock.data.storage.open_descriptors import OpenDescriptors
from penstock.data.storage.storage import Storage, is_remote

DTYPES = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
HEADER_NBYTES = len(write_header(np.dtype(np.uint16), (0,)))
"""Of the .npy files that are written: the same for any count."""

_PIECE = 1 << 22


@dataclass(frozen=True)
class TokenFile:
    """A token file: where its integers are."""

    path: str
    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    bounds: np.ndarray | None = None
    """Where its documents begin, and where the last one ends, if the file or its index knows."""

    def __post_init__(self) -> None:
        nbytes, needed = os.stat(self.path).st_size - self.start, self.count * self.dtype.itemsize
        if needed > nbytes:
            raise SourceError(
                f"{self.path} is truncated: {self.count} tokens of {self.dtype.name} take {needed} bytes, and it has "
                f"{nbytes}"
            )

    @cached_property
    def count(self) -> int:
        """Its tokens."""
        return math.prod(self.shape)

    @classmethod
    def open(cls, path: str, dtype: str | None, storage: Storage) -> TokenFile:
        """Return the tokens of a file.

        Args:
            path: of the file.
            dtype: of bare integers.
            storage: where it lies.

        Raises:
            SourceError: it is none, is damaged, or nothing says what its integers are.
            OptionError: they are of another dtype.
        """
        found = cls.probe(storage.local(path))
        if found is None:
            found = cls._without_header(path, dtype, storage)
        elif dtype not in (None, found.dtype.name) and path.lower().endswith(".bin"):
            raise OptionError(f"dtype={dtype!r}, and the header of {path} says {found.dtype.name}")
        return found

    @classmethod
    def _without_header(cls, path: str, dtype: str | None, storage: Storage) -> TokenFile:
        local = storage.local(path)
        nbytes = os.stat(local).st_size
        with open(local, "rb") as file:
            refuse_foreign(path, file.read(64))
        index = find_megatron_index(path, storage)
        if index is not None:
            kind, bounds = read_megatron_index(index, path, nbytes)
            if dtype not in (None, kind.name):
                raise OptionError(f"dtype={dtype!r}, and {index} says {kind.name}")
            return cls(local, 0, kind, (nbytes // kind.itemsize,), bounds)
        if dtype is None and not _is_ours(path, nbytes):
            if os.path.exists(os.path.join(os.path.dirname(local), "index.json")):
                raise SourceError(
                    f"{path} lies beside an index.json, as chunks of LitData do, which are not read here; read them by "
                    "litdata, or pass dtype= if it holds bare integers"
                )
            raise SourceError(
                f"{path} holds bare integers, and nothing says of which type; pass dtype= (vocabularies of up to 65536 "
                "tokens are mostly 'uint16', larger ones 'uint32' or 'int32')"
            )
        kind = np.dtype(dtype or "uint16").newbyteorder("<")
        if nbytes % kind.itemsize:
            raise SourceError(
                f"{path} has {nbytes} bytes, which are no whole number of {kind.name}; pass another dtype="
            )
        return cls(local, 0, kind, (nbytes // kind.itemsize,))

    @classmethod
    def probe(cls, path: str) -> TokenFile | None:
        """Read a local file's header; return None if it has none.

        Raises:
            SourceError: it cannot be read, is damaged, or holds no tokens.
        """
        try:
            with open(path, "rb") as file:
                head = file.read(NBYTES)
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error}") from error
        if is_npy(head):
            return cls(path, *_parse_npy_header(head, path))
        if path.lower().endswith(".npy"):
            raise SourceError(f"{path} is no file of NumPy's format; rename it to .bin if it holds bare integers")
        found = parse_llm_c(head, path, os.stat(path).st_size)
        return None if found is None else cls(path, found[0], found[1], (found[2],))


def _is_ours(path: str, nbytes: int) -> bool:
    """Return whether `TokenWriter` wrote a .bin file with its default dtype: its index counts 2 bytes for a token."""
    beside = index_path(path)
    if is_remote(beside) or not os.path.exists(beside):
        return False
    places = _read_places(beside)
    return len(places) > 0 and int(places[-1]) * 2 == nbytes


def _parse_npy_header(head: bytes, path: str) -> tuple[int, np.dtype[Any], tuple[int, ...]]:
    """Return where the data of a .npy file begin, their dtype and shape."""
    try:
        start, dtype, is_fortran, shape = read_header(head)
    except ValueError as error:
        raise SourceError(f"{path}: {error}") from error
    if dtype.kind not in "iu":
        raise SourceError(f"{path} holds {dtype.str}; tokens have to be integers")
    if len(shape) not in (1, 2) or (len(shape) == 2 and (is_fortran or shape[1] == 0)):
        raise SourceError(f"{path} has {len(shape)} dimensions; tokens have 1, or 2 in C order")
    return start, dtype, shape


class Tokens:
    """All tokens of some files, as one long row."""

    def __init__(self, files: list[TokenFile], as_dtype: str | None) -> None:
        self.files = files
        kinds = {file.dtype.newbyteorder("=") for file in files}
        self.dtype = np.dtype(as_dtype) if as_dtype else np.result_type(*kinds)
        if self.dtype.kind not in "iu":
            raise SourceError(
                f"no integer holds both {' and '.join(sorted(kind.name for kind in kinds))}; pass as_dtype="
            )
        too_wide = [kind.name for kind in kinds if not np.can_cast(kind, self.dtype)]
        if too_wide:
            raise OptionError(f"as_dtype={as_dtype!r} does not hold every {too_wide[0]}")
        self.where = files[0].path if len(files) == 1 else f"{files[0].path} and {len(files) - 1} more"
        self._parts = ConcatIndex(file.count for file in files)
        self._open = PerProcess(OpenDescriptors, OpenDescriptors.close)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def bounds(self) -> np.ndarray:
        """Where each file begins, and the number of all tokens."""
        return np.asarray(self._parts.starts, np.int64)

    def take(self, start: int, stop: int) -> np.ndarray:
        """Return a copy of tokens `start` to `stop`.

        Raises:
            RecordError: a file has become shorter.
        """
        number, _ = self._parts.locate(start)
        if number < len(self.files) and stop <= self._parts.starts[number + 1]:
            return self._read(number, start, stop).astype(self.dtype, copy=False)
        found = np.empty(max(0, stop - start), self.dtype)
        at = start
        while at < stop:
            end = min(stop, self._parts.starts[number + 1])
            found[at - start : end - start] = self._read(number, at, end)
            at, number = end, number + 1
        return found

    def close(self) -> None:
        """Close the files."""
        self._open.close()

    def ends_at(self, eos: int) -> np.ndarray:
        """Return where documents begin that end with the token `eos`, or where a file ends, and where the last ends."""
        pieces = ((at, self.take(at, min(at + _PIECE, len(self)))) for at in range(0, len(self), _PIECE))
        found = [np.flatnonzero(piece == eos) + at + 1 for at, piece in pieces]
        return np.unique(np.concatenate([self.bounds, *found]))

    def documents(self, beside: list[str] | None) -> np.ndarray | None:
        """Return where documents begin, and where the last one ends; None if that is unknown."""
        found = []
        before = 0
        for number, file in enumerate(self.files):
            if beside is not None:
                bounds = _read_bounds(beside[number], file)
            elif file.bounds is not None:
                bounds = file.bounds
            elif len(file.shape) == 2:
                bounds = np.arange(file.shape[0] + 1, dtype=np.int64) * file.shape[1]
            else:
                return None
            found.append((bounds if number == 0 else bounds[1:]) + before)
            before += file.count
        return np.concatenate(found)

    def _read(self, number: int, start: int, stop: int) -> np.ndarray:
        file = self.files[number]
        before = self._parts.starts[number]
        found = np.empty(stop - start, file.dtype)
        offset = file.start + (start - before) * file.dtype.itemsize
        try:
            there = self._open.get().read_into(file.path, offset, found.data) if found.nbytes else 0
        except SourceError as error:
            raise RecordError(file.path, offset, f"token {start}", str(error)) from error
        if there < found.nbytes:
            raise RecordError(file.path, offset, f"token {start}", "the file has become shorter since it was opened")
        return found


def find_document_indexes(
    files: list[str], documents: str | Sequence[str] | None, storage: Storage
) -> list[str] | None:
    """Return the files of documents' places; None without."""
    if documents is not None:
        named = [documents] if isinstance(documents, str) else list(documents)
        if len(named) != len(files):
            raise OptionError(f"{len(files)} token files need as many files of documents, not {len(named)}")
        return [storage.local(path) for path in named]
    found = [index_path(path) for path in files]
    if all(not is_remote(path) and os.path.exists(path) for path in found):
        return found
    return None


def index_path(path: str) -> str:
    """Return where the documents' places of a token file are.

    >>> index_path("data/train.bin")
    'data/train.idx.npy'
    """
    return re.sub(r"\.(npy|bin)$", "", path) + ".idx.npy"


def _read_places(path: str) -> np.ndarray:
    index = TokenFile.probe(path)
    if index is None or len(index.shape) != 1 or index.count == 0:
        shape = None if index is None else index.shape
        raise SourceError(f"{path} has the shape {shape}; it has to be a row of at least one place, in NumPy's format")
    bounds = np.fromfile(path, index.dtype, index.count, offset=index.start).astype(np.int64)
    if len(bounds) < index.count:
        raise SourceError(f"{path} has become shorter")
    return bounds


def _read_bounds(path: str, of: TokenFile) -> np.ndarray:
    bounds = _read_places(path)
    if bounds[0] != 0 or bounds[-1] != of.count or (np.diff(bounds) < 0).any():
        raise SourceError(f"{path} has to go up from 0 to the {of.count} tokens of {of.path}; it goes to {bounds[-1]}")
    return bounds


def write_index(path: str, bounds: np.ndarray) -> None:
    """Write where the documents of a token file lie, beside it."""
    with open(index_path(path), "wb") as file:
        file.write(write_header(np.dtype(np.int64), (len(bounds),)) + bounds.astype("<i8").tobytes())
