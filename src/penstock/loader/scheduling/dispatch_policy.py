"""Which worker gets which batch, and how many batches may be under way.

    probing ──(samples depend on their worker)──▶ round_robin   torch's assignment: batch k to worker k mod n
       └──────(they do not)─────────────────────▶ demand        any free worker takes the next task; large batches are
                                                                split by rows
    stream                                                      iterable datasets: each worker has its own samples

Whether samples depend on their worker is detected in the workers (see `workers.worker_dependence`). If they do, the
batches equal torch's, bit for bit, only under torch's assignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Mode = Literal["probing", "demand", "round_robin", "stream"]

_WORTH_SPLITTING_NS = 1_500_000
"""The least time that the rows of one worker should take; handing a task over costs about 0.1 ms."""

_DECAY = 0.98
"""The factor by which lost time decays with every batch: time lost must reach 2 % of the work to accumulate."""


class Dispatch:
    """Decides for one loader, and keeps what it has learned from epoch to epoch."""

    def __init__(self, mode: Mode, reason: str, *, workers: int, prefetch_factor: int, splittable: bool) -> None:
        self.mode: Mode = mode
        self.reason = reason
        self._workers = workers
        self.prefetch_factor = prefetch_factor
        self._splittable = splittable
        self._batch_ns = 0.0
        self._lost_ns = 0.0
        self._window = 0

    def begin_epoch(self, shards: Sequence[bool] = (), turn: int = 0) -> None:
        """Reset what belongs to one epoch.

        Args:
            shards: of an iterable dataset, whether each has batches left; those that have are served round-robin.
            turn: the shard that begins.
        """
        self._takers = len(shards) or self._workers
        self._next_taker = turn
        self._assigned = 0
        self.active = [*shards] or [True] * self._takers
        self.load = [0] * self._takers

    def size_up(self, workers: int) -> None:
        """Set, before an epoch, how many workers it begins with."""
        self._workers = max(1, workers)

    def resize(self, workers: int) -> None:
        """Set how many workers there are now, while any worker may take any batch or the first ones are under way.

        The entries of retired workers are kept, because their batches may not have been handed out yet.
        """
        self._workers = self._takers = workers
        more = workers - len(self.active)
        self.active += [True] * more
        self.load += [0] * more
        self._next_taker = self._assigned % workers

    def decide(self, dependence: str) -> None:
        """End the probing, or leave `demand` when samples turn out late to depend on their worker.

        Args:
            dependence: why they do; empty if they do not, as far as is known.
        """
        if dependence and self.mode in ("probing", "demand"):
            late = " (noticed late: earlier batches went to any free worker)" if self.mode == "demand" else ""
            self.mode, self.reason = "round_robin", f"as torch assigns, because {dependence}{late}"
        elif self.mode == "probing":
            self.mode, self.reason = "demand", "no sample depends on its worker"

    def learn(self, batch_ns: int) -> None:
        """Record the time that one whole batch took, summed over its workers."""
        self._lost_ns *= _DECAY
        self._batch_ns = batch_ns if not self._batch_ns else 0.8 * self._batch_ns + 0.2 * batch_ns

    def split(self, rows: int) -> int:
        """Return how many workers should fill a batch of `rows` together."""
        if not self._splittable or self._workers < 2 or rows < 2:
            return 1
        if self.mode == "probing":
            return min(self._workers, rows)
        if self.mode != "demand":
            return 1
        return max(1, min(self._workers, rows // 2, int(self._batch_ns / _WORTH_SPLITTING_NS)))

    def window(self) -> int:
        """Return how many batches may be under way.

        Workers that fill batches together need fewer of them; the window then starts small and is widened by
        `starved`, up to torch's prefetch_factor times workers.
        """
        most = self.prefetch_factor * self._workers
        if (
            self.mode == "demand"
            and self._splittable
            and self._workers > 1
            and self._batch_ns >= 2 * _WORTH_SPLITTING_NS
        ):
            self._window = max(self._window, min(most, max(2, self.prefetch_factor)))
            return min(self._window, most)
        return most

    def forbid_splitting(self) -> None:
        """Split no more batches: their samples do not all have the same shape."""
        self._splittable = False

    def starved(self, lost_ns: int) -> None:
        """Record that the step waited while workers were idle for `lost_ns` (summed over workers).

        A wider window takes one more slot, and touching its pages for the first time takes about as long as making a
        batch. So the window is widened when the time lost recently is as long.
        """
        self._lost_ns += lost_ns
        if self._lost_ns > self._batch_ns and 0 < self._window < self.prefetch_factor * self._workers:
            self._window += 1
            self._lost_ns = 0

    def next_taker(self, *, in_order: bool, most: int) -> int | None:
        """Return the worker (or the shard) that torch would give the next batch to; None when it would wait.

        In order, that is the next active one. Out of order, it is the next that has less than its share of `most`.
        """
        for _ in range(self._takers):
            taker = self._next_taker
            self._next_taker = (taker + 1) % self._takers
            share = max(1, most // max(1, sum(self.active[: self._takers])))
            if self.active[taker] and (in_order or self.load[taker] < share):
                self._assigned += 1
                return taker
        return None
