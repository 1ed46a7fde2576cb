"""Entries of an LMDB database that are no samples, but describe the others: a length, a list of keys.

Everywhere these are __len__, __length__, __keys__, __meta__ and num-samples. The words len, length, keys and meta are
where the other keys begin with a digit, or where one of them states how many samples there are. Elsewhere they are
samples: a vocabulary has such words.
"""

from __future__ import annotations

import pickle
from typing import Any

_NAMES = (b"__len__", b"__length__", b"__keys__", b"__meta__", b"num-samples")
_WORDS = (b"len", b"length", b"keys", b"meta")
_FIRST = min(_NAMES + _WORDS)


def bookkeeping_keys(cursor: Any, count: int, *, reverse_key: bool = False) -> frozenset[bytes]:
    """Return the keys of those of a database's `count` entries that are no samples.

    Args:
        cursor: of the database.
        count: of its entries.
        reverse_key: whether its keys are in the order of their ends.
    """
    if not cursor.last() or (bytes(cursor.key()) < _FIRST and not reverse_key):
        return frozenset()
    names = {key for key in _NAMES if cursor.set_key(key)}
    words = {key: bytes(cursor.value()) for key in _WORDS if cursor.set_key(key)}
    if words:
        stated = _as_written(count - len(names) - len(words))
        if not stated.isdisjoint(words.values()) or _last_of_others(cursor, names.union(words))[:1].isdigit():
            names.update(words)
    return frozenset(names)


def _last_of_others(cursor: Any, known: set[bytes]) -> bytes:
    """Return the last key that is not among those known."""
    there = cursor.last()
    while there and bytes(cursor.key()) in known:
        there = cursor.prev()
    return bytes(cursor.key()) if there else b""


def _as_written(count: int) -> set[bytes]:
    """Return a count as text, and as any protocol of pickle has it."""
    return {b"%d" % count, *(pickle.dumps(count, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1))}
