"""The search: a few short trials predict, a climb from there corrects, and the best are compared, interleaved.

    1  no workers             ▶ what a batch costs, what the step takes: is there anything to gain?
    2  one process            ▶ transport, memory; work / (step + transport) predicts how many are enough
    3  as many as that        ▶ more while it gains, fewer while it costs nothing; where they wait, in large steps
    4  one thread, two        ▶ only where the step still waits, or memory is short: is the GIL released?
    5  prefetch               ▶ more only while the step waits, less where memory is short
    6  the best three interleaved, longer each time, until they differ by more than their error

Of settings that are equally fast, the one with the fewest workers and the least memory is chosen: workers take cores.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from penstock.core.errors import OptionError, PenstockError
from penstock.core.host import available_nbytes, usable_cores
from penstock.core.units import size_text
from penstock.loader.dataloader import MOST_WAITING_WORKERS
from penstock.loader.workers.busy_time import WAITING
from penstock.tune.memory_budget import MemoryBudget
from penstock.tune.search_result import TuneResult
from penstock.tune.setting import Setting, WorkerType
from penstock.tune.trial_bench import TrialBench
from penstock.tune.trial_comparison import (
    SAME_SPEED,
    cheapest_of_fastest,
    cost,
    error_of_lag,
    lag,
    speed,
    without_doubtful_threads,
)
from penstock.tune.trial_result import SettingTrial
from penstock.tune.tuned_loop import TunedLoop

_HIDDEN = 0.03
"""A step that waits for a smaller fraction of its time has nothing to gain."""

_THREADS_PAY = 1.4
"""Two threads are this many times as fast as one if a dataset releases the GIL."""

_MOST_WORKERS = MOST_WAITING_WORKERS
_WORKERS_PER_CPU = 32
"""The most workers that share a processor, however much they sleep."""

_FIRST_JUMP = 16
"""The most workers of the first trial with several: 16 processes take half a second to start."""

_SMALL = 6
"""From this number on, the next number of workers is another multiple, instead of one more or fewer."""

_PREFETCHES = (4, 8)
_FINALISTS = 4
_ROUNDS = 2
_UNSURE = 0.05
_DRIFT = 0.3
_TRIAL_S = 0.25
"""What a trial takes at least."""
_LONG_S = 8.0
"""A search that has taken longer skips prefetch, compares its finalists once, and reports what is uncertain."""


def tune(
    loop: TunedLoop,
    *,
    ram_nbytes: int | None = None,
    cpus: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> TuneResult:
    """Find the setting with which the loop is fastest, and of equally fast ones the one that takes least.

    Args:
        loop: the loader and the step.
        ram_nbytes: the most memory that workers and batches may take; half of what is available by default.
        cpus: the most processors that workers may keep busy; those that this process may use by default. Workers that
            sleep count by the time they run: with samples that wait for storage there may be 32 per processor, at most
            64.
        report: called with a line for each trial.

    Raises:
        OptionError: the budget does not hold two batches, or the loader has none.
    """
    if cpus is not None and cpus < 1:
        raise OptionError(f"at least one CPU is needed, not {cpus}")
    most = cpus if cpus is not None else usable_cores()
    ram = available_nbytes() // 2 if ram_nbytes is None else ram_nbytes
    with TrialBench(
        loop, most=min(_MOST_WORKERS, _WORKERS_PER_CPU * most), one_at_a_time=ram_nbytes is not None
    ) as bench:
        return _Search(loop, bench, ram, most, report, may_crowd=cpus is None).run()


@dataclass(slots=True)
class _Search:
    loop: TunedLoop
    bench: TrialBench
    ram_nbytes: int
    cpus: int
    report: Callable[[str], None]
    may_crowd: bool
    """Whether workers may together compute more than `cpus` at times: those are all there are."""
    trials: dict[Setting, SettingTrial] = field(default_factory=dict)
    left_out: dict[Setting, int] = field(default_factory=dict)
    gil: str = ""
    why: str = ""
    device: str = "there is no accelerator, so pin_memory and device= were not tried"
    budget: MemoryBudget = field(init=False)
    most: int = field(init=False)
    """The most workers: as many as keep the processors busy."""
    waits: bool = False
    """Whether a process that makes samples mostly waits. What waits does not hold the GIL, however two threads look."""
    began: float = 0.0
    finalists: list[SettingTrial] = field(default_factory=list)

    def run(self) -> TuneResult:
        self.began, self.most = time.perf_counter(), min(_MOST_WORKERS, self.cpus)
        context = self.loop.loader.multiprocessing_context or torch.multiprocessing.get_context()
        self.budget = MemoryBudget(self.ram_nbytes, context.get_start_method() or "fork")
        alone = self._try(Setting())
        assert alone is not None
        if self.budget.needed_nbytes(Setting()) > self.ram_nbytes:
            raise OptionError(
                f"two batches take {size_text(self.budget.needed_nbytes(Setting()))}, and the budget is "
                f"{size_text(self.ram_nbytes)}; raise --ram or lower batch_size"
            )
        if alone.stall_fraction <= _HIDDEN:
            self.why = f"the step waits for {alone.stall_fraction:.1%} of its time without any worker: nothing to gain"
        else:
            self._climb("process")
            if self.loop.can_take_threads and self._is_stalled_or_short():
                self._try_threads()
            if self._best().stall_fraction > _HIDDEN and not self._is_long():
                self._try_prefetch()
        finalists = self._finish()
        self._try_device()
        choice = self._choose()
        return TuneResult(
            choice=choice.setting,
            trials=tuple(self.trials.values()),
            left_out=tuple(self.left_out.items()),
            ram_nbytes=self.ram_nbytes,
            why=self.why,
            doubt=self._doubt(choice, finalists),
            gil=self.gil,
            device=self.device,
            seconds=time.perf_counter() - self.began,
        )

    # ── trials ──────────────────────────────────────────────────────────────────────────────────────────────

    def _try(self, setting: Setting, longer: float = 1.0) -> SettingTrial | None:
        """Measure `setting`, once more if it was measured before; None if it takes more memory than allowed."""
        is_new = setting not in self.trials
        if is_new and setting.workers and not self.budget.allows(setting):
            self.left_out[setting] = self.budget.needed_nbytes(setting)
            return None
        trial = self.bench.measure(setting, at_least_s=_TRIAL_S * longer, at_most_s=4 * _TRIAL_S * longer)
        if is_new:
            self.budget.learn(trial)
        if trial.setting.workers and trial.ram_nbytes > self.ram_nbytes:
            self.bench.close()
            self.trials.pop(setting, None)
            self.left_out[setting] = trial.ram_nbytes
            return None
        self.trials[setting] = trial
        self.report(
            f"{setting.describe()}: {trial.samples_per_s:.0f} samples/s ± {trial.error:.0%}, "
            f"the step waits {trial.stall_fraction:.0%} of the time"
        )
        return trial

    def _is_long(self) -> bool:
        return time.perf_counter() - self.began > _LONG_S

    def _climb(self, worker_type: WorkerType) -> None:
        """Start with as many workers as one worker's trial predicts; then add or remove workers."""
        first = self._try(Setting(workers=1, worker_type=worker_type))
        if first is None:
            self.why = f"the budget holds no {worker_type}"
            return
        if worker_type == "process":
            self.most = _most_workers(self.cpus, first.busy_fraction, may_crowd=self.may_crowd)
            self.waits = first.busy_fraction <= WAITING
        if first.stall_fraction <= _HIDDEN or self.most == 1:
            self.why = "one worker hides all loading behind the step" if self.most > 1 else "there is one CPU"
            return
        loop_s = first.step_s + first.handling_s
        workers = min(self.most, max(_FIRST_JUMP, self.cpus), max(2, math.ceil(first.work_s / max(1e-9, loop_s))))
        while workers > 1 and (trial := self._try(Setting(workers=workers, worker_type=worker_type))) is None:
            workers -= 1
        if workers == 1:
            self.why = "the budget holds one worker"
        elif trial is not None and trial.stall_fraction > _HIDDEN:
            self._climb_up(trial, worker_type)
        else:
            self._climb_down(workers, worker_type)

    def _climb_up(self, trial: SettingTrial, worker_type: WorkerType) -> None:
        while trial.stall_fraction > _HIDDEN:
            workers = min(self.most, _more(trial.setting.workers))
            if workers == trial.setting.workers:
                self.why = f"{self.most} workers is the most that may run"
                break
            more = self._try_at_most(replace(trial.setting, workers=workers), above=trial.setting.workers)
            if more is None:
                self.why = f"the budget of {size_text(self.ram_nbytes)} holds {trial.setting.workers} workers"
                break
            trial, more = self._again(trial, more)
            if more.samples_per_s < (1 + SAME_SPEED) * trial.samples_per_s:
                self.why = f"{more.setting.workers} workers gain less than the noise over {trial.setting.workers}"
                break
            trial = more
        else:
            self.why = f"{trial.setting.workers} workers hide all loading behind the step"
        if trial.stall_fraction > _HIDDEN and trial.setting.workers > 2 and not self._is_long():
            self._climb_down(trial.setting.workers, worker_type)

    def _try_at_most(self, setting: Setting, *, above: int) -> SettingTrial | None:
        """Measure `setting`, or one with fewer workers, more than `above`, where the memory holds no more."""
        for workers in range(setting.workers, above, -1):
            if (trial := self._try(replace(setting, workers=workers))) is not None:
                return trial
        return None

    def _again(self, trial: SettingTrial, more: SettingTrial) -> tuple[SettingTrial, SettingTrial]:
        """If more workers seem to gain nothing and that is uncertain, measure both once more, interleaved."""
        is_clear = more.samples_per_s >= (1 + SAME_SPEED) * trial.samples_per_s or error_of_lag(trial, more) < _UNSURE
        if is_clear or self._is_long():
            return trial, more
        for setting in (trial.setting, more.setting):
            self.bench.forget(setting)
        for setting in (trial.setting, more.setting, more.setting, trial.setting):
            self._try(setting)
        return self.trials.get(trial.setting, trial), self.trials.get(more.setting, more)

    def _climb_down(self, workers: int, worker_type: WorkerType) -> None:
        """Find out whether fewer workers are as fast: the step may need the cores that they take."""
        best = self.trials[Setting(workers=workers, worker_type=worker_type)]
        while workers > 2:
            workers = _fewer(workers)
            fewer = self.trials.get(Setting(workers=workers, worker_type=worker_type)) or self._try(
                Setting(workers=workers, worker_type=worker_type)
            )
            if fewer is None or fewer.samples_per_s < (1 - SAME_SPEED) * best.samples_per_s:
                break
            best = max(best, fewer, key=speed)
        self.why = self.why or "fewer workers make the step wait"

    def _is_stalled_or_short(self) -> bool:
        return self._best().stall_fraction > _HIDDEN or bool(self.left_out)

    def _try_threads(self) -> None:
        """Measure whether two threads make more than one; if so, climb with threads."""
        one = self._try(Setting(workers=1, worker_type="thread"))
        if one is None or self.most == 1:
            return
        two = self._try(Setting(workers=2, worker_type="thread"))
        if two is None:
            return
        gain = (2 / max(1e-9, two.work_s)) / (1 / max(1e-9, one.work_s))
        self.gil = f"two threads make {gain:.1f} times what one makes"
        best = self._best()
        is_worth_it = self.waits or gain >= _THREADS_PAY
        if not is_worth_it or two.stall_fraction <= _HIDDEN or best.setting.worker_type == "inline":
            return
        why = self.why
        workers = min(self.most, max(3, best.setting.workers))
        trial = self._try(Setting(workers=workers, worker_type="thread")) if workers > 2 else None
        if trial is not None and trial.stall_fraction > _HIDDEN:
            self._climb_up(trial, "thread")
        self.why = why if self._best().setting.worker_type != "thread" else self.why

    def _try_prefetch(self) -> None:
        """Let workers prefetch more, if the step waits at times although workers have time to spare."""
        best = self._best()
        if best.setting.worker_type == "inline":
            return
        for prefetch in _PREFETCHES:
            trial = self._try(replace(best.setting, prefetch_factor=prefetch))
            if trial is None or trial.samples_per_s < (1 + SAME_SPEED) * best.samples_per_s:
                return
            best = trial

    def _try_device(self) -> None:
        """Try pinned slots and batches that are copied ahead, if there is an accelerator."""
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if here is None:
            return
        best = self._choose().setting
        self.bench.forget(best)
        self.device = f"pin_memory and device={here.type!r} were tried with the best"
        for _ in range(_ROUNDS):
            for setting in (best, replace(best, pin_memory=True), replace(best, device=here.type)):
                try:
                    self._try(setting, 2.0)
                except (PenstockError, RuntimeError) as error:  # the step may expect its batches on the host
                    self.report(f"{setting.describe()}: {error}")
                    continue
        settings = (best, replace(best, pin_memory=True), replace(best, device=here.type))
        self.finalists = [self.trials[setting] for setting in settings if setting in self.trials]

    # ── choosing ────────────────────────────────────────────────────────────────────────────────────────────

    def _best(self) -> SettingTrial:
        return max(self.trials.values(), key=speed)

    def _finish(self) -> list[SettingTrial]:
        """Compare trials whose order is uncertain, interleaved; return those whose order still is.

        Only interleaved trials are compared in the end: a machine that was busy for a while was busy for one setting
        and not for another.
        """
        rivals = self._rivals([*self.trials.values()], _DRIFT / 3 if self._is_long() else _DRIFT)
        if not rivals:
            return []
        for trial in rivals:
            self.bench.forget(trial.setting)
        finalists = [trial.setting for trial in rivals]
        for number in range(_ROUNDS):
            for trial in rivals:
                self._try(trial.setting, 1.0 if self._is_long() else 1.5 + number / 2)
            self.finalists = [self.trials[setting] for setting in finalists if setting in self.trials]
            rivals = self._rivals(self.finalists, 0.0)
            if not rivals or self._is_long():
                break
        return rivals

    def _rivals(self, trials: list[SettingTrial], drift: float) -> list[SettingTrial]:
        """Return the trials to repeat, because they might be better than the current choice; the choice comes first.

        `drift`: the fraction by which a trial may be too slow because the machine was busy, for cheaper settings, and
        for those with more workers if the choice lets the step wait.
        """
        best, choice = max(trials, key=speed), cheapest_of_fastest(trials)
        doubtful = [
            trial
            for trial in trials
            if trial.setting != choice.setting
            and (
                (cost(trial) < cost(choice) and lag(trial, best) - error_of_lag(trial, best) < max(SAME_SPEED, drift))
                or (
                    lag(choice, trial) + error_of_lag(choice, trial) > _UNSURE
                    and lag(trial, best) < max(_UNSURE, error_of_lag(trial, best))
                )
                or (
                    choice.stall_fraction > _HIDDEN
                    and trial.setting.workers > choice.setting.workers
                    and lag(trial, best) < drift
                )
            )
        ]
        if not doubtful:
            return []
        return [choice, *sorted(doubtful, key=speed, reverse=True)[: _FINALISTS - 1]]

    def _choose(self) -> SettingTrial:
        return without_doubtful_threads(self.finalists or [*self.trials.values()])

    def _doubt(self, choice: SettingTrial, rivals: list[SettingTrial]) -> str:
        if choice.error > _UNSURE:
            return (
                f"samples/s are known to {choice.error:.0%} only: batches take {choice.batch_ms[0]:.1f} to "
                f"{choice.batch_ms[2]:.1f} ms; the machine is busy, or samples differ much"
            )
        others = [trial for trial in rivals if trial.setting != choice.setting]
        if others:
            return f"{others[0].setting.describe()} may be as good: the difference is within the noise"
        return ""


def _most_workers(cpus: int, busy: float, *, may_crowd: bool) -> int:
    """Return the most workers that keep the CPUs busy; twice what waits beside those, if they may crowd.

    Waits come as they come: with just as many, a CPU has often nothing to do.

    >>> [_most_workers(4, busy, may_crowd=True) for busy in (1.0, 0.5, 0.01)]
    [4, 12, 64]
    >>> [_most_workers(4, busy, may_crowd=False) for busy in (1.0, 0.5, 0.01)]
    [4, 8, 64]
    """
    idle = cpus / max(1 / _WORKERS_PER_CPU, busy) - cpus
    return min(_MOST_WORKERS, math.floor(cpus + (2 if may_crowd else 1) * idle))


def _more(workers: int) -> int:
    return workers + 1 if workers < _SMALL else 2 * workers


def _fewer(workers: int) -> int:
    return workers - 1 if workers <= _SMALL else workers - max(2, workers // 4)
