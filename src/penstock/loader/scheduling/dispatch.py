"""Which worker gets which batch, and how many batches may be under way.

    round_robin  torch's assignment, batch k to worker k mod n: each worker makes what torch's would, in that order
    demand       any free worker takes the next task
    stream       iterable datasets: each worker has its own samples

On demand, a batch depends on who happens to be free. So it takes a proof that no sample can tell (see `purity`), or
the user's word.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

from penstock.loader.scheduling.batch import BatchWindow
from penstock.loader.workers.worker_spec import WorkerSpec

Mode = Literal["demand", "round_robin", "stream"]

_MOST_AHEAD = 4
"""How many times torch's window may become where batches are uneven and each worker keeps to its own."""

_UNEVEN = 4
"""How many batches each worker could have made in the time that it has lost recently, where batches count as uneven."""

_DECAY = 0.98
"""The factor by which lost time decays with every batch: time lost must reach 2 % of the work to accumulate."""


class Dispatch:
    """Decides for one iterator of a loader.

    Args:
        mode: see above.
        reason: for the mode, as text.
        workers: how many there are.
        prefetch_factor: torch's: how many batches for each worker are drawn from the sampler ahead of the loop.
        may_run_ahead: whether more may be drawn than that, because neither the sampler nor the dataset can tell.
        previous: of the loader's iterator before, which has learned what batches cost.
    """

    def __init__(
        self,
        mode: Mode,
        reason: str,
        *,
        workers: int,
        prefetch_factor: int,
        may_run_ahead: bool = False,
        previous: Dispatch | None = None,
    ) -> None:
        self.mode: Mode = mode
        self.reason = reason
        self.prefetch_factor = prefetch_factor
        self.may_run_ahead = may_run_ahead and mode == "round_robin"
        self._batch_ns: float = previous._batch_ns if previous is not None else 0.0
        self._lost_ns = 0.0
        self._window: int = previous._window if previous is not None else 0
        self.max_in_flight = 0
        """How many batches may be under way: as many as torch's, or a number that `starved` widens.

        Where each worker keeps to its own batches and one is slow, the others need more.
        """
        self.resize(workers)

    def begin_epoch(self, shards: Sequence[bool] = (), turn: int = 0) -> None:
        """Reset what belongs to one epoch.

        Args:
            shards: of an iterable dataset, whether each has batches left; those that have are served round-robin.
            turn: the shard that begins.
        """
        self._takers = len(shards) or self.workers
        self._next_taker = turn
        self.active = [*shards] or [True] * self._takers
        self.load = [0] * self._takers
        """How many batches each worker (or shard) has been given that are not finished; not counted on demand."""

    def resize(self, workers: int) -> None:
        """Set how many workers there are now, while any worker may take any batch."""
        self.workers = workers
        self.drawn_ahead = self.prefetch_factor * workers
        """How many batches torch would have drawn from the sampler ahead of the loop."""
        self._fit()

    def add_workers(self, workers: int, sent: int) -> None:
        """Set how many workers there are for an epoch of which no worker has been given a second batch.

        Args:
            workers: how many there are.
            sent: how many batches have been given out.
        """
        self.resize(workers)
        self._takers = workers
        self.active = [True] * workers
        self.load = [*self.load, *[0] * workers][:workers]
        self._next_taker = sent % workers

    def learn(self, batch_ns: int) -> None:
        """Record the time that one whole batch took."""
        self._lost_ns *= _DECAY
        self._batch_ns = batch_ns if not self._batch_ns else 0.8 * self._batch_ns + 0.2 * batch_ns

    def _fit(self) -> None:
        torchs = self.drawn_ahead
        if self.may_run_ahead:
            self._window = max(torchs, min(self._window, _MOST_AHEAD * torchs))
        self.max_in_flight = self._window if self.may_run_ahead else torchs

    def idle(self, window: BatchWindow) -> int:
        """Return how many workers have nothing to do while these batches are under way."""
        is_own = self.mode == "round_robin"
        return self.load.count(0) if is_own else max(0, self.workers - window.unmade())

    def starved(self, lost_ns: int) -> None:
        """Record that the step waited while workers were idle for `lost_ns` (summed over workers).

        A wider window takes a slot for each worker, and touching the pages of one for the first time takes about as
        long as making a batch. So it is widened when the time lost recently is so long that it cannot be noise.
        """
        self._lost_ns += lost_ns
        if self._window and self._lost_ns > _UNEVEN * self.workers * self._batch_ns:
            self._window += self.workers
            self._lost_ns = 0
            self._fit()

    def next_taker(self, *, in_order: bool, most: int) -> int | None:
        """Return the worker (or the shard) that torch would give the next batch to; None when it would wait.

        In order, that is the next active one. Out of order, it is the next that has less than its share of `most`.
        """
        if in_order and self.active[self._next_taker]:  # most of the time
            taker = self._next_taker
            self._next_taker = (taker + 1) % self._takers
            return taker
        for _ in range(self._takers):
            taker = self._next_taker
            self._next_taker = (taker + 1) % self._takers
            share = max(1, most // max(1, sum(self.active[: self._takers])))
            if self.active[taker] and (in_order or self.load[taker] < share):
                return taker
        return None


class IndicesAhead:
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
