"""Which key has which sample of an LMDB database: shorter keys first, so that 2 comes before 10.

Keys that are numbers without gaps, 0, 1, 2, ... or 0000, 0001, 0002, ..., are recognised by a few of them and their
count, and are not listed. Those of one width have no gap if the first and the last one are what they have to be. Of
others, as many are above the last as are missing below it: some are looked up on both sides. No few keys prove that
none is missing where others lie between; reading a missing one is an error.

Other keys are listed once, for which the lmdb package touches every page of the file: our loader has it done before its
workers start, so that they do not do it each.
"""

from __future__ import annotations

import itertools
from collections.abc import Set
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats.lmdb.environment import Environment

_TOGETHER = 4096
"""Entries that are looked at together."""
_STEPS = [1 << power for power in range(8)]
"""How far from the last of unpadded numbers keys are looked up, on both sides."""
_DATABASE_NBYTES = 48
"""What an entry holds that is a database."""


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
    """Return the keys that `count` entries have if they are numbers without gaps, as far as a few of them tell.

    Entries with the keys `without`, all of them behind those of digits, are not counted.
    """
    if not count or not cursor.first() or bytes(cursor.key()).strip(b"0"):
        return None
    keys = NumberedKeys(len(cursor.key()))
    (last,) = keys.take([count - 1])
    if not keys.is_in_order:  # of 0 to 120 the last is 99
        last = max(last, b"9" * (len(last) - 1))
    elif len(last) > len(cursor.key()):
        return None
    is_last = cursor.set_key(last) and (not cursor.next() or bytes(cursor.key()) in without)
    return keys if is_last and (keys.is_in_order or _end_at(cursor, count, keys)) else None


def _end_at(cursor: Any, count: int, keys: NumberedKeys) -> bool:
    """Return whether numbers shortly below `count` are there, and none of those from it on: those of a gap would be."""
    below = keys.take([count - step for step in _STEPS if step <= count])
    above = keys.take([count - 1 + step for step in _STEPS])
    return all(map(cursor.set_key, below)) and not any(map(cursor.set_key, above))


class ListedKeys:
    """Keys that were listed, in two objects however many they are: forked workers share their memory.

    Args:
        keys: in the order in which a cursor meets them.
        is_gapless: whether a cursor meets nothing between them.
    """

    def __init__(self, keys: list[bytes], *, is_gapless: bool) -> None:
        ordered = sorted(keys, key=len)
        self.is_in_order = is_gapless and ordered == keys
        self._data = b"".join(ordered)
        self._ends = np.cumsum([0, *map(len, ordered)])

    def take(self, numbers: list[int]) -> list[bytes]:
        """Return several keys."""
        begins, ends = self._ends[numbers].tolist(), self._ends[np.array(numbers) + 1].tolist()
        return [self._data[begin:end] for begin, end in zip(begins, ends, strict=True)]


Keys = NumberedKeys | ListedKeys


def list_keys(environment: Environment, database: str | None, without: Set[bytes]) -> ListedKeys:
    """Go through a database, and return its keys but those of `without`.

    Raises:
        SourceError: it holds databases, or is damaged.
    """
    keys, found = list[bytes](), 0
    with environment.reading(database, buffers=True) as reading:
        stated = int(reading.stat(environment.database(database))["entries"])
        entries = reading.cursor().iternext()
        while found <= stated and (block := [*itertools.islice(entries, _TOGETHER)]):  # pages may lie in a circle
            check_values(environment, block)
            keys += [own for own in (bytes(key) for key, _ in block) if own not in without]
            found += len(block)
    if found != stated or not all(keys):
        raise SourceError(f"{environment.path}: it states {stated} entries with keys, and has {found}; it is corrupt")
    return ListedKeys(keys, is_gapless=len(keys) == found)


def check_values(environment: Environment, entries: list[tuple[Any, Any]]) -> None:
    """Raise SourceError if an entry is not a value but a database."""
    maybe = [bytes(key) for key, value in entries if len(value) == _DATABASE_NBYTES]
    if names := environment.database_names(maybe) if maybe else None:
        raise SourceError(f"{environment.path}: it holds databases ({', '.join(names)[:200]}); pass database=")
