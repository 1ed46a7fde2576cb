"""What a setting will take of the host's memory, before it is tried.

    batches     those under way, one that is handed out, one to spare, each with an eighth more
    workers     each process what the first one took for itself; threads nothing

The first worker process cannot be known before it is there. It is taken to need what a worker of its start method needs
without a dataset, and what the training process took more when it made batches itself: caches, decoders, buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.tune.setting import Setting
from penstock.tune.trial import Trial

_BARE_NBYTES = {"fork": 16 << 20}
_BARE_OTHER_NBYTES = 240 << 20
"""A worker that has imported torch anew, and shares its libraries with the others."""

_GROWTH = 1.1
"""Workers grow while they run: pages shared at their start are written to."""


@dataclass(slots=True)
class Budget:
    """Knows what things take, as far as trials have shown it.

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

    def learn(self, trial: Trial) -> None:
        """Take note of what a trial took."""
        setting = trial.setting
        self.batch_nbytes = max(self.batch_nbytes, trial.batch_nbytes)
        if setting.body == "inline":
            self.worker_nbytes += trial.ram_nbytes
        elif setting.body == "process":
            beside = trial.ram_nbytes - setting.workers * self.batch_nbytes  # at least so many batches lie in slots
            self.worker_nbytes = max(1 << 20, beside // setting.workers)

    def needed_nbytes(self, setting: Setting) -> int:
        """Return what `setting` will take, workers and batches together."""
        batches = 2 + setting.workers * setting.prefetch_factor
        workers = setting.workers if setting.body == "process" else 0
        return int(_GROWTH * workers * self.worker_nbytes) + batches * (self.batch_nbytes + self.batch_nbytes // 8)

    def allows(self, setting: Setting) -> bool:
        """Return whether `setting` will keep within the budget."""
        return self.needed_nbytes(setting) <= self.nbytes
