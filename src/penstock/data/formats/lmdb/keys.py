"""Which key has which sample of an LMDB database: shorter keys first, so that 2 comes before 10.

Keys that are numbers without gaps, 0, 1, 2, ... or 0000, 0001, 0002, ..., are recognised by the first one, the last one
and their count, and are not listed. If others lie between, and as many numbers are missing, reading a missing one is an
error. Other keys are listed once, for which the lmdb package touches every page of the file: our loader has it done
before its workers start, so that they do not do it each.
"""

from __future__ import annotations

import itertools
import struct
from bisect import bisect_right
from collections.abc import Set
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats.lmdb.environment import Environment

_TOGETHER = 4096
"""Entries that are looked at together."""
_DATABASE = struct.Struct("=IHHQQQQQ")
"""What an entry holds that is a database: ..., its depth, pages of branches and of leaves, ..., its root's page."""
_NO_ROOT = 2**64 - 1
_DEEPEST = 32


class NumberedKeys:
    """The keys 0, 1, 2, ... with zeros before them up to a width.

    >>> NumberedKeys(4).take([0, 12]), NumberedKeys(1).take([12])
    ([b'0000', b'0012'], [b'12'])
    """

    def __init__(self, width: int) -> None:
        self._format = b"%%0%dd" % width
        self.is_in_order = width > 1
        """Whether a cursor meets them in this order, and nothing between."""

    def take(self, numbers: list[int]) -> list[bytes]:
        """Return several keys."""
        form = self._format
        return [form % number for number in numbers]


def numbered_keys(cursor: Any, count: int, without: Set[bytes]) -> NumberedKeys | None:
    """Return the keys that `count` entries have if they are numbers without gaps, as far as their ends tell.

    Args:
        cursor: of the database.
        count: of its entries, those of `without` left out.
        without: keys of other entries, all of them behind those of digits.
    """
    if not count or not cursor.first() or bytes(cursor.key()).strip(b"0"):
        return None
    keys = NumberedKeys(len(cursor.key()))
    (last,) = highest = keys.take([count - 1])
    if not keys.is_in_order:  # of 0 to 120 the last is 99
        last = max(last, b"9" * (len(last) - 1))
    elif len(last) > len(cursor.key()):
        return None
    is_last = cursor.set_key(last) and (not cursor.next() or bytes(cursor.key()) in without)
    return keys if is_last and cursor.set_key(*highest) else None


class ListedKeys:
    """Keys that were listed.

    Args:
        keys: in the order in which a cursor meets them.
        is_gapless: whether a cursor meets nothing between them.
    """

    def __init__(self, keys: list[bytes], *, is_gapless: bool) -> None:
        lengths = [*map(len, keys)]
        ordered = sorted(keys, key=len)
        self.is_in_order = is_gapless and ordered == keys
        widths, starts, counts = np.unique(np.sort(lengths), return_index=True, return_counts=True)
        self._starts: list[int] = starts.tolist()
        data, begins = b"".join(ordered), np.cumsum(widths * counts) - widths * counts
        self._keys = [
            np.frombuffer(data, f"V{width}", count, begin)
            for width, count, begin in zip(widths.tolist(), counts.tolist(), begins.tolist(), strict=True)
        ]
        """By length; "V" are bytes that NumPy does not cut at zeros."""

    def _key(self, number: int) -> bytes:
        group = bisect_right(self._starts, number) - 1
        found: bytes = self._keys[group].item(number - self._starts[group])
        return found

    def take(self, numbers: list[int]) -> list[bytes]:
        """Return several keys."""
        return [self._key(number) for number in numbers] if len(self._keys) > 1 else self._keys[0][numbers].tolist()


Keys = NumberedKeys | ListedKeys


def list_keys(environment: Environment, database: str | None, without: Set[bytes]) -> ListedKeys:
    """Go through a database, and return its keys but those of `without`.

    Raises:
        SourceError: it holds databases, or is damaged.
    """
    keys, places = list[bytes](), list[int]()
    with environment.begin(database, buffers=True) as reading:
        stated, found = int(reading.stat(environment.database(database))["entries"]), 0
        entries = reading.cursor().iternext()
        while block := [*itertools.islice(entries, _TOGETHER)]:
            check_values(environment, block)
            own = [bytes(key) for key, _ in block]
            there = [at for at, key in enumerate(own) if key not in without]
            keys += [own[at] for at in there]
            places += [found + at for at in there]
            found += len(block)
            if found > stated or not all(own):  # pages may lie in a circle, which has no end
                break
    if found != stated or not all(keys):
        raise SourceError(f"{environment.path}: it states {stated} entries with keys, and has {found}; it is corrupt")
    return ListedKeys(keys, is_gapless=not keys or places[-1] - places[0] == len(places) - 1)


def check_values(environment: Environment, entries: list[tuple[Any, Any]]) -> None:
    """Raise SourceError if an entry is not a value but a database."""
    maybe = {bytes(key) for key, value in entries if len(value) == _DATABASE.size and _may_be_database(value)}
    if names := environment.database_names(maybe) if maybe else None:
        raise SourceError(f"{environment.path}: it holds databases ({', '.join(names)[:200]}); pass database=")


def _may_be_database(value: Any) -> bool:
    _, _, depth, branches, leaves, _, _, root = _DATABASE.unpack(value)
    return bool(depth <= _DEEPEST and branches <= leaves and (root == _NO_ROOT) == (leaves == 0))
