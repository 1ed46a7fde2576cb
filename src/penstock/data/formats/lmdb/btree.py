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

Opening a large file reads the newest root, and looks for the few keys that are no samples: `KeyTree`. The keys of all
leaves are found when the first sample is read, many pages at a time: `KeyTree.index`. Each page is read once at most,
so that a file that points in circles is an error, and not an endless walk.
"""

from __future__ import annotations

import itertools
import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.concat_ranges import concat_ranges

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
_OTHER_ORDERS = 2 | 8
"""Keys are compared from their ends, or as integers."""
_FEW_LEAVES = 64
"""Of a tree that is read when it is opened."""
_TOGETHER = 1024
"""Pages that are read together."""
_DEEPEST = 64


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """The keys of a file, in order, and where their values lie."""

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

    def take_keys(self, numbers: np.ndarray) -> list[bytes]:
        """Return several keys."""
        begins, ends = np.where(numbers, self.key_ends[numbers - 1], 0).tolist(), self.key_ends[numbers].tolist()
        return [self.keys[begin:end] for begin, end in zip(begins, ends, strict=True)]


class KeyTree:
    """The tree of a file's keys; see the module.

    Args:
        path: the file.
        database: the name of a database inside it; None for the file's own.
        without: keys that are left out.

    Raises:
        SourceError: it is no LMDB file, has no such database or several values for a key, or is damaged.
    """

    def __init__(self, path: str, database: str | None, without: Collection[bytes]) -> None:
        self.path = path
        self._without = frozenset(without)
        self._index: KeyIndex | None = None
        with _opened(path) as pages:
            tree = pages.newest_tree()
            if database is not None:
                tree = _named_tree(pages, tree, database)
            self._tree, self._page_nbytes = tree, pages.page_nbytes
            if tree.flags & _DUPLICATES:
                raise pages.bad("it has several values for a key; which of them belong together, nobody knows here")
            is_in_order = not tree.flags & _OTHER_ORDERS
            if tree.leaves > _FEW_LEAVES and is_in_order:
                known: dict[int, _Nodes] = {}
                there = sum(_find(pages, tree.root, key, known) is not None for key in self._without)
                self.count = tree.entries - there
                return
        self.count = len(self.index())

    def index(self) -> KeyIndex:
        """Return the index: shorter keys first, and in the order of their bytes.

        Raises:
            SourceError: the file is damaged, or holds databases.
        """
        if self._index is None:  # two threads may both read it: a lock would have to cross forks
            with _opened(self.path, self._page_nbytes) as pages:
                self._index = _key_index(pages, self._tree, self._without)
        return self._index


@contextmanager
def _opened(path: str, page_nbytes: int = 0) -> Iterator[_Pages]:
    try:
        with open(path, "rb", buffering=0) as file:
            yield _Pages(path, file.fileno(), page_nbytes)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class _Tree:
    flags: int
    leaves: int
    entries: int
    root: int


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The nodes of some pages, one after another."""

    is_leaf: bool
    low: np.ndarray
    high: np.ndarray
    flags: np.ndarray
    keys: np.ndarray
    """The keys' bytes, one after another."""
    key_sizes: np.ndarray
    places: np.ndarray
    """Where a leaf's values begin."""

    def list_keys(self) -> list[bytes]:
        """Return the keys."""
        data, ends = self.keys.tobytes(), np.cumsum(self.key_sizes).tolist()
        return [data[begin:end] for begin, end in itertools.pairwise([0, *ends])]


