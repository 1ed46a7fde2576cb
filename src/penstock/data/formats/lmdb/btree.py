"""The keys of an LMDB file and the places of their values, found without LMDB, whose C code crashes on corrupt files.

Integers are in the machine's byte order, as LMDB writes them; n is a page's number, and n × page size its first byte.

    page         uint64 n, uint16, uint16 flags, uint16 lower, uint16 upper; up to lower, uint16 places of nodes
    overflow     uint64 n, uint16, uint16 flags, uint32 pages; a value
    node         uint16 low, uint16 high, uint16 flags, uint16 bytes of the key; the key; then
                 in a branch    nothing: the child is page low | high << 16 | flags << 32
                 in a leaf      the value, of low | high << 16 bytes; or, by the flags, uint64 n of its overflow page
    page 0, 1    page; uint32 magic, uint32 version, uint64, uint64 map size; the tree of free pages; the tree of keys;
                 uint64 last page, uint64 transaction: the later one counts
    tree         uint32 page size (in that of free pages), uint16 flags, uint16 depth, uint64 branches, uint64 leaves,
                 uint64 overflow pages, uint64 entries, uint64 root

Each page is read once at the most, so that a file that points in circles is an error, and not an endless walk.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from penstock.core.errors import SourceError

PAGE = struct.Struct("=QHHHH")
OVERFLOW = 4

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BEGINNING = struct.Struct("=IIQQ")
_TREE = struct.Struct("=IHHQQQQQ")
_END = struct.Struct("=QQ")
_META_NBYTES = PAGE.size + _BEGINNING.size + 2 * _TREE.size + _END.size
_BRANCH, _LEAF = 1, 2
_ON_OVERFLOW, _SUBTREE, _SEVERAL = 1, 2, 4
_DUPLICATES = 4
_NO_ROOT = 2**64 - 1
_NODE_NBYTES = 8


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """The keys of a file, in order, and where their values lie."""

    path: str
    page_nbytes: int
    keys: bytes
    """One after another."""
    key_ends: np.ndarray
    places: np.ndarray
    """The bytes at which values begin."""
    sizes: np.ndarray
    """Their bytes."""

    def __len__(self) -> int:
        return len(self.sizes)

    def key(self, number: int) -> bytes:
        """Return a key."""
        return self.keys[int(self.key_ends[number - 1]) if number else 0 : int(self.key_ends[number])]


def read_index(path: str, database: str | None, without: Collection[bytes]) -> KeyIndex:
    """Return the index of a file: shorter keys first, and in the order of their bytes.

    Args:
        path: the file.
        database: the name of a database inside it; None for the file's own.
        without: keys that are left out.

    Raises:
        SourceError: it is no LMDB file, has no such database or several values for a key, or is damaged.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            return _Walk(path, file).index(database, without)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class _Leaf:
    """The nodes of one leaf page."""

    keys: list[bytes]
    places: np.ndarray
    sizes: np.ndarray
    flags: np.ndarray


