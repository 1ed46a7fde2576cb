"""Dispatch: which worker gets which batch, and how many may be under way.

    probing ──(evidence)──▶ round_robin      torch's assignment: batch k to worker k mod n
       └──(no evidence)───▶ demand           any free worker takes the next piece; large batches are split by rows
    stream                                   iterable datasets: each worker has its own samples

The evidence is the witness's (see `workers.witness`): when samples can tell which worker makes them, the batches are
torch's, bit for bit, only under torch's assignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Mode = Literal["probing", "demand", "round_robin", "stream"]

_WORTH_SPLITTING_NS = 1_500_000
"""A part of a batch should keep a worker busy for so long at least; handing one over costs about 0.1 ms."""

_FORGET = 0.98
"""Lost time is forgotten by so much with every batch: what is lost must come to 2 % of the work to count for long."""


class Dispatch:
    """Decides for one loader; what it has learned stays from epoch to epoch."""

    def __init__(self, mode: Mode, reason: str, *, workers: int, prefetch_factor: int, splittable: bool) -> None:
        self.mode: Mode = mode
        self.reason = reason
        self._workers = workers
        self.prefetch_factor = prefetch_factor
        self._splittable = splittable
        self._batch_ns = 0.0
        self._lost_ns = 0.0
        self._window = 0

    def begin_epoch(self, lanes: Sequence[bool] = (), turn: int = 0) -> None:
        """Reset what belongs to one epoch.

        Args:
            lanes: of an iterable dataset, whether each has batches left; those that have are given some by turns.
            turn: the lane that begins.
        """
        self._takers = len(lanes) or self._workers
        self._next_taker = turn
        self._assigned = 0
        self.active = [*lanes] or [True] * self._takers
        self.load = [0] * self._takers

    def size_up(self, workers: int) -> None:
        """Take note, before an epoch, of how many workers it begins with."""
        self._workers = max(1, workers)

    def resize(self, workers: int) -> None:
        """Take note of how many workers there are now, while batches are given to any or the first ones are under way.

        Places of workers that have gone are kept: batches that they made may not have been handed out yet.
        """
        self._workers = self._takers = workers
        more = workers - len(self.active)
        self.active += [True] * more
        self.load += [0] * more
        self._next_taker = self._assigned % workers

    def decide(self, evidence: str) -> None:
        """End the probing, or leave `demand` when evidence turns up late."""
        if evidence and self.mode in ("probing", "demand"):
            late = " (noticed late: earlier batches were given to whoever was free)" if self.mode == "demand" else ""
            self.mode, self.reason = "round_robin", f"as torch assigns, because {evidence}{late}"
        elif self.mode == "probing":
            self.mode, self.reason = "demand", "no sample can tell which worker makes it"

    def learn(self, batch_ns: int) -> None:
        """Take note of what one whole batch took to make, summed over its workers."""
        self._lost_ns *= _FORGET
        self._batch_ns = batch_ns if not self._batch_ns else 0.8 * self._batch_ns + 0.2 * batch_ns

    def parts(self, rows: int) -> int:
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
        """Take note that the step waited and workers had nothing to do for `lost_ns` (summed over workers).

        A wider window takes one more slot, and touching its pages for the first time takes about as long as making a
        batch does. So the window is widened when the time lost of late is as much.
        """
        self._lost_ns += lost_ns
        if self._lost_ns > self._batch_ns and 0 < self._window < self.prefetch_factor * self._workers:
            self._window += 1
            self._lost_ns = 0

    def next_taker(self, *, in_order: bool, most: int) -> int | None:
        """Return the worker (or the lane) that torch would give the next batch to; None when it would wait.

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
