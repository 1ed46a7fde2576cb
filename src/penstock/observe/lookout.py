"""Looks at a run again and again: what all loaders have counted, memory, and the rates of the last seconds."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.core.stats import LoaderStatistics
from penstock.observe import rates
from penstock.observe.device_meter import DeviceMeter
from penstock.observe.host_memory import MemoryMeter
from penstock.observe.pulse import Pulse
from penstock.observe.timeline import Moment
from penstock.observe.watch import Watch, WatchedLoader

if TYPE_CHECKING:
    from penstock.feed.sight import LoopSight

_WINDOW_S = 5.0
"""Rates are those of so many seconds: short enough to follow a change, long enough not to flicker."""

_Counts = dict[WatchedLoader, LoaderStatistics]


class Lookout:
    """Makes pulses. Used by one thread.

    Args:
        watch: the loaders.
        memory: whose latest look at host memory is told.
        command: what is run.
        began: the run's start, by `time.perf_counter`.
        rank: which rank this is, and of how many.
    """

    def __init__(
        self,
        watch: Watch,
        memory: MemoryMeter,
        *,
        command: Sequence[str] = (),
        began: float | None = None,
        rank: tuple[int, int] = (0, 1),
    ) -> None:
        self._watch = watch
        self._memory = memory
        self._devices = DeviceMeter()
        self._command = tuple(command)
        self._began = time.perf_counter() if began is None else began
        self._rank, self._world_size = rank
        self._open: list[WatchedLoader] = []
        self._taken = 0
        self._past: list[LoaderStatistics] = []
        self._past_loading_s = 0.0
        self._window: deque[tuple[Moment, _Counts]] = deque([(Moment(at_s=self.at_s()), {})])
        self._busiest: WatchedLoader | None = None
        self._sights: dict[WatchedLoader, LoopSight] = {}
        self._batches, self._batch_at_s = 0, self.at_s()

    def at_s(self) -> float:
        """Return the seconds since the run's start."""
        return time.perf_counter() - self._began

    def begin(self) -> None:
        """Count rates from now on; what the program did before its first loader is no loop."""
        self._window[0] = (Moment(at_s=self.at_s()), {})
        self._batch_at_s = self.at_s()

    def look(self) -> Pulse:
        """Look once. Costs some ten microseconds for each loader that is in use."""
        at_s = self.at_s()
        counts = self._counts()
        moment = self._moment(at_s, counts)
        if moment.batches != self._batches:
            self._batches, self._batch_at_s = moment.batches, at_s
        while len(self._window) > 1 and at_s - self._window[1][0].at_s >= _WINDOW_S:
            self._window.popleft()
        earlier, before = self._window[0]
        self._window.append((moment, counts))
        return self._pulse(moment, counts, earlier, before)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _counts(self) -> _Counts:
        """Return what the loaders in use have counted; what the others had is kept as one sum."""
        loaders = self._watch.loaders
        self._open += loaders[self._taken : (taken := len(loaders))]
        self._taken = taken
        over = [loader for loader in self._open if loader.is_over]  # looked at before they are counted a last time
        counts = {loader: loader.statistics() for loader in self._open}
        if over:
            self._open = [loader for loader in self._open if loader not in over]
            last = [counts[loader] for loader in over]
            self._past = [rates.together([*self._past, *last])]
            self._past_loading_s += sum(map(rates.loading_s, last))
            for loader in over:
                self._sights.pop(loader, None)
        return counts

    def _moment(self, at_s: float, counts: _Counts) -> Moment:
        every = [*self._past, *(counts[loader] for loader in self._open)]
        for loader in self._open:
            sight = loader.sight()
            if sight is not None:
                self._sights[loader] = sight
        sights = self._sights.values()
        device = self._devices.look()
        loading_s = self._past_loading_s + sum(rates.loading_s(counts[loader]) for loader in self._open)
        return Moment(
            at_s=at_s,
            batches=sum(one.batches for one in every),
            samples=sum(one.samples for one in every),
            nbytes=sum(one.nbytes for one in every),
            stages=rates.total_stages(one.stages for one in every),
            loading_s=loading_s,
            ready=sum(sight.ready for sight in sights),
            held=sum(sight.held for sight in sights),
            workers=sum(sight.workers for sight in sights),
            working=sum(sight.working for sight in sights),
            slots_nbytes=sum(sight.slots_nbytes for sight in sights),
            host_nbytes=self._memory.latest_nbytes,
            device_nbytes=device.nbytes,
            device_reserved_nbytes=device.reserved_nbytes,
            device_busy=device.busy,
        )

    def _pulse(self, moment: Moment, counts: _Counts, earlier: Moment, before: _Counts) -> Pulse:
        window_s = moment.at_s - earlier.at_s
        stages = rates.stages_between(earlier.stages, moment.stages)
        loading_s = moment.loading_s - earlier.loading_s
        loop_s = loading_s + stages.step_s
        nothing = LoaderStatistics()
        lately = {loader: now.samples - before.get(loader, nothing).samples for loader, now in counts.items()}
        busiest = max(lately, key=lambda loader: lately[loader], default=None)
        if busiest is not None and lately[busiest]:
            self._busiest = busiest
        pulse = Pulse(
            pid=os.getpid(),
            command=self._command,
            rank=self._rank,
            world_size=self._world_size,
            moment=moment,
            window_s=window_s,
            samples_per_s=(moment.samples - earlier.samples) / window_s if window_s > 0 else 0.0,
            batches_per_s=(moment.batches - earlier.batches) / window_s if window_s > 0 else 0.0,
            stall_share=loading_s / loop_s if loop_s > 0 else 0.0,
            stages=stages,
            starting=sum(sight.starting for sight in self._sights.values()),
            restarts=sum(one.restarts for one in [*self._past, *(counts[loader] for loader in self._open)]),
            processes=self._memory.peak().processes,
            since_batch_s=moment.at_s - self._batch_at_s,
        )
        loader = self._busiest
        return pulse if loader is None else _placed(pulse, loader.name, counts.get(loader) or loader.statistics())


def _placed(pulse: Pulse, name: str, now: LoaderStatistics) -> Pulse:
    """Return the pulse with the place that a loader has come to."""
    done, epoch, eta_s = now.batches, now.epochs + 1, None
    if now.length:
        epochs = max(0, min(now.epochs, (now.batches - 1) // now.length))  # what was handed out last is of this one
        done, epoch = min(now.batches - epochs * now.length, now.length), epochs + 1
        eta_s = (now.length - done) / pulse.batches_per_s if pulse.batches_per_s else None
    return replace(pulse, loader=name, epoch=epoch, batch=done, length=now.length, eta_s=eta_s)
