"""Runs trials: batches of a loop under one setting, timed in the steady state."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from penstock.core.errors import OptionError
from penstock.loader.dataloader import runtime_of
from penstock.loader.workers.busy_time import process_times
from penstock.observe.meters.host_memory import descendants, pss_nbytes
from penstock.observe.record.rates import statistics_between
from penstock.tune.setting import Setting
from penstock.tune.trial_result import SettingTrial, TrialTotals
from penstock.tune.tuned_loop import ManualWorkers, TunedLoop

_WARM_S = 0.05
_LONG_S = 0.5
_MOST_ROUND = 4
_ROUNDS = 3
_SCALING_BATCHES = 50
"""After this many batches, the number of workers has been reached or will not be."""


class TrialBench:
    """Runs trials of one loop; keeps workers running as long as only their number or the prefetch changes.

    Close it, or use it in a `with`.

    Args:
        loop: the loop that is tuned.
        most: the most workers.
        one_at_a_time: whether to stop the workers of one type before those of another start, to save memory.
    """

    def __init__(self, loop: TunedLoop, *, most: int, one_at_a_time: bool = False) -> None:
        self._loop = loop
        self._most = most
        self._one_at_a_time = one_at_a_time
        self._open: dict[tuple[Any, ...], _LoopRun] = {}
        self._totals: dict[Setting, TrialTotals] = {}
        self._starts_s: list[float] = []
        """How long the start of each worker process took that a loop began with."""
        gc.collect()
        self._base_nbytes = process_tree_nbytes()

    def __enter__(self) -> TrialBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop all workers."""
        while self._open:
            self._open.popitem()[1].close()

    def measure(
        self, setting: Setting, *, at_least_s: float, at_least: int = 16, at_most_s: float = 2.0
    ) -> SettingTrial:
        """Run the loop under `setting` for a while; return what all its trials have shown so far.

        Workers that wait come in step, all batches of a round at once; so only whole rounds are timed, up to
        four times `at_most_s`.

        Raises:
            OptionError: the loader has no batches.
        """
        run = self._run_of(setting)
        totals = self._totals.setdefault(setting, TrialTotals())
        totals.ram_nbytes = max(totals.ram_nbytes, self._ram_nbytes())  # takes so long that batches pile up
        run.settle(setting)
        before, (ran_s, queued_s) = run.loader.statistics(), run.core_times_s()
        at_least = max(at_least, _ROUNDS * setting.workers)
        began = time.perf_counter()
        periods = []
        while True:
            start = time.perf_counter()
            self._loop.run_step(run.next())
            now = time.perf_counter()
            periods.append(now - start)
            enough_s = at_least_s if len(periods) >= at_least else at_most_s
            is_whole = len(periods) % max(1, setting.workers) == 0
            if now - began >= (enough_s if is_whole else max(_MOST_ROUND * at_most_s, enough_s)):
                break
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
            periods[-1] += time.perf_counter() - now
        counted = run.loader.statistics()
        now_ran_s, now_queued_s = run.core_times_s()
        totals.cpu_s += max(0.0, now_ran_s - ran_s)
        totals.without_core_s += max(0.0, now_queued_s - queued_s)
        totals.seen.append(statistics_between(before, counted))
        totals.drained += max(0, before.ring.ready - counted.ring.ready)
        totals.ram_nbytes = max(totals.ram_nbytes, self._ram_nbytes())
        totals.add_periods(periods, setting.workers)
        return self.trial(setting)

    def forget(self, setting: Setting) -> None:
        """Drop the measurements of `setting`: the machine may have been busy when they were made."""
        self._totals.pop(setting, None)

    def trial(self, setting: Setting) -> SettingTrial:
        """Return what all trials of `setting` have shown so far."""
        starts = setting.workers if setting.worker_type == "process" else 0
        start_s = starts * statistics.mean(self._starts_s) if starts else 0.0
        batches = self._loop.batches_per_start
        return self._totals[setting].result(setting, start_s=start_s / batches if batches else 0.0)

    def _run_of(self, setting: Setting) -> _LoopRun:
        key = (setting.worker_type, setting.pin_memory, setting.device)
        if self._one_at_a_time:
            for other in [other for other in self._open if other != key]:
                self._open.pop(other).close()
        run = self._open.get(key)
        if run is not None and not run.change(setting):
            self._open.pop(key).close()
            run = None
        if run is None:
            began = time.perf_counter()
            run = self._open[key] = _LoopRun(self._loop, setting, self._most)
            if setting.worker_type == "process":
                self._starts_s += [(time.perf_counter() - began) / setting.workers] * setting.workers
        return run

    def _ram_nbytes(self) -> int:
        return max(0, process_tree_nbytes() - self._base_nbytes)


class _LoopRun:
    """One loop over one loader, which is paused between trials."""

    def __init__(self, loop: TunedLoop, setting: Setting, most: int) -> None:
        self._loop = loop
        self.loader = loop.build(setting, most=most)
        self._batches: Iterator[Any] = iter(self.loader)
        self._setting = setting
        self._taken = 0

    def next(self) -> Any:
        """Return the next batch; after the last of an epoch, the first of the next."""
        self._taken += 1
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            raise OptionError("the loader has no batches; give one whose dataset and sampler have some") from None

    def core_times_s(self) -> tuple[float, float]:
        """Return the seconds for which its worker processes were on a core so far, and waited for one."""
        pids = [getattr(process, "pid", None) for process in getattr(self._batches, "_workers", [])]
        times = [process_times(pid) or (0, 0) for pid in pids if pid]
        return sum(ran for ran, _ in times) / 1e9, sum(queued for _, queued in times) / 1e9

    def change(self, setting: Setting) -> bool:
        """Switch to `setting` and keep the workers; return False if that is impossible."""
        if setting == self._setting:
            return True
        policy = runtime_of(self.loader).auto_workers
        if setting.workers != self._setting.workers and (
            not isinstance(policy, ManualWorkers) or self.loader.statistics().dispatch != "demand"
        ):
            return False
        if isinstance(policy, ManualWorkers):
            policy.wanted = setting.workers
        dispatch = runtime_of(self.loader).dispatch
        if dispatch is not None:
            dispatch.prefetch_factor = setting.prefetch_factor
        self._setting = setting
        return True

    def settle(self, setting: Setting) -> None:
        """Run, untimed, until the number of workers is reached, prefetched batches are used up, and a round is over."""
        began = time.perf_counter()
        while setting.workers == 0:
            self._loop.run_step(self.next())
            if time.perf_counter() - began > _WARM_S:
                return
        for _ in range(_SCALING_BATCHES):
            self._loop.run_step(self.next())
            if self.loader.statistics().workers == setting.workers:
                break
        ring = self.loader.statistics().ring
        least = min(setting.workers * setting.prefetch_factor, ring.ready + ring.filling) + 1
        for run in range(1, least + setting.workers):
            self._loop.run_step(self.next())
            passed_s = time.perf_counter() - began
            is_over = self._taken % setting.workers == 0 or passed_s > _MOST_ROUND * _LONG_S
            if is_over and (run >= least or passed_s > _LONG_S):  # `drained` accounts for those that are left
                break

    def close(self) -> None:
        """Stop its workers and release its slots."""
        shutdown = getattr(self._batches, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()
        del self._batches
        self.loader._iterator = None
        gc.collect()


def process_tree_nbytes() -> int:
    """Return the proportional set size of this process and all its descendants."""
    return sum(pss_nbytes(pid) or 0 for pid in (os.getpid(), *descendants(os.getpid())))