class _Walk:
    def __init__(self, path: str, file: BinaryIO) -> None:
        self._path = path
        self._file = file.fileno()
        self._nbytes = os.fstat(self._file).st_size
        self._page_nbytes = 0

    def index(self, database: str | None, without: Collection[bytes]) -> KeyIndex:
        flags, root = self._newest_root()
        if database is not None:
            flags, root = self._database_root(root, database)
        if flags & _DUPLICATES:
            raise self._bad("it has several values for a key; which of them belong together, nobody knows here")
        keys: list[bytes] = []
        leaves = []
        for leaf in self._leaves(root):
            keep = np.array([key not in without for key in leaf.keys], bool)
            inner = keep & (leaf.flags & (_SUBTREE | _SEVERAL) != 0)
            if inner.any():
                names = [leaf.keys[number].decode("utf-8", "replace") for number in np.flatnonzero(inner)]
                raise self._bad(f"it holds databases ({', '.join(names)[:200]}); pass database=")
            keys += [key for key, is_kept in zip(leaf.keys, keep, strict=True) if is_kept]
            leaves.append((leaf.places[keep], leaf.sizes[keep]))
        lengths = np.fromiter(map(len, keys), np.int64, len(keys))
        order = np.argsort(lengths, kind="stable")
        places = np.concatenate([np.empty(0, np.int64), *(places for places, _ in leaves)])
        sizes = np.concatenate([np.empty(0, np.int64), *(sizes for _, sizes in leaves)])
        ordered = b"".join([keys[number] for number in order])
        return KeyIndex(self._path, self._page_nbytes, ordered, np.cumsum(lengths[order]), places[order], sizes[order])

    def _newest_root(self) -> tuple[int, int]:
        """Return flags and root of the tree of keys, as the last transaction left it."""
        found = []
        for at in (0, 1):
            raw = os.pread(self._file, _META_NBYTES, at * self._page_nbytes)
            if len(raw) < _META_NBYTES:
                raise self._bad(f"it has {self._nbytes} bytes, and lacks the two pages of metadata")
            magic, version, _, _ = _BEGINNING.unpack_from(raw, PAGE.size)
            if magic != _MAGIC:
                raise self._bad("it is no LMDB file of a machine with this byte order")
            if version != _VERSION:
                raise self._bad(f"its data have version {version}; version {_VERSION} (of LMDB 0.9) can be read")
            trees = PAGE.size + _BEGINNING.size
            page_nbytes, *_ = _TREE.unpack_from(raw, trees)
            _, flags, _, _, _, _, _, root = _TREE.unpack_from(raw, trees + _TREE.size)
            _, transaction = _END.unpack_from(raw, trees + 2 * _TREE.size)
            if page_nbytes not in (1 << bits for bits in range(9, 17)) or self._page_nbytes not in (0, page_nbytes):
                raise self._bad(f"its pages cannot have {page_nbytes} bytes")
            self._page_nbytes = page_nbytes
            found.append((transaction, flags, root))
        _, flags, root = max(found)
        return flags, root

    def _database_root(self, root: int, database: str) -> tuple[int, int]:
        names = []
        for leaf in self._leaves(root):
            for number, key in enumerate(leaf.keys):
                if leaf.flags[number] & _SUBTREE:
                    names.append(key.decode("utf-8", "replace"))
                    if names[-1] == database and leaf.sizes[number] == _TREE.size:
                        raw = os.pread(self._file, _TREE.size, int(leaf.places[number]))
                        _, flags, _, _, _, _, _, inner = _TREE.unpack(raw)
                        return flags, inner
        raise self._bad(f"it has no database {database!r}; it has {', '.join(names)[:200] or 'none'}")

    def _leaves(self, root: int) -> list[_Leaf]:
        seen = bytearray(self._nbytes // self._page_nbytes)
        waiting = [] if root == _NO_ROOT else [root]
        leaves = []
        while waiting:
            number = waiting.pop()
            if number >= len(seen) or seen[number]:
                raise self._bad(f"page {number} is outside of it, or comes twice: it is truncated or corrupt")
            seen[number] = 1
            page = os.pread(self._file, self._page_nbytes, number * self._page_nbytes)
            kind, nodes = self._nodes(page, number)
            if kind == _LEAF:
                leaves.append(self._leaf(page, number, nodes))
            else:
                low, high, flags, _ = _heads(page, nodes)
                children = low | high << 16 | flags << 32
                if (children >= len(seen)).any() or len(waiting) > len(seen):
                    raise self._bad(f"page {number} has children outside of it: it is truncated or corrupt")
                waiting += children[::-1].tolist()
        return leaves

    def _nodes(self, page: bytes, number: int) -> tuple[int, np.ndarray]:
        """Return a page's kind, and where its nodes begin."""
        if len(page) < self._page_nbytes:
            raise self._bad(f"page {number} is cut off")
        own, _, kind, lower, _ = PAGE.unpack_from(page)
        if own != number or kind not in (_BRANCH, _LEAF):
            raise self._bad(f"page {number} is number {own} with flags {kind}, and no part of a tree")
        if not PAGE.size <= lower <= self._page_nbytes or lower % 2:
            raise self._bad(f"page {number} has nodes up to byte {lower}")
        nodes = np.frombuffer(page, np.uint16, (lower - PAGE.size) // 2, PAGE.size).astype(np.int64)
        if ((nodes < lower) | (nodes > self._page_nbytes - _NODE_NBYTES)).any():
            raise self._bad(f"page {number} has nodes outside of it")
        return kind, nodes

    def _leaf(self, page: bytes, number: int, nodes: np.ndarray) -> _Leaf:
        low, high, flags, key_nbytes = _heads(page, nodes)
        sizes = low | high << 16
        begins = nodes + _NODE_NBYTES
        values = begins + key_nbytes
        elsewhere = flags & _ON_OVERFLOW != 0
        ends = values + np.where(elsewhere, 8, sizes)
        if (ends > self._page_nbytes).any():
            raise self._bad(f"page {number} has a node that does not end in it")
        places = values + number * self._page_nbytes
        if elsewhere.any():
            raw = np.frombuffer(page, np.uint8)[values[elsewhere][:, None] + np.arange(8)]
            pages = raw.view(np.uint64)[:, 0]
            if (pages >= 1 << 40).any():
                raise self._bad(f"page {number} has values outside of every file")
            places[elsewhere] = pages.astype(np.int64) * self._page_nbytes + PAGE.size
        keys = [page[begin:end] for begin, end in zip(begins.tolist(), values.tolist(), strict=True)]
        return _Leaf(keys, places, sizes, flags)

    def _bad(self, reason: str) -> SourceError:
        return SourceError(f"{self._path}: {reason}")


def _heads(page: bytes, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the four numbers that each node begins with."""
    raw = np.frombuffer(page, np.uint8)[nodes[:, None] + np.arange(_NODE_NBYTES)]
    low, high, flags, key_nbytes = raw.view(np.uint16).reshape(-1, 4).astype(np.int64).T
    return low, high, flags, key_nbytes
