"""The search: a few short trials predict, a climb from there corrects, and the best are compared by turns.

    1  no workers             ▶ what a batch costs, what the step takes: is there anything to gain?
    2  one process            ▶ handing over, memory; work / (step + handing over) says how many would do
    3  as many as that        ▶ one more while it gains, one fewer while it costs nothing
    4  one thread, two        ▶ only where the step still waits, or memory is short: is the GIL released?
    5  prefetch               ▶ more only while the step waits, less where memory is short
    6  the best three by turns, longer each time, until they differ by more than their error

Of what is equally fast, the fewest workers and the least memory win: a worker that hides behind the step costs a core.
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
from penstock.tune.budget import Budget
from penstock.tune.result import Tuned
from penstock.tune.setting import Body, Setting
from penstock.tune.subject import Subject
from penstock.tune.trial import Stand, Trial

_SAME = 0.02
"""Loops whose speeds differ by less are equally fast."""

_HIDDEN = 0.03
"""A step that waits for less of its time has nothing to gain."""

_THREADS_PAY = 1.4
"""Two threads make so many times what one makes, where a dataset releases the GIL."""

_MOST_WORKERS = 32
_ASLEEP = 8
"""At most so many workers share a processor, however much they sleep."""

_PREFETCHES = (4, 8)
_FINALISTS = 4
_ROUNDS = 2
_UNSURE = 0.05
_DRIFT = 0.3
_LONG_S = 6.0
"""A search that has taken so long leaves prefetch, compares its finalists once, and says what it could not tell."""


def tune(
    subject: Subject,
    *,
    ram_nbytes: int | None = None,
    cpus: int | None = None,
    trial_s: float = 0.25,
    say: Callable[[str], None] = lambda words: None,
) -> Tuned:
    """Find the setting with which the subject's loop is fastest, and of equally fast ones the one that takes least.

    Args:
        subject: the loader and the step.
        ram_nbytes: the most memory that workers and batches may take; half of what is available by default.
        cpus: the most processors that workers may keep busy; those that this process may use by default. Workers that
            sleep count for what they run: with samples that wait for storage there may be up to eight for each.
        trial_s: how long a trial is at least.
        say: called with a line for each trial.

    Raises:
        OptionError: the budget does not hold two batches, or the loader has none.
    """
    if cpus is not None and cpus < 1:
        raise OptionError(f"at least one CPU is needed, not {cpus}")
    most = cpus if cpus is not None else usable_cores()
    ram = available_nbytes() // 2 if ram_nbytes is None else ram_nbytes
    with Stand(subject, most=min(_MOST_WORKERS, _ASLEEP * most), tidy=ram_nbytes is not None) as stand:
        return _Search(subject, stand, ram, most, trial_s, say).run()


@dataclass(slots=True)
class _Search:
    subject: Subject
    stand: Stand
    ram_nbytes: int
    cpus: int
    trial_s: float
    say: Callable[[str], None]
    trials: dict[Setting, Trial] = field(default_factory=dict)
    left_out: dict[Setting, int] = field(default_factory=dict)
    gil: str = ""
    why: str = ""
    device: str = "no accelerator is here, so pin_memory and device= were not tried"
    budget: Budget = field(init=False)
    most: int = field(init=False)
    """The most workers: as many as keep the processors busy."""
    began: float = 0.0
    finalists: list[Trial] = field(default_factory=list)

    def run(self) -> Tuned:
        self.began, self.most = time.perf_counter(), min(_MOST_WORKERS, self.cpus)
        context = self.subject.loader.multiprocessing_context or torch.multiprocessing.get_context()
        self.budget = Budget(self.ram_nbytes, context.get_start_method() or "fork")
        alone = self._try(Setting())
        assert alone is not None
        if self.budget.needed_nbytes(Setting()) > self.ram_nbytes:
            raise OptionError(
                f"two batches take {size_text(self.budget.needed_nbytes(Setting()))}, and the budget is "
                f"{size_text(self.ram_nbytes)}; raise --ram or lower batch_size"
            )
        if alone.stall_share <= _HIDDEN:
            self.why = f"the step waits for {alone.stall_share:.1%} of its time without any worker: nothing to gain"
        else:
            self._climb("process")
            if self.subject.can_take_threads and self._is_stalled_or_short():
                self._try_threads()
            if self._best().stall_share > _HIDDEN and not self._is_long():
                self._try_prefetch()
        finalists = self._finish()
        self._try_device()
        choice = self._choose()
        return Tuned(
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

    def _try(self, setting: Setting, longer: float = 1.0) -> Trial | None:
        """Measure `setting` (again); None when it would take, or was seen to take, more memory than allowed."""
        is_new = setting not in self.trials
        if is_new and setting.workers and not self.budget.allows(setting):
            self.left_out[setting] = self.budget.needed_nbytes(setting)
            return None
        trial = self.stand.measure(setting, at_least_s=self.trial_s * longer, at_most_s=4 * self.trial_s * longer)
        if is_new:
            self.budget.learn(trial)
        if trial.setting.workers and trial.ram_nbytes > self.ram_nbytes:
            self.stand.close()
            self.trials.pop(setting, None)
            self.left_out[setting] = trial.ram_nbytes
            return None
        self.trials[setting] = trial
        self.say(
            f"{setting.words()}: {trial.samples_per_s:.0f} samples/s ± {trial.error:.0%}, "
            f"the step waits {trial.stall_share:.0%} of the time"
        )
        return trial

    def _is_long(self) -> bool:
        return time.perf_counter() - self.began > _LONG_S

    def _climb(self, body: Body) -> None:
        """Go to as many workers as one shows to be needed, then up while it gains, or down while it costs nothing."""
        first = self._try(Setting(workers=1, body=body))
        if first is None:
            self.why = f"the budget holds no {body}"
            return
        if body == "process":
            self.most = min(_MOST_WORKERS, math.floor(self.cpus / max(1 / _ASLEEP, first.busy_share)))
        if first.stall_share <= _HIDDEN or self.most == 1:
            self.why = "one worker hides all loading behind the step" if self.most > 1 else "there is one CPU"
            return
        loop_s = first.step_s + first.handling_s
        workers = min(self.most, max(2, math.ceil(first.work_s / max(1e-9, loop_s))))
        while workers > 1 and (trial := self._try(Setting(workers=workers, body=body))) is None:
            workers -= 1
        if workers == 1:
            self.why = "the budget holds one worker"
        elif trial is not None and trial.stall_share > _HIDDEN:
            self._climb_up(trial, body)
        else:
            self._climb_down(workers, body)

    def _climb_up(self, trial: Trial, body: Body) -> None:
        while trial.stall_share > _HIDDEN:
            workers = trial.setting.workers + 1
            if workers > self.most:
                self.why = f"{self.most} workers are all that may run"
                break
            more = self._try(replace(trial.setting, workers=workers))
            if more is None:
                self.why = f"the budget of {size_text(self.ram_nbytes)} holds {workers - 1} workers"
                break
            trial, more = self._again(trial, more)
            if more.samples_per_s < (1 + _SAME) * trial.samples_per_s:
                self.why = f"{workers} workers gain less than the noise over {workers - 1}"
                break
            trial = more
        else:
            self.why = f"{trial.setting.workers} workers hide all loading behind the step"
        if trial.stall_share > _HIDDEN and trial.setting.workers > 2:
            self._climb_down(trial.setting.workers, body)

    def _again(self, trial: Trial, more: Trial) -> tuple[Trial, Trial]:
        """Where more workers seem to gain nothing and nobody can be sure of it, measure both again, by turns."""
        is_clear = more.samples_per_s >= (1 + _SAME) * trial.samples_per_s or _unsure(trial, more) < _UNSURE
        if is_clear or self._is_long():
            return trial, more
        for setting in (trial.setting, more.setting):
            self.stand.forget(setting)
        for setting in (trial.setting, more.setting, more.setting, trial.setting):
            self._try(setting)
        return self.trials.get(trial.setting, trial), self.trials.get(more.setting, more)

    def _climb_down(self, workers: int, body: Body) -> None:
        """Find out whether fewer are as good: the cores that workers take may be the step's."""
        best = self.trials[Setting(workers=workers, body=body)]
        while workers > 2:
            workers -= 1
            fewer = self.trials.get(Setting(workers=workers, body=body)) or self._try(
                Setting(workers=workers, body=body)
            )
            if fewer is None or fewer.samples_per_s < (1 - _SAME) * best.samples_per_s:
                break
            best = max(best, fewer, key=_speed)
        self.why = self.why or "one worker fewer makes the step wait"

    def _is_stalled_or_short(self) -> bool:
        return self._best().stall_share > _HIDDEN or bool(self.left_out)

    def _try_threads(self) -> None:
        """Look whether two threads make more than one; if so, climb with threads."""
        one = self._try(Setting(workers=1, body="thread"))
        if one is None or self.most == 1:
            return
        two = self._try(Setting(workers=2, body="thread"))
        if two is None:
            return
        gain = (2 / max(1e-9, two.work_s)) / (1 / max(1e-9, one.work_s))
        self.gil = f"two threads make {gain:.1f} times what one makes"
        best = self._best()
        if gain < _THREADS_PAY or two.stall_share <= _HIDDEN or best.setting.body == "inline":
            return
        why = self.why
        workers = min(self.most, max(3, best.setting.workers))
        trial = self._try(Setting(workers=workers, body="thread")) if workers > 2 else None
        if trial is not None and trial.stall_share > _HIDDEN:
            self._climb_up(trial, "thread")
        self.why = why if self._best().setting.body != "thread" else self.why

    def _try_prefetch(self) -> None:
        """While the step waits now and then although workers have time to spare, let them run further ahead."""
        best = self._best()
        if best.setting.body == "inline":
            return
        for prefetch in _PREFETCHES:
            trial = self._try(replace(best.setting, prefetch_factor=prefetch))
            if trial is None or trial.samples_per_s < (1 + _SAME) * best.samples_per_s:
                return
            best = trial

    def _try_device(self) -> None:
        """Where there is an accelerator: pinned slots, and batches copied ahead."""
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if here is None:
            return
        best = self._choose().setting
        self.stand.forget(best)
        self.device = f"pin_memory and device={here.type!r} were tried with the best"
        for _ in range(_ROUNDS):
            for setting in (best, replace(best, pin_memory=True), replace(best, device=here.type)):
                try:
                    self._try(setting, 2.0)
                except (PenstockError, RuntimeError) as error:  # the step may expect its batches on the host
                    self.say(f"{setting.words()}: {error}")
                    continue
        settings = (best, replace(best, pin_memory=True), replace(best, device=here.type))
        self.finalists = [self.trials[setting] for setting in settings if setting in self.trials]

    # ── choosing ────────────────────────────────────────────────────────────────────────────────────────────

    def _best(self) -> Trial:
        return max(self.trials.values(), key=_speed)

    def _finish(self) -> list[Trial]:
        """Compare by turns those whose places are not clear; return whose still are not.

        Only what is measured by turns is compared in the end: a machine that was busy for a while was busy for one
        setting and not for another.
        """
        rivals = self._rivals([*self.trials.values()], _DRIFT)
        if not rivals:
            return []
        for trial in rivals:
            self.stand.forget(trial.setting)
        finalists = [trial.setting for trial in rivals]
        for number in range(_ROUNDS):
            for trial in rivals:
                self._try(trial.setting, 1.0 if self._is_long() else 1.5 + number / 2)
            self.finalists = [self.trials[setting] for setting in finalists if setting in self.trials]
            rivals = self._rivals(self.finalists, 0.0)
            if not rivals or self._is_long():
                break
        return rivals

    def _rivals(self, trials: list[Trial], drift: float) -> list[Trial]:
        """Return who must be measured again, because it might yet be chosen, or the choice be given up for it.

        `drift`: by how much others may have been measured at a bad time, if they are cheaper, or if the choice lets the
        step wait and they have more workers.
        """
        best, choice = max(trials, key=_speed), _choice(trials)
        doubtful = [
            trial
            for trial in trials
            if trial.setting != choice.setting
            and (
                (_cost(trial) < _cost(choice) and _behind(trial, best) - _unsure(trial, best) < max(_SAME, drift))
                or (
                    _behind(choice, trial) + _unsure(choice, trial) > _UNSURE
                    and _behind(trial, best) < max(_UNSURE, _unsure(trial, best))
                )
                or (
                    choice.stall_share > _HIDDEN
                    and trial.setting.workers > choice.setting.workers
                    and _behind(trial, best) < drift
                )
            )
        ]
        if not doubtful:
            return []
        return [choice, *sorted(doubtful, key=_speed, reverse=True)[: _FINALISTS - 1]]

    def _choose(self) -> Trial:
        return _choice(self.finalists or [*self.trials.values()])

    def _doubt(self, choice: Trial, rivals: list[Trial]) -> str:
        if choice.error > _UNSURE:
            return (
                f"samples/s are known to {choice.error:.0%} only: batches take {choice.batch_ms[0]:.1f} to "
                f"{choice.batch_ms[2]:.1f} ms; the machine is busy, or samples differ much"
            )
        others = [trial for trial in rivals if trial.setting != choice.setting]
        if others:
            return f"{others[0].setting.words()} may be as good: the difference is within the noise"
        return ""


def _speed(trial: Trial) -> float:
    return trial.samples_per_s


def _choice(trials: list[Trial]) -> Trial:
    """Return the cheapest of those that are as fast as the fastest."""
    fastest = max(trials, key=_speed)
    return min((trial for trial in trials if trial.samples_per_s >= (1 - _SAME) * fastest.samples_per_s), key=_cost)


def _behind(one: Trial, other: Trial) -> float:
    """Return by which share `one` is slower."""
    return 1 - one.samples_per_s / other.samples_per_s


def _unsure(one: Trial, other: Trial) -> float:
    """Return the error of that."""
    return math.hypot(one.error, other.error)


def _cost(trial: Trial) -> tuple[float, ...]:
    """Order settings by what they take: workers (a thread costs less than a process), then memory, then looks ahead."""
    setting = trial.setting
    is_special = setting.pin_memory + (setting.device is not None)
    return (setting.workers + 0.5 * (setting.body == "process"), setting.prefetch_factor, is_special, trial.ram_nbytes)
