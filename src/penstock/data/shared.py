"""`shared`: lists, dicts, arrays and tables in one shared segment, so that workers do not copy what they only read.

Reading a Python object writes to its reference count, so a forked worker ends up with its own copy of every page of a
dataset's lists (pytorch#13246). Here they are bytes, and an object is made each time one is read.

Layout of a segment, all parts on multiples of 8 bytes:

    numbers    int64 or float64, one for each item: lists that hold only int (which fit), or only float
    text       int64 where each item ends, one more than there are; all items as UTF-8: lists that hold only str
    objects    the same, the items pickled one by one
    nested     what is large within a list or dict is a segment of its own: see `_is_large`
    dict       its keys and its values as two lists; hashes of the keys, sorted, and which key each is of
    array      its elements in C order
"""

from __future__ import annotations

import operator
import pickle
import sys
import zlib
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from numbers import Number
from typing import Any, TypeVar, cast, overload

import numpy as np

from penstock.core.errors import OptionError, UnpicklableError
from penstock.core.shared_bytes import SharedBytes
from penstock.core.units import size_text

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)

_CHUNK_NBYTES = 16 << 20
"""Bytes that are collected before they go to the segment's size: each chunk is freed when it has been copied."""

_SHOWN = 3
_LARGE, _LARGE_NBYTES = 1000, 1 << 20
_MOST_NESTED = 32
"""Containers within one that are shared themselves, as each takes a descriptor, a dict four."""


@overload
def shared(data: list[_Item] | tuple[_Item, ...]) -> SharedList[_Item]: ...
@overload
def shared(data: dict[_Key, _Item]) -> SharedDict[_Key, _Item]: ...
@overload
def shared(data: np.ndarray) -> SharedArray: ...
@overload
def shared(data: Any) -> Any: ...
def shared(data: Any) -> Any:
    """Return a read-only container with the same content, in memory that all workers share.

    A forked worker that reads Python objects copies them, page by page, and a spawned one gets a pickle of them all.
    What this returns is neither copied nor pickled: a pickle only says where it is, for processes of this machine and
    as long as this one has it. The memory is freed when the last process that has it ends, also by `kill -9`. It takes
    one descriptor, and may be read by many threads.

    Args:
        data: one of

            - a list or tuple: a Sequence with the same items, each unpickled when it is read (a changed item does not
              change the container; what two items shared, each has for itself). A slice is a view. Of the first 32
              items that are lists, tuples or dicts of 1 000 entries, or arrays of 1 MiB, and more, each is shared
              itself: read-only, and a look-up in it makes its entry alone.
            - a dict: a Mapping, likewise. Keys are text, bytes, numbers, None, or tuples of these.
            - a NumPy array without Python objects: a read-only array. Entries and slices are plain arrays. As with a
              memory map of a file, C code that writes to it ends the process (SIGSEGV): `torch.from_numpy` of it warns
              of that, and its `clone()` may be written.
            - a pandas DataFrame without Python objects: a DataFrame in memory that is read-only. Columns that pandas
              puts in the place of others are the process's own, and spawned workers get copies. Text has to be of a
              dtype of Arrow's (pandas 3 does that where pyarrow is installed).

    Raises:
        OptionError: `data` is nothing of this kind.
        UnpicklableError: an item cannot be pickled; it is named.
        TransportError: there is no shared memory for it; also when it is unpickled and is no longer there.

    >>> import penstock
    >>> paths = penstock.shared([("a.jpg", 3), ("b.jpg", 5)])
    >>> paths[-1], len(paths), paths == [("a.jpg", 3), ("b.jpg", 5)]
    (('b.jpg', 5), 2, True)
    >>> penstock.shared({"cat": 0, "dog": 1})["dog"]
    1
    """
    if isinstance(data, SharedList | SharedDict | SharedArray):
        return data
    if isinstance(data, list | tuple):
        return SharedList.of(data, lambda place: f"item {place}")
    if isinstance(data, dict):
        return SharedDict.of(data)
    if type(data) in (np.ndarray, np.memmap):
        return SharedArray.of(data)
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(data, pandas.DataFrame):
        from penstock.data.shared_frame import share_frame

        return share_frame(data)
    raise OptionError(
        f"penstock.shared takes a list, tuple, dict, NumPy array or pandas DataFrame, not {type(data).__qualname__}; "
        "a tensor is shared by its share_memory_(), a set becomes dict.fromkeys(...), and much else a list"
    )


# ── lists ───────────────────────────────────────────────────────────────────────────────────────────────────


