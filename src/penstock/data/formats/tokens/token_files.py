"""Token files: the integers of .npy and .bin files as one long row, and where documents lie in it.

    llm.c       a header of 256 int32: magic, version, number of tokens; then the tokens. fineweb's and nanogpt's, too
    Megatron    an .idx file beside: "MMIDIDX", 2 bytes of zeros; version 1 (u64); a code for the dtype (u8); the
                numbers of sequences (u64) and of places of documents (u64); the sequences' lengths (int32) and first
                bytes (int64); the first sequence of each document, and the number of sequences (int64). More may follow

Sources: karpathy/llm.c, dev/data/data_common.py; NVIDIA/Megatron-LM, core/datasets/indexed_dataset.py.

Tokens are read, not mapped: a file that becomes shorter while it is read is an error, and not the process's end.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.core.per_process import PerProcess
from penstock.data.formats.npy_header import NBYTES, is_npy, read_header, write_header
from penstock.data.rows import ConcatIndex
from penstock.data.storage.foreign_files import refuse_foreign
from penstock.data.storage.open_descriptors import OpenDescriptors
from penstock.data.storage.storage import Storage, is_remote

DTYPES = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
HEADER_NBYTES = len(write_header(np.dtype(np.uint16), (0,)))
"""Of the .npy files that are written: the same for any count."""

_PIECE = 1 << 22
_LLM_C_NBYTES = 1024
_LLM_C: dict[int, tuple[int, np.dtype[Any]]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
"""Version and dtype by magic: of GPT-2's tokens, and of Llama 3's."""
_MEGATRON = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""By code; 6 and 7 are floats."""


