"""A trial: some batches of a loop under one setting, timed in the steady state."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from penstock.core.errors import OptionError
from penstock.core.stats import LoaderStatistics
from penstock.observe.host_memory import cpu_s, descendants, pss_nbytes
from penstock.observe.rates import since
from penstock.tune.setting import Setting
from penstock.tune.subject import Held, Subject

_BLOCKS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What one setting showed, over all the times it was tried."""

    setting: Setting
    """What was tried."""

    samples_per_s: float
    """Of the loop, the step included."""

    error: float
    """How far off that may be, as a share of it: two standard errors of the mean of blocks of batches."""

    stall_share: float
    """The share of the loop's time in which the step waited for data, or data was made instead."""

    batch_ms: tuple[float, float, float]
    """Of the batches' periods: the lower quartile, the median, the upper quartile."""

    ram_nbytes: int
    """What workers and batches took beyond the training process, at most; a page shared by n counts once."""

    batches: int
    """How many were timed."""

    work_s: float
    """Making a batch, summed over its workers."""

    handling_s: float
    """In the training process, for a batch: giving out work and taking it in."""

    step_s: float
    """The step."""

    batch_nbytes: int
    """Of tensors and arrays in a batch."""

    mode: str = ""
    """How work was given out."""

    busy_share: float = 1.0
    """Of the time in which worker processes made batches, that on a processor: they may sleep, and wait for storage."""


@dataclass(slots=True)
class _Tally:
    """What was seen of one setting so far."""

    periods_s: list[float]
    blocks_s: list[float]
    seen: list[LoaderStatistics]
    ram_nbytes: int
    mode: str
    cpu_s: float = 0.0
    """What worker processes ran."""
    drained: int = 0
    """Batches that were used and had been made before: the loop was faster for so long than its workers."""