class SharedList(Sequence[_Item]):
    """Items of a list in shared memory; `shared` makes it.

    Args:
        parts: the segment.
        kind: of the layout: "q" or "d" (numbers), "text" or "objects".
        count: items in the segment.
        places: which of them, in order.
        nested: items that are shared themselves, by their places in the segment.
    """

    def __init__(
        self, parts: SharedBytes, kind: str, count: int, places: range, nested: Mapping[int, Any] | None = None
    ) -> None:
        self._parts = parts
        self._kind = kind
        self._count = count
        self._places = places
        self._nested = nested or {}
        read = _reader(parts.memory, kind, count)
        self._read = read if not nested else lambda place: nested[place] if place in nested else read(place)

    @classmethod
    def of(cls, items: Sequence[_Item], name: Callable[[int], str]) -> SharedList[_Item]:
        """Return a shared copy.

        Args:
            items: of which one is kept after the other.
            name: what an error calls the item at a place.
        """
        kind, numbers = _numbers_of(items)
        nested = {} if kind != "objects" else _nested_of(items)
        if nested:
            items = [cast("_Item", None) if place in nested else item for place, item in enumerate(items)]
        if numbers is not None:
            parts = SharedBytes(8 * len(items))
            parts.memory[:] = memoryview(numbers).cast("B")
        else:
            parts = _ragged(items, kind, name)
        parts.protect()
        return cls(parts, kind, len(items), range(len(items)), nested)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> _Item: ...
    @overload
    def __getitem__(self, index: slice) -> SharedList[_Item]: ...
    def __getitem__(self, index: Any) -> Any:
        try:
            place = self._places[index]
        except IndexError:
            raise IndexError(f"item {index} of a shared list of {len(self)}") from None
        return (
            SharedList(self._parts, self._kind, self._count, place, self._nested)
            if isinstance(index, slice)
            else self._read(place)
        )

    def __iter__(self) -> Iterator[_Item]:
        return map(self._read, self._places)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | tuple | SharedList):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return _shown(self, map(repr, self), "[]", self._parts)

    def __reduce__(self) -> Any:
        return SharedList, (self._parts, self._kind, self._count, self._places, self._nested)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedList[_Item]:
        return self


def _nested_of(items: Sequence[Any]) -> dict[int, Any]:
    """Return shared copies of the first items that are large, by their places."""
    nested: dict[int, Any] = {}
    for place in islice((place for place, item in enumerate(items) if _is_large(item)), _MOST_NESTED):
        with suppress(OptionError):  # a dict with other keys is pickled
            nested[place] = shared(items[place])
    return nested


def _is_large(item: Any) -> bool:
    if type(item) is np.ndarray:
        return item.nbytes >= _LARGE_NBYTES and not item.dtype.hasobject
    return type(item) in (list, tuple, dict) and len(item) >= _LARGE


def _numbers_of(items: Sequence[Any]) -> tuple[str, array[Any] | None]:
    """Return the kind of layout for these items, and the items themselves where they are numbers."""
    types = set(map(type, items))
    try:
        if types == {int}:
            return "q", array("q", items)
        if types == {float}:
            return "d", array("d", items)
    except OverflowError:  # an int that does not fit
        return "objects", None
    return "text" if types == {str} else "objects", None


def _reader(memory: memoryview, kind: str, count: int) -> Callable[[int], Any]:
    if kind in ("q", "d"):
        return memory.cast(kind).__getitem__  # type: ignore[call-overload, no-any-return]
    starts = memory[: 8 * (count + 1)].cast("q")
    content = memory[8 * (count + 1) :]
    if kind == "text":
        return lambda place: str(content[starts[place] : starts[place + 1]], "utf-8", "surrogatepass")
    loads = pickle.loads
    return lambda place: loads(content[starts[place] : starts[place + 1]])


def _ragged(items: Sequence[Any], kind: str, name: Callable[[int], str]) -> SharedBytes:
    starts = np.zeros(len(items) + 1, np.int64)
    chunks = deque([bytearray()])
    for place, item in enumerate(items):
        try:
            content = item.encode("utf-8", "surrogatepass") if kind == "text" else pickle.dumps(item, 5)
        except Exception as error:
            raise UnpicklableError(
                f"{name(place)} ({type(item).__qualname__}) cannot be pickled, and penstock.shared keeps what it holds "
                f"as bytes: {error}; keep out of it what belongs to one process (open files, locks, lambdas)"
            ) from error
        starts[place + 1] = len(content)
        if len(chunks[-1]) + len(content) > _CHUNK_NBYTES:
            chunks.append(bytearray())
        chunks[-1] += content
    np.cumsum(starts, out=starts)
    parts = SharedBytes(starts.nbytes + int(starts[-1]))
    at = starts.nbytes
    parts.memory[:at] = starts.data.cast("B")
    while chunks:
        chunk = chunks.popleft()
        parts.memory[at : at + len(chunk)] = chunk
        at += len(chunk)
    return parts


def _shown(container: Any, entries: Iterator[str], brackets: str, parts: SharedBytes) -> str:
    some = [*islice(entries, _SHOWN), *(["..."] if len(container) > _SHOWN else [])]
    content = f"{brackets[0]}{', '.join(some)}{brackets[1]}"
    return f"<{type(container).__name__} of {len(container)}, in {size_text(len(parts.memory))}: {content}>"


