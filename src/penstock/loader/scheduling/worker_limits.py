"""What both rules for a number of workers share: the timing of a batch, the limits that always hold, and thresholds."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.loader.workers.busy_time import WAITING, useful_workers

STALLED = 0.05
"""The fraction of the time that a step may wait before more workers are considered."""

SPARE = 1.25
"""Fewer workers must be enough for this multiple of the work, so that they are not soon too few."""

WINDOW = 8
"""How many batches are evaluated together, at most."""

START_NS = 20_000_000
"""The time to start a worker (fork), until it is measured; the step must have waited as long since the last change."""

USEFUL = 1.05
"""More workers stay if they make this multiple of the batches that fewer made."""

COST_CHANGE = 1.5
"""The ratio by which the work of a batch must change before a number of workers that did not help is tried again."""

TINY = 0.8
"""Workers are dropped when making a batch takes this multiple of what handling it takes, or less."""

CLEARLY_USEFUL = 1.5
"""More than there are cores, for what one batch has shown, stay if they make this multiple of what that promised for
fewer: the first batch of a worker takes longer than the next ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTiming:
    """Where the time went between one batch being handed out and the next."""

    number: int
    """The batch's position in its epoch."""

    step_ns: int
    """The program's own step."""

    handling_ns: int
    """The training process's own work: sending tasks, receiving batches."""

    wait_ns: int
    """How long the step waited."""

    work_ns: int
    """Making the batch, summed over its workers."""

    busy_ns: int | None = None
    """How much of the work was computing rather than waiting. None: all of it."""


@dataclass(kw_only=True, slots=True)
class WorkerLimits:
    """What holds for the number of workers as long as the loader lives."""

    most: int
    """How many there may be."""

    most_waiting: int
    """How many there may be where they wait rather than compute."""

    least: int = 0
    """How many there have to be: by the user's word, or one once a worker has crashed."""

    has_effects: bool = False
    """Whether it would be noticed if the training process made the samples; see `lasting_effects`."""

    start_ns: int = START_NS
    """How long the start of a worker takes, as far as it is known."""

    def allowed(self, busy: float) -> int:
        """Return how many workers there may be that are busy for this fraction of the time that they take.

        Of those that mostly wait twice as many beside the cores' own: they wait when they please, and with just as many
        a core has often nothing to do.
        """
        useful = useful_workers(self.most, busy)
        return max(self.most, min(self.most_waiting, 2 * useful - self.most if busy <= WAITING else useful))


def totals_of(timing: BatchTiming) -> tuple[int, int, int, int, int, int]:
    """Return what an epoch's totals grow by: batches, step, handling, waiting, work, busy."""
    busy_ns = timing.work_ns if timing.busy_ns is None else timing.busy_ns
    return 1, timing.step_ns, timing.handling_ns, timing.wait_ns, timing.work_ns, busy_ns


def ms_text(ns: float) -> str:
    """Return a time in words, as in "2.1 ms"."""
    return f"{ns / 1e6:.2g} ms"


def workers_text(workers: int) -> str:
    """Return a number of workers in words, as in "2 workers"."""
    return f"{workers} worker{'s' if workers > 1 else ''}" if workers else "batches made in the training process"
