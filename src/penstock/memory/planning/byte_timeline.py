"""Timeline: the bytes that are held after each operation of a step, by role, cut where layers begin and end.

A segment is what happens between two marks. Its key says which mark it follows, so that segments of runs with different
numbers of layers can be compared.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.memory.accounting.byte_counter import ROLES, ByteCounter, Role, SumBuffer

Rows = NDArray[np.int64]
"""Bytes of each role (columns, as in `ROLES`) after each operation (rows) that allocated, and its workspace's bound."""


class Key(NamedTuple):
    """Which mark a segment follows."""

    part: int
    """The number of the micro-batch."""

    event: str
    stack: int = -1
    """The number of the stack of layers; -1 for what is in none."""

    position: int = 0
    """The layer's place in its stack."""

    occurrence: int = 0
    """How often the same mark was there before."""

    def moved(self, position: int) -> Key:
        """Return the same of the layer at another place."""
        return self._replace(position=position)


@dataclass(frozen=True, slots=True)
class Segment:
    """What happened between two marks."""

    operations: tuple[str, ...]
    rows: Rows


Timeline = dict[Key, Segment]
"""The segments of a step, in the order of time."""


class TimelineCounter(ByteCounter):
    """A ByteCounter that keeps what happened."""

    def __init__(self, *, grain_nbytes: int, runs_on_cpu: bool, sum_buffer: SumBuffer | None = None) -> None:
        super().__init__(grain_nbytes=grain_nbytes, runs_on_cpu=runs_on_cpu, sum_buffer=sum_buffer)
        self.part = 0
        self._log: list[Any] = []
        """In order: keys (marks), names of operations, blocks that were made or freed, bounds of workspaces (a row)."""
        self._marks: Counter[Key] = Counter()

    def mark(self, event: str, stack: int = -1, position: int = 0) -> None:
        """Begin a segment."""
        self._drop_buffer()
        key = Key(self.part, event, stack, position)
        self._log.append(Key(self.part, event, stack, position, self._marks[key]))
        self._marks[key] += 1

    def begin(self, part: int, event: str) -> None:
        """Begin a segment of a micro-batch, with what is held now as its first row."""
        self.part = part
        self.mark(event)
        self._log.append(0)

    def timeline(self) -> Timeline:
        """Return what happened, by the roles that blocks have had in the end."""
        columns = {role: column for column, role in enumerate(ROLES)}
        held, seen = [0] * len(ROLES), set()
        segments: dict[Key, tuple[list[str], list[list[int]]]] = {}
        names, rows = segments[Key(0, "static")] = [], []
        for entry in self._log:
            if isinstance(entry, int):
                rows.append([*held, entry])
            elif isinstance(entry, Key):
                names, rows = segments[entry] = [], []
            elif isinstance(entry, str):
                names.append(entry)
            else:
                sign = -1 if id(entry) in seen else 1
                seen.add(id(entry))
                held[columns[entry.role]] += sign * entry.nbytes
        return {
            key: Segment(tuple(names), np.array(rows, np.int64).reshape(-1, len(ROLES) + 1))
            for key, (names, rows) in segments.items()
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self._log)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        made = any(not isinstance(entry, (Key, str)) for entry in self._log[before:])
        self._log.append(func.name())
        if made or self.workspace_bound:
            self._log.append(self.workspace_bound)
        return result

    def _add(self, key: int, nbytes: int, role: Role) -> None:
        super()._add(key, nbytes, role)
        self._log.append(self._blocks[key])

    def _forget(self, key: int) -> None:
        self._log.append(self._blocks[key])
        super()._forget(key)


def peak_of(segments: list[Rows]) -> tuple[int, int, dict[Role, int]]:
    """Return the most bytes that are held, that with workspaces, and by which roles, the first time it is so much."""
    rows = np.concatenate(segments)
    held = rows[:, :-1].sum(axis=1)
    first = int(held.argmax())
    return int(held[first]), int(rows.sum(axis=1).max()), as_roles(rows[first])


def as_roles(row: Rows) -> dict[Role, int]:
    """Return one row by the names of its columns."""
    return {role: int(nbytes) for role, nbytes in zip(ROLES, row[:-1], strict=True)}
