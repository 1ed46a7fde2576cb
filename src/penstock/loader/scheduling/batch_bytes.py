"""BatchBytes: how many bytes the tensors and arrays of batches have that lie in no slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_ATOMS = frozenset({int, float, bool, str, bytes})
_CONTAINERS = frozenset({list, tuple, dict})


class BatchBytes:
    """Returns the bytes of the tensors and arrays in batches, without looking through numbers and text.

    Of batches of many parts, ever fewer are looked at, at least one in `_LONGEST`; others count as the last of them.
    """

    _MANY = 16
    _LONGEST = 64

    def __init__(self) -> None:
        self._last = 0
        self._between = 0
        self._left = 0
        self._parts = 0

    def of(self, batch: Any) -> int:
        """Return the bytes of a batch."""
        if self._left:
            self._left -= 1
            return self._last
        self._parts = 0
        self._last = self._look(batch, 4)
        if self._parts > self._MANY:
            self._left = self._between = min(2 * self._between + 1, self._LONGEST)
        return self._last

    def _look(self, batch: Any, depth: int) -> int:
        self._parts += 1
        kind = type(batch)  # first: isinstance takes a microsecond for tensors
        if kind is torch.Tensor or (kind not in _CONTAINERS and isinstance(batch, torch.Tensor)):
            return batch.nbytes if batch.layout is torch.strided else 0
        if isinstance(batch, np.ndarray):
            return batch.nbytes
        if kind not in (list, tuple):
            if isinstance(batch, Mapping):
                batch = list(batch.values())
            elif not isinstance(batch, list | tuple):
                return 0
        if not batch or not depth or (type(batch[0]) in _ATOMS and type(batch[-1]) in _ATOMS):
            return 0
        return sum([self._look(part, depth - 1) for part in batch])