# ── dicts ───────────────────────────────────────────────────────────────────────────────────────────────────


class SharedDict(Mapping[_Key, _Item]):
    """Entries of a dict in shared memory, in its order; `shared` makes it.

    Args:
        names: its keys.
        entries: their values.
        index: the hash of each key, sorted, and then which key has it.
    """

    def __init__(self, names: SharedList[_Key], entries: SharedList[_Item], index: SharedBytes) -> None:
        self._names = names
        self._entries = entries
        self._index = index
        numbers = index.memory.cast("q")
        self._hashes, self._order = numbers[: len(names)], numbers[len(names) :]

    @classmethod
    def of(cls, data: dict[_Key, _Item]) -> SharedDict[_Key, _Item]:
        """Return a shared copy."""
        names, found = [*data], np.empty(len(data), np.int64)
        for place, key in enumerate(names):
            try:
                found[place] = _hash_in_any_process(key)
            except TypeError as error:
                raise OptionError(
                    f"penstock.shared cannot find the key {key!r} again in another process: {error}; use keys that are "
                    "text, bytes, numbers, None, or tuples of these"
                ) from None
        order = np.argsort(found, kind="stable")
        index = SharedBytes(2 * found.nbytes)
        np.frombuffer(index.memory, np.int64)[:] = np.concatenate([found[order], order])
        index.protect()
        entries = SharedList.of([*data.values()], lambda place: f"the value of {names[place]!r}")
        return cls(SharedList.of(names, lambda place: f"the key {names[place]!r}"), entries, index)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, key: _Key) -> _Item:
        return self._entries[self._place(key)]

    def _place(self, key: Any) -> int:
        hash(key)  # what cannot be hashed raises here what a dict raises
        try:
            wanted = _hash_in_any_process(key)
        except TypeError:
            raise KeyError(key) from None
        at = bisect_left(self._hashes, wanted)
        while at < len(self._hashes) and self._hashes[at] == wanted:
            place = self._order[at]
            if self._names[place] == key:
                return place
            at += 1
        raise KeyError(key)

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._names)

    def __repr__(self) -> str:
        entries = (f"{key!r}: {value!r}" for key, value in zip(self._names, self._entries, strict=True))
        return _shown(self, entries, "{}", self._entries._parts)

    def __reduce__(self) -> Any:
        return SharedDict, (self._names, self._entries, self._index)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedDict[_Key, _Item]:
        return self


def _hash_in_any_process(key: Any) -> int:
    """Return the same number for equal keys, in every process: Python's own hash of text differs between them.

    Raises:
        TypeError: it is not known how its equality works.

    >>> _hash_in_any_process(1) == _hash_in_any_process(1.0), _hash_in_any_process(("a", None))
    (True, 3158260905562333828)
    """
    if isinstance(key, str):
        key = key.encode("utf-8", "surrogatepass")
    if key is None:
        return 0
    if isinstance(key, Number):
        if key != key:
            raise TypeError("it is not equal to itself")
        return hash(key)
    if isinstance(key, bytes):
        return zlib.crc32(key) | (len(key) & 0x7FFFFFFF) << 32
    if type(key) is tuple:
        return hash(tuple(map(_hash_in_any_process, key)))
    raise TypeError(f"a {type(key).__qualname__} may have another hash there")


# ── arrays ──────────────────────────────────────────────────────────────────────────────────────────────────


class SharedArray(np.ndarray):
    """A read-only array in shared memory; `shared` makes it. What is taken of it or computed is a plain array."""

    _parts: SharedBytes | None = None
    """Of the array that `shared` has made; views of it have none, and are pickled as arrays are."""

    @classmethod
    def of(cls, data: np.ndarray) -> SharedArray:
        """Return a shared copy.

        Raises:
            OptionError: its elements are Python objects.
        """
        if data.dtype.hasobject:
            raise OptionError(
                f"an array of dtype {data.dtype} holds Python objects, which are not in its memory; share the list: "
                "penstock.shared(array.tolist())"
            )
        parts = SharedBytes(data.nbytes)
        np.ndarray(data.shape, data.dtype, parts.memory)[...] = data
        parts.protect()
        return _mapped(parts, data.shape, data.dtype)

    def __getitem__(self, index: Any) -> Any:
        return self.view(np.ndarray)[index]

    def __array_wrap__(self, array: np.ndarray, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else array.view(np.ndarray)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._parts is None:
            return self.view(np.ndarray).__reduce_ex__(protocol)
        return _mapped, (self._parts, self.shape, self.dtype)

    def __deepcopy__(self, memo: dict[int, Any] | None) -> Any:
        return self if self._parts is not None else np.array(self)


def _mapped(parts: SharedBytes, shape: tuple[int, ...], dtype: np.dtype[Any]) -> SharedArray:
    mapped = SharedArray(shape, dtype, parts.memory)
    mapped._parts = parts
    return mapped