_Stated = tuple[int, np.dtype[Any], np.ndarray | None]
"""Where tokens begin, their dtype, and where documents lie, if that is known."""


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
        """Return the tokens of a file; `dtype` is that of bare integers.

        Raises:
            SourceError: it is none, is damaged, or nothing says what its integers are.
            OptionError: they are of another dtype.
        """
        local = storage.local(path)
        try:
            with open(local, "rb") as file:
                head, nbytes = file.read(NBYTES), os.fstat(file.fileno()).st_size
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error}") from error
        if is_npy(head):
            return cls(local, *_parse_npy_header(head, path))
        if path.lower().endswith(".npy"):
            raise SourceError(f"{path} is no file of NumPy's format; rename it to .bin if it holds bare integers")
        stated: _Stated | None = _parse_llm_c(head, path, nbytes)
        where = f"the header of {path}"
        if stated is None:
            refuse_foreign(path, head)
            where = _megatron_index(path, storage) or ""
            stated = (0, *_read_megatron(where, path, nbytes)) if where else None
        if stated is not None:
            start, own, bounds = stated
            if dtype not in (None, own.name):
                raise OptionError(f"dtype={dtype!r}, and {where} says {own.name}")
            return cls(local, start, own, ((nbytes - start) // own.itemsize,), bounds)
        if dtype is None:
            raise SourceError(_without_dtype(path, local))
        kind = np.dtype(dtype).newbyteorder("<")
        if nbytes % kind.itemsize:
            raise SourceError(
                f"{path} has {nbytes} bytes, which are no whole number of {kind.name}; pass another dtype="
            )
        return cls(local, 0, kind, (nbytes // kind.itemsize,))


def _without_dtype(path: str, local: str) -> str:
    if os.path.exists(os.path.join(os.path.dirname(local), "index.json")):
        return (
            f"{path} lies beside an index.json, as chunks of LitData do, which are not read here; read them by "
            "litdata, or pass dtype= if it holds bare integers"
        )
    return (
        f"{path} holds bare integers, and nothing says of which type; pass dtype= (vocabularies of up to 65536 "
        "tokens are mostly 'uint16', larger ones 'uint32' or 'int32')"
    )


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


def _parse_llm_c(head: bytes, path: str, nbytes: int) -> _Stated | None:
    """Return where the tokens of one of llm.c's files begin, and their dtype; None if it is none."""
    magic, version, count = struct.unpack_from("<iii", head) if nbytes >= _LLM_C_NBYTES else (0, 0, 0)
    if magic not in _LLM_C:
        return None
    known, dtype = _LLM_C[magic]
    if version != known:
        raise SourceError(f"{path} has version {version} of llm.c's header; {known} is known, for the magic {magic}")
    if _LLM_C_NBYTES + count * dtype.itemsize != nbytes:
        raise SourceError(
            f"{path} should have {count} tokens of {dtype.name}, as its header says, and has {nbytes - _LLM_C_NBYTES} "
            f"bytes of them: it is truncated, or something else"
        )
    return _LLM_C_NBYTES, dtype, None


def _megatron_index(path: str, storage: Storage) -> str | None:
    """Return the local path of the .idx file that lies beside a .bin file; None if there is none."""
    beside = path.removesuffix(".bin") + ".idx"
    if not is_remote(beside) and not os.path.exists(beside):
        return None
    try:
        return storage.local(beside)
    except SourceError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def _read_megatron(path: str, of: str, nbytes: int) -> tuple[np.dtype[Any], np.ndarray]:
    """Return the dtype of Megatron's tokens, and where their documents begin and the last one ends, in tokens."""
    with open(path, "rb") as file:
        head = file.read(_MEGATRON.size)
        if len(head) < _MEGATRON.size or not head.startswith(b"MMIDIDX\0\0"):
            raise SourceError(f"{path} lies beside {of}, and is no index of Megatron's: it does not begin with MMIDIDX")
        _, version, code, sequences, places = _MEGATRON.unpack(head)
        if version != 1 or code not in _MEGATRON_DTYPES:
            raise SourceError(
                f"{path} is of version {version}, of tokens of code {code}; integers of version 1 are read"
            )
        needed, there = _MEGATRON.size + 12 * sequences + 8 * places, os.fstat(file.fileno()).st_size
        if needed > there:
            raise SourceError(f"{path} is truncated: its {sequences} sequences take {needed} bytes, and it has {there}")
        sizes, starts, documents = (
            np.frombuffer(file.read(count * width), f"<i{width}").astype(np.int64)
            for count, width in ((sequences, 4), (sequences, 8), (places, 8))
        )
    dtype = _MEGATRON_DTYPES[code]
    bounds = np.append(0, np.cumsum(sizes))
    if sizes.min(initial=0) < 0 or not np.array_equal(starts, bounds[:-1] * dtype.itemsize):
        raise SourceError(f"{path}: its sequences do not lie one after another, which is not read")
    if bounds[-1] * dtype.itemsize != nbytes:
        raise SourceError(f"{path} is of {bounds[-1]} tokens of {dtype.name}, and {of} has {nbytes} bytes")
    if not places:
        return dtype, bounds
    if documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise SourceError(f"{path}: its documents do not go up from sequence 0 to {sequences}, the last one's end")
    return dtype, bounds[documents]


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
    return found if all(not is_remote(path) and os.path.exists(path) for path in found) else None


def index_path(path: str) -> str:
    """Return where the documents' places of a token file are.

    >>> index_path("data/train.bin")
    'data/train.idx.npy'
    """
    return re.sub(r"\.(npy|bin)$", "", path) + ".idx.npy"


def _read_bounds(path: str, of: TokenFile) -> np.ndarray:
    index = TokenFile.open(path, None, Storage())
    if len(index.shape) != 1 or index.count == 0:
        raise SourceError(f"{path} has the shape {index.shape}; it has to be a row of at least one place")
    bounds = np.fromfile(path, index.dtype, index.count, offset=index.start).astype(np.int64)
    if len(bounds) < index.count or bounds[0] != 0 or bounds[-1] != of.count or (np.diff(bounds) < 0).any():
        raise SourceError(f"{path} has to go up from 0 to the {of.count} tokens of {of.path}; it goes to {bounds[-1:]}")
    return bounds


def write_index(path: str, bounds: np.ndarray) -> None:
    """Write where the documents of a token file lie, beside it."""
    with open(index_path(path), "wb") as file:
        file.write(write_header(np.dtype(np.int64), (len(bounds),)) + bounds.astype("<i8").tobytes())
