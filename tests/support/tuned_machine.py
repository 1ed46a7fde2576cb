"""A simulated machine: trials of a loop whose costs are known, without a clock."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from penstock.tune.setting import Setting
from penstock.tune.trial_result import SettingTrial

MIB = 1 << 20


@dataclass(kw_only=True)
class Machine:
    """Takes the place of a `TrialBench`.

    With n workers a batch is ready every work/n, but no worker gets more than its share of the cores; the step runs
    meanwhile. Threads of a dataset that holds the GIL make as much as one.
    """

    step_ms: float
    work_ms: float
    handling_ms: float = 0.3
    cores: int = 4
    gil: bool = True
    busy: float = 1.0
    """Of the work, that on a processor."""
    jitter: float = 0.0
    """Lost in waiting while workers run only so far ahead; halved with every doubling of the prefetch."""
    worker_nbytes: int = 20 * MIB
    batch_nbytes: int = MIB
    noise: float = 0.0
    seed: int = 0
    tried: list[Setting] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def period_ms(self, setting: Setting) -> float:
        if setting.worker_type == "inline":
            return self.step_ms + self.work_ms
        loop = self.step_ms + self.handling_ms
        cores = self.cores / self.busy
        together = 1 if setting.worker_type == "thread" and self.gil else min(setting.workers, cores)
        crowd = 1 + 0.03 * max(0, setting.workers - cores + 1)
        late = self.jitter * self.work_ms / setting.prefetch_factor
        return max(loop, crowd * self.work_ms / together) + late

    def ram_nbytes(self, setting: Setting) -> int:
        workers = setting.workers if setting.worker_type == "process" else 0
        return workers * self.worker_nbytes + (2 + setting.workers * setting.prefetch_factor) * self.batch_nbytes

    def measure(
        self, setting: Setting, *, at_least_s: float, at_least: int = 16, at_most_s: float = 2.0
    ) -> SettingTrial:
        self.tried.append(setting)
        period = self.period_ms(setting) * max(0.2, self.random.gauss(1, self.noise))
        together = 1 if self.gil else min(setting.workers, self.cores / self.busy)
        blocked = setting.workers / together if setting.worker_type == "thread" else 1.0
        loop = self.step_ms + (self.handling_ms if setting.workers else 0.0)
        return SettingTrial(
            setting=setting,
            samples_per_s=32e3 / period,
            error=2 * self.noise,
            stall_fraction=max(0.0, 1 - loop / period),
            batch_ms=(0.9 * period, period, 1.1 * period),
            ram_nbytes=self.ram_nbytes(setting),
            batches=20,
            work_s=self.work_ms * blocked / 1e3,
            handling_s=self.handling_ms / 1e3 if setting.workers else 0.0,
            step_s=self.step_ms / 1e3,
            batch_nbytes=self.batch_nbytes,
            busy_fraction=self.busy if setting.worker_type == "process" else 1.0,
        )

    def forget(self, setting: Setting) -> None:
        pass

    def close(self) -> None:
        pass

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        pass