class _Pages:
    """Reads pages of a file."""

    def __init__(self, path: str, file: int, page_nbytes: int) -> None:
        self._path = path
        self._file = file
        self._nbytes = os.fstat(file).st_size
        self.page_nbytes = page_nbytes
        """0 until the metadata were read."""

    def newest_tree(self) -> _Tree:
        """Return the tree of keys, as the last transaction left it."""
        found = []
        for at in (0, 1):
            raw = os.pread(self._file, _META_NBYTES, at * self.page_nbytes)
            if len(raw) < _META_NBYTES:
                raise self.bad(f"it has {self._nbytes} bytes, and lacks the two pages of metadata")
            magic, version, _, _ = _BEGINNING.unpack_from(raw, PAGE.size)
            if magic != _MAGIC:
                raise self.bad("it is no LMDB file of a machine with this byte order")
            if version != _VERSION:
                raise self.bad(f"its data have version {version}; version {_VERSION} (of LMDB 0.9) can be read")
            trees = PAGE.size + _BEGINNING.size
            page_nbytes, *_ = _TREE.unpack_from(raw, trees)
            _, transaction = _END.unpack_from(raw, trees + 2 * _TREE.size)
            if page_nbytes not in (1 << bits for bits in range(9, 17)) or self.page_nbytes not in (0, page_nbytes):
                raise self.bad(f"its pages cannot have {page_nbytes} bytes")
            self.page_nbytes = page_nbytes
            found.append((transaction, at, raw[trees + _TREE.size :][: _TREE.size]))
        return self._tree(max(found)[2])

    @property
    def count(self) -> int:
        """How many there are."""
        return self._nbytes // self.page_nbytes

    def tree_at(self, place: int) -> _Tree:
        """Return the tree of a database inside the file."""
        return self._tree(os.pread(self._file, _TREE.size, place))

    def _tree(self, raw: bytes) -> _Tree:
        _, flags, _, _, leaves, _, entries, root = _TREE.unpack(raw)
        if entries > self._nbytes:
            raise self.bad(f"it states {entries} entries, and has {self._nbytes} bytes")
        return _Tree(flags, leaves, entries, root)

    def leaves(self, root: int) -> Iterator[_Nodes]:
        """Yield the nodes of all leaves, in the order of their keys."""
        seen = np.zeros(self.count, bool)
        level = np.array([root] if root != _NO_ROOT else [], np.uint64)
        while len(level):
            if (level >= self.count).any():
                raise self.bad(f"page {int(level.max())} is outside of it: it is truncated or corrupt")
            numbers = level.astype(np.int64)
            if seen[numbers].any() or len(np.unique(numbers)) < len(numbers):
                raise self.bad("a page comes twice: it is corrupt")
            seen[numbers] = True
            below: list[np.ndarray] = []
            for at in range(0, len(numbers), _TOGETHER):
                nodes = self.read(numbers[at : at + _TOGETHER])
                if nodes.is_leaf and not below:
                    yield nodes
                elif nodes.is_leaf or (at and not below):
                    raise self.bad("its pages are no tree: it is corrupt")
                else:
                    below.append(nodes.low | nodes.high << 16 | nodes.flags << 32)
            level = np.concatenate([np.empty(0, np.int64), *below]).astype(np.uint64)

    def read(self, numbers: np.ndarray) -> _Nodes:
        """Return the nodes of pages that are all leaves, or all branches."""
        size = self.page_nbytes
        data = np.empty((len(numbers), size), np.uint8)
        cuts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
        for begin, end in itertools.pairwise(cuts):
            if os.preadv(self._file, [data[begin:end].data], int(numbers[begin]) * size) < (end - begin) * size:
                raise self.bad(f"pages {numbers[begin]} to {numbers[end - 1]} are cut off")
        heads = data[:, : PAGE.size].copy()
        own, kinds = heads.view(np.uint64)[:, 0], heads.view(np.uint16)[:, 5]
        lowers = heads.view(np.uint16)[:, 6].astype(np.int64)
        kind = int(kinds[0])
        if (own != numbers.astype(np.uint64)).any() or kind not in (_BRANCH, _LEAF) or (kinds != kind).any():
            raise self.bad(
                f"pages {numbers[0]} to {numbers[-1]} have other numbers or flags, and are no part of a tree"
            )
        if (lowers < PAGE.size).any() or (lowers > size).any() or (lowers % 2).any():
            raise self.bad(f"pages {numbers[0]} to {numbers[-1]} have nodes outside of them")
        counts = (lowers - PAGE.size) // 2
        table = data[:, PAGE.size : PAGE.size + 2 * int(counts.max())].copy().view(np.uint16)
        nodes = table[np.arange(table.shape[1]) < counts[:, None]].astype(np.int64)
        rows = np.repeat(np.arange(len(numbers)), counts)
        if ((nodes < lowers[rows]) | (nodes > size - _NODE_NBYTES)).any():
            raise self.bad(f"pages {numbers[0]} to {numbers[-1]} have nodes outside of them")
        flat, starts = data.reshape(-1), rows * size + nodes
        low, high, flags, key_sizes = flat[starts[:, None] + np.arange(_NODE_NBYTES)].view(np.uint16).astype(np.int64).T
        if (nodes + _NODE_NBYTES + key_sizes > size).any():
            raise self.bad(f"pages {numbers[0]} to {numbers[-1]} have keys that do not end in them")
        keys = flat[concat_ranges(starts + _NODE_NBYTES, key_sizes)]
        places = starts[:0]
        if kind == _LEAF:
            values = nodes + _NODE_NBYTES + key_sizes
            elsewhere = flags & _ON_OVERFLOW != 0
            if (values + np.where(elsewhere, 8, low | high << 16) > size).any():
                raise self.bad(f"pages {numbers[0]} to {numbers[-1]} have a node that does not end in them")
            places = numbers[rows] * size + values
            pages = flat[(rows * size + values)[elsewhere][:, None] + np.arange(8)].view(np.uint64)[:, 0]
            if (pages >= 1 << 40).any():
                raise self.bad(f"pages {numbers[0]} to {numbers[-1]} have values outside of every file")
            places[elsewhere] = pages.astype(np.int64) * size + PAGE.size
        return _Nodes(kind == _LEAF, low, high, flags, keys, key_sizes, places)

    def bad(self, reason: str) -> SourceError:
        """Return the error for a reason."""
        return SourceError(f"{self._path}: {reason}")


