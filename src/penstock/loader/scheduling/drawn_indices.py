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
        self.waiting: deque[tuple[Any, bytes]] = deque()
        """Of the batches that were drawn and not sent, the first one first; with `BatchCursor.packed`."""
        self.failures = 0
        """How often the sampler has raised. As with torch, each takes the place of a batch that would be under way."""

    def draw(self) -> bool:
        """Draw the indices of another batch; return whether there is one.

        Raises:
            Exception: what the sampler has raised; as torch does, ask it again for the next batch.
        """
        try:
            indices = next(self._indices)
        except StopIteration:
            return False
        except BaseException:
            self.failures += 1
            raise
        packed = getattr(self._indices, "packed", b"")
        self.waiting.append((indices if type(indices) is list else self._with_rows(indices), packed))
        return True

    def _with_rows(self, indices: Any) -> Any:
        """Return a batch's indices as something that has rows, which a set or an iterator has not.

        A set may be in another order when it has been pickled, as it is for torch's workers.
        """
        spec = self._worker_spec
        if not spec.auto_collation or isinstance(indices, Sequence | torch.Tensor | np.ndarray):
            return indices
        return indices if spec.makes_whole_batches else list(pickle.loads(pickle.dumps(indices)))
