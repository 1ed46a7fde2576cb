"""`Paths`: many paths, or other texts, in one piece of memory; `NamedPaths`: which of them a name stands for."""

from __future__ import annotations

import os
import posixpath
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


class Paths(Sequence[str]):
    """Paths below one root, kept in one piece.

    >>> list(Paths("/data/", ["a.jpg", "b/c.jpg"]))
    ['/data/a.jpg', '/data/b/c.jpg']
    """

    def __init__(self, root: str, names: Iterable[str]) -> None:
        self._root = os.fsencode(root)
        encoded = [*map(os.fsencode, names)]
        self._text = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return os.fsdecode(self._root + self._text[self._ends[index] : self._ends[index + 1]])


class NamedPaths:
    """Finds files by the ends of their paths, with their suffixes or without.

    >>> named = NamedPaths(["/data/train/a.b.jpg", "/data/val/a.b.jpg"])
    >>> named.by_name("train/a.b"), named.by_name("a.b.jpg"), named.by_name("a.b.png")
    ([0], [0, 1], [])
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = [f"/{path}" for path in paths]
        self._by_stem: dict[str, list[int]] = defaultdict(list)
        for number, path in enumerate(paths):
            self._by_stem[posixpath.splitext(posixpath.basename(path))[0]].append(number)

    def by_name(self, value: Any) -> list[int]:
        """Return the numbers of the files that a value names."""
        name = "/" + str(value).replace("\\", "/").removeprefix("./").lstrip("/")
        base = posixpath.basename(name)
        stem = posixpath.splitext(base)[0]
        whole = [number for number in self._by_stem.get(stem, []) if self._paths[number].endswith(name)]
        return whole or [
            number
            for number in self._by_stem.get(base, [])
            if posixpath.splitext(self._paths[number])[0].endswith(name)
        ]