def _find(pages: _Pages, root: int, key: bytes, known: dict[int, _Nodes]) -> tuple[_Nodes, int] | None:
    """Return the leaf of a key, and its place there, or None; `known` are pages that were read before."""
    number = root
    for _ in range(_DEEPEST):
        if number >= pages.count:
            raise pages.bad(f"page {number} is outside of it: it is truncated or corrupt")
        nodes = known.get(number) or pages.read(np.array([number], np.int64))
        known[number] = nodes
        keys = nodes.list_keys()
        if nodes.is_leaf:
            at = bisect_left(keys, key)
            return (nodes, at) if at < len(keys) and keys[at] == key else None
        if not keys:
            break
        at = max(0, bisect_right(keys, key, lo=1) - 1)  # the first has no key: it is below all others
        number = int(nodes.low[at] | nodes.high[at] << 16 | nodes.flags[at] << 32)
    raise pages.bad("its branches do not end: it is corrupt")


def _named_tree(pages: _Pages, tree: _Tree, database: str) -> _Tree:
    found = None if tree.root == _NO_ROOT else _find(pages, tree.root, database.encode(), {})
    if found is not None:
        nodes, at = found
        if nodes.flags[at] & _SUBTREE and nodes.low[at] | nodes.high[at] << 16 == _TREE.size:
            return pages.tree_at(int(nodes.places[at]))
    names = [
        key.decode("utf-8", "replace")
        for nodes in pages.leaves(tree.root)
        for key, flags in zip(nodes.list_keys(), nodes.flags.tolist(), strict=True)
        if flags & _SUBTREE
    ]
    raise pages.bad(f"it has no database {database!r}; it has {', '.join(names)[:200] or 'none'}")


def _key_index(pages: _Pages, tree: _Tree, without: frozenset[bytes]) -> KeyIndex:
    parts: list[tuple[np.ndarray, ...]] = [(np.empty(0, np.uint8), *[np.empty(0, np.int64)] * 3)]
    found, lengths = 0, np.array(sorted({len(key) for key in without}), np.int64)
    for nodes in pages.leaves(tree.root):
        keep = np.ones(len(nodes.low), bool)
        inner = nodes.flags & (_SUBTREE | _SEVERAL) != 0
        maybe = np.flatnonzero(np.isin(nodes.key_sizes, lengths) | inner)
        starts = np.cumsum(nodes.key_sizes) - nodes.key_sizes
        first = nodes.keys[np.minimum(starts[maybe], len(nodes.keys) - 1)] if len(nodes.keys) else maybe[:0]
        maybe = maybe[np.isin(first, [key[0] for key in without]) | inner[maybe]]
        names = [nodes.keys[starts[at] : starts[at] + nodes.key_sizes[at]].tobytes() for at in maybe.tolist()]
        keep[[at for at, name in zip(maybe.tolist(), names, strict=True) if name in without]] = False
        if (inner & keep).any():
            shown = ", ".join(name.decode("utf-8", "replace") for name in names if name not in without)
            raise pages.bad(f"it holds databases ({shown[:200]}); pass database=")
        sizes = nodes.key_sizes[keep]
        keys = nodes.keys[concat_ranges(starts[keep], sizes)]
        parts.append((keys, sizes, nodes.places[keep], (nodes.low | nodes.high << 16)[keep]))
        found += len(nodes.low)
    if found != tree.entries:
        raise pages.bad(f"it states {tree.entries} entries, and has {found}")
    keys, sizes, places, value_sizes = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(sizes, kind="stable")
    ordered = keys[concat_ranges((np.cumsum(sizes) - sizes)[order], sizes[order])].tobytes()
    return KeyIndex(pages.page_nbytes, ordered, np.cumsum(sizes[order]), places[order], value_sizes[order])
