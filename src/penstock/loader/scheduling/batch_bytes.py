"""BatchBytes: how many bytes the tensors and arrays of batches have that lie in no slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_ATOMS = frozenset({int, float, bool, str, bytes})
_SEQUENCES = list, tuple


class BatchBytes:
    """Returns the bytes of the tensors and arrays in batches, without looking through numbers and text.

    Of batches of many parts, and of those without a tensor, ever fewer are looked at, at least one in `_LONGEST`;
    others count as the last of them.
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
        if self._parts > self._MANY or not self._last:
            self._left = self._between = min(2 * self._between + 1, self._LONGEST)
        return self._last

    def _look(self, batch: Any, depth: int) -> int:
        self._parts += 1
        if type(batch) is dict:  # before `Mapping`, of which asking takes a microsecond
            batch = [*batch.values()]
        if not isinstance(batch, _SEQUENCES):  # asked first, for this is done for every batch
            if isinstance(batch, torch.Tensor):
                return batch.nbytes if batch.layout is torch.strided else 0
            if isinstance(batch, np.ndarray):
                return batch.nbytes
            if not isinstance(batch, Mapping):
                return 0
            batch = list(batch.values())
        if not batch or not depth or (type(batch[0]) in _ATOMS and type(batch[-1]) in _ATOMS):
            return 0
        nbytes = 0
        for part in batch:
            if type(part) is torch.Tensor and part.layout is torch.strided:
                self._parts += 1
                nbytes += part.nbytes
            else:
                nbytes += self._look(part, depth - 1)
        return nbytes
