"""The indices of batches that were drawn from the sampler and have not been sent to a worker yet."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from penstock.loader.workers.worker_spec import WorkerSpec


class DrawnIndices:
    """Draws the indices of an epoch's batches, ahead of their being sent: a sampler may tell when it is asked.

    Args:
        worker_spec: what the workers make of indices.
        indices: of each batch.
    """

    def __init__(self, worker_spec: WorkerSpec, indices: Iterator[Any]) -> None:
        self._worker_spec = worker_spec
        self._indices = indices
        self._drawn: deque[tuple[Any, Exception | None]] = deque()
        self._has_drawn_all = False

    def __len__(self) -> int:
        return len(self._drawn)

    def draw(self) -> bool:
        """Draw the indices of another batch; return whether there is one."""
        if self._has_drawn_all:
            return False
        try:
            self._drawn.append((self._with_rows(next(self._indices)), None))
        except StopIteration:
            self._has_drawn_all = True
            return False
        except Exception as error:
            # Raised where it belongs: after the batches that were sampled before it.
            self._has_drawn_all = True
            self._drawn.append((None, error))
        return True

    def pop(self) -> tuple[Any, Exception | None]:
        """Return the indices of the batch that was drawn first, or why the sampler gave none."""
        return self._drawn.popleft()

    def _with_rows(self, indices: Any) -> Any:
        """Return a batch's indices as something that has rows, which a set or an iterator has not.

        A set may be in another order when it has been pickled, as it is for torch's workers.
        """
        spec = self._worker_spec
        if not spec.auto_collation or isinstance(indices, Sequence | torch.Tensor | np.ndarray):
            return indices
        return indices if spec.makes_whole_batches else [*pickle.loads(pickle.dumps(indices))]
