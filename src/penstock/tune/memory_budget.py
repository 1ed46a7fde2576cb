"""Predicts the host memory that a setting needs, before it is tried.

    batches     those in flight, one that the step holds, one spare, each with an eighth more
    workers     each process as much as the first one took; threads nothing

Before the first worker process has run, it is assumed to need what a worker of its start method needs without a
dataset, plus what the training process grew by when it made batches itself: caches, decoders, buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.tune.setting import Setting
from penstock.tune.trial_result import SettingTrial

_BARE_NBYTES = {"fork": 16 << 20}
_BARE_OTHER_NBYTES = 240 << 20
"""A worker that imports torch itself, and shares the libraries' pages with the others."""

_GROWTH = 1.1
"""Workers grow while they run: they write to pages that were shared at their start."""


@dataclass(slots=True)
class MemoryBudget:
    """Predicts from the trials so far.

    Args:
        nbytes: the most that workers and batches may take together.
        start_method: of worker processes.
    """

    nbytes: int
    start_method: str
    batch_nbytes: int = 0
    worker_nbytes: int = 0

    def __post_init__(self) -> None:
        self.worker_nbytes = self.worker_nbytes or _BARE_NBYTES.get(self.start_method, _BARE_OTHER_NBYTES)

    def learn(self, trial: SettingTrial) -> None:
        """Learn from what a trial took."""
        setting = trial.setting
        self.batch_nbytes = max(self.batch_nbytes, trial.batch_nbytes)
        if setting.worker_type == "inline":
            self.worker_nbytes += trial.ram_nbytes
        elif setting.worker_type == "process":
            # At least one batch per worker lies in the slots.
            workers_nbytes = trial.ram_nbytes - setting.workers * self.batch_nbytes
            self.worker_nbytes = max(1 << 20, workers_nbytes // setting.workers)

    def needed_nbytes(self, setting: Setting) -> int:
        """Return the bytes that `setting` needs, for workers and batches together."""
        batches = 2 + setting.workers * setting.prefetch_factor
        workers = setting.workers if setting.worker_type == "process" else 0
        return int(_GROWTH * workers * self.worker_nbytes) + batches * (self.batch_nbytes + self.batch_nbytes // 8)

    def allows(self, setting: Setting) -> bool:
        """Return whether `setting` stays within the budget."""
        return self.needed_nbytes(setting) <= self.nbytes