class Stand:
    """Runs trials of one subject; keeps the workers of a body as long as only their number or the prefetch changes.

    Args:
        subject: what is tuned.
        most: the most workers.
        tidy: whether to stop one body's workers before another's are measured, for the sake of memory.

    To be closed, or used in a `with`.
    """

    def __init__(self, subject: Subject, *, most: int, tidy: bool = False) -> None:
        self._subject = subject
        self._most = most
        self._tidy = tidy
        self._open: dict[tuple[Any, ...], _Run] = {}
        self._tallies: dict[Setting, _Tally] = {}
        gc.collect()
        self._base_nbytes = family_nbytes()

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop all workers."""
        while self._open:
            self._open.popitem()[1].close()

    def measure(self, setting: Setting, *, at_least_s: float, at_least: int = 16, at_most_s: float = 2.0) -> Trial:
        """Run a loop under `setting` for a while and return what all loops under it have shown so far.

        Raises:
            OptionError: the loader has no batches.
        """
        run = self._run_of(setting)
        tally = self._tallies.setdefault(setting, _Tally([], [], [], 0, ""))
        before, ran_s = run.loader.statistics(), run.cpu_s()
        tally.ram_nbytes = max(tally.ram_nbytes, self._ram_nbytes())
        began = time.perf_counter()
        periods = []
        while True:
            start = time.perf_counter()
            self._subject.run_step(run.next())
            now = time.perf_counter()
            periods.append(now - start)
            if now - began >= (at_least_s if len(periods) >= at_least else at_most_s):
                break
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
            periods[-1] += time.perf_counter() - now
        counted = run.loader.statistics()
        tally.cpu_s += max(0.0, run.cpu_s() - ran_s)
        tally.seen.append(since(before, counted))
        tally.drained += max(0, before.ring.ready - counted.ring.ready)
        tally.mode = counted.dispatch
        tally.ram_nbytes = max(tally.ram_nbytes, self._ram_nbytes())
        tally.periods_s += periods
        size = max(1, len(periods) // _BLOCKS)
        tally.blocks_s += [statistics.fmean(periods[at : at + size]) for at in range(0, len(periods), size)]
        return self.trial(setting)

    def forget(self, setting: Setting) -> None:
        """Begin anew with `setting`: what it showed was shown while the machine did other things."""
        self._tallies.pop(setting, None)

    def trial(self, setting: Setting) -> Trial:
        """Return what `setting` has shown so far."""
        tally = self._tallies[setting]
        batches = sum(one.batches for one in tally.seen)
        per_batch = 1 / max(1, batches)
        total_s = sum(tally.periods_s)
        mean_s = total_s / max(1, len(tally.periods_s) - tally.drained)
        late_s = len(tally.periods_s) * mean_s - total_s
        samples = sum(one.samples for one in tally.seen) * per_batch
        blocks = tally.blocks_s
        spread_s = statistics.stdev(blocks) / len(blocks) ** 0.5 if len(blocks) > 2 else mean_s / 4
        low, middle, high = statistics.quantiles(tally.periods_s, n=4) if len(tally.periods_s) > 1 else [mean_s] * 3
        stages = [one.stages for one in tally.seen]
        work_s = sum(one.fetch_s + one.collate_s for one in stages)
        is_known = setting.body == "process" and work_s > 0
        return Trial(
            setting=setting,
            samples_per_s=samples / mean_s,
            error=2 * spread_s / mean_s,
            stall_share=min(1.0, (sum(map(_waited_s, tally.seen)) + late_s) / (total_s + late_s)),
            batch_ms=(low * 1e3, middle * 1e3, high * 1e3),
            ram_nbytes=tally.ram_nbytes,
            batches=batches,
            work_s=work_s * per_batch,
            handling_s=sum(one.transport_s for one in stages) * per_batch,
            step_s=sum(one.step_s for one in stages) * per_batch,
            batch_nbytes=round(sum(one.nbytes for one in tally.seen) * per_batch),
            mode=tally.mode,
            busy_share=min(1.0, tally.cpu_s / work_s) if is_known else 1.0,
        )

    def _run_of(self, setting: Setting) -> _Run:
        key = (setting.body, setting.pin_memory, setting.device, setting.ring_bytes)
        if self._tidy:
            for other in [other for other in self._open if other != key]:
                self._open.pop(other).close()
        run = self._open.get(key)
        if run is not None and not run.change(setting):
            self._open.pop(key).close()
            run = None
        if run is None:
            run = self._open[key] = _Run(self._subject, setting, self._most)
        run.settle(setting)
        return run

    def _ram_nbytes(self) -> int:
        return max(0, family_nbytes() - self._base_nbytes)


class _Run:
    """A loop over one loader, in pieces."""

    def __init__(self, subject: Subject, setting: Setting, most: int) -> None:
        self._subject = subject
        self.loader = subject.build(setting, most=most)
        self._batches: Iterator[Any] = iter(self.loader)
        self._setting = setting

    def next(self) -> Any:
        """Return the next batch, of the next epoch where one ends."""
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            raise OptionError("the loader has no batches; give one whose dataset and sampler have some") from None

    def cpu_s(self) -> float:
        """Return what its worker processes have run so far, in seconds."""
        processes = getattr(self._batches, "_workers", [])
        return sum(cpu_s(process.pid) for process in processes if getattr(process, "pid", None))

    def change(self, setting: Setting) -> bool:
        """Go over to `setting` with the workers that are there; return False where that cannot be."""
        if setting == self._setting:
            return True
        regulator = self.loader._regulator
        if setting.workers != self._setting.workers and (
            not isinstance(regulator, Held) or self.loader.statistics().dispatch != "demand"
        ):
            return False
        if isinstance(regulator, Held):
            regulator.wanted = setting.workers
        if self.loader._learned is not None:
            self.loader._learned.prefetch_factor = setting.prefetch_factor
        self._setting = setting
        return True

    def settle(self, setting: Setting) -> None:
        """Run, untimed, until the workers asked for are at work and what was made before is used up."""
        began = time.perf_counter()
        while setting.workers == 0:
            self._subject.run_step(self.next())
            if time.perf_counter() - began > _WARM_S:
                return
        for _ in range(_PATIENCE):
            self._subject.run_step(self.next())
            if self.loader.statistics().workers == setting.workers:
                break
        ring = self.loader.statistics().ring
        for _ in range(min(setting.workers * setting.prefetch_factor, ring.ready + ring.filling) + 1):
            self._subject.run_step(self.next())
            if time.perf_counter() - began > _LONG_S:  # what is left of it, `drained` allows for
                break

    def close(self) -> None:
        """Stop its workers and let go of its slots."""
        shutdown = getattr(self._batches, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()
        del self._batches
        self.loader._iterator = None
        gc.collect()


_WARM_S = 0.05
_LONG_S = 0.5
_PATIENCE = 50
"""Batches after which the number of workers has been reached, or will not be."""


def _waited_s(counted: LoaderStatistics) -> float:
    """Return how long the step waited; handing over is left out, for no number of workers makes it less."""
    stages = counted.stages
    return stages.wait_s + (stages.fetch_s + stages.collate_s if counted.body == "inline" else 0.0)


def family_nbytes() -> int:
    """Return the proportional set size of this process and all that it started."""
    return sum(pss_nbytes(pid) or 0 for pid in (os.getpid(), *descendants(os.getpid())))
