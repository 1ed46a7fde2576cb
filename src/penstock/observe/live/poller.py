"""Polls a run: the counters of all loaders, memory and devices, and the rates of the last seconds."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.core.stats import LoaderStatistics
from penstock.observe.live.live_snapshot import LiveSnapshot
from penstock.observe.live.loader_registry import LoaderRegistry, RegisteredLoader
from penstock.observe.meters.device_meter import DeviceMeter
from penstock.observe.meters.host_memory import MemoryMeter
from penstock.observe.record import rates
from penstock.observe.record.timeline import TimelinePoint

if TYPE_CHECKING:
    from penstock.observe.live.loop_snapshot import LoopSnapshot

_WINDOW_S = 5.0
"""Window over which rates are measured: short enough to follow a change, long enough not to flicker."""

_MAX_ETA_S = 30 * 86_400
"""Nobody waits for the end of a longer epoch: its sampler is long so that it never ends."""

_Counters = dict[RegisteredLoader, LoaderStatistics]


class RunPoller:
    """Makes live snapshots of a run. Used by one thread.

    Args:
        registry: the loaders.
        memory: its last measurement becomes part of each snapshot.
        command: what is run.
        began: the run's start, by `time.perf_counter`.
        rank: rank and world size.
        launch: see `LiveSnapshot`.
        devices: reads the accelerators; by default a meter of its own.
    """

    def __init__(
        self,
        registry: LoaderRegistry,
        memory: MemoryMeter,
        *,
        command: Sequence[str] = (),
        began: float | None = None,
        rank: tuple[int, int] = (0, 1),
        launch: str = "",
        devices: DeviceMeter | None = None,
    ) -> None:
        self._registry = registry
        self._memory = memory
        self._devices = DeviceMeter() if devices is None else devices
        self._command = tuple(command)
        self._began = time.perf_counter() if began is None else began
        self._rank, self._world_size = rank
        self._launch = launch
        self._open: list[RegisteredLoader] = []
        self._taken = 0
        self._finished: list[LoaderStatistics] = []
        self._finished_loading_s = 0.0
        self._window: deque[tuple[TimelinePoint, _Counters]] = deque([(TimelinePoint(at_s=self.elapsed_s()), {})])
        self._busiest: RegisteredLoader | None = None
        self._loops: dict[RegisteredLoader, LoopSnapshot] = {}
        self._batches, self._batch_at_s = 0, self.elapsed_s()

    def elapsed_s(self) -> float:
        """Return the seconds since the run's start."""
        return time.perf_counter() - self._began

    def restart_window(self) -> None:
        """Measure rates from now on: the program's work before its first loader is not part of a loop."""
        self._window[0] = (TimelinePoint(at_s=self.elapsed_s()), {})
        self._batch_at_s = self.elapsed_s()

    def poll(self) -> LiveSnapshot:
        """Return the current state. Costs tens of microseconds for each loader in use."""
        at_s = self.elapsed_s()
        counters = self._read_counters()
        now = self._read_point(at_s, counters)
        if now.batches != self._batches:
            self._batches, self._batch_at_s = now.batches, at_s
        while len(self._window) > 1 and at_s - self._window[1][0].at_s >= _WINDOW_S:
            self._window.popleft()
        earlier, before = self._window[0]
        self._window.append((now, counters))
        return self._snapshot(now, counters, earlier, before)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _read_counters(self) -> _Counters:
        """Return the counters of loaders in use; those of finished loaders are kept as one sum."""
        loaders = self._registry.loaders
        self._open += loaders[self._taken : (taken := len(loaders))]
        self._taken = taken
        # Before their counters are read: a loader that finishes in between is read once more at the next poll.
        finished = [loader for loader in self._open if loader.is_finished]
        counters = {loader: loader.statistics(digests=False) for loader in self._open}
        if finished:
            self._open = [loader for loader in self._open if loader not in finished]
            last = [counters[loader] for loader in finished]
            self._finished = [rates.combine_statistics([*self._finished, *last])]
            self._finished_loading_s += sum(one.loading_s for one in last)
            for loader in finished:
                self._loops.pop(loader, None)
        return counters

    def _read_point(self, at_s: float, counters: _Counters) -> TimelinePoint:
        every = [*self._finished, *(counters[loader] for loader in self._open)]
        for loader in self._open:
            loop = loader.loop_snapshot()
            if loop is not None:
                self._loops[loader] = loop
        loops = self._loops.values()
        device = self._devices.read()
        loading_s = self._finished_loading_s + sum(counters[loader].loading_s for loader in self._open)
        return TimelinePoint(
            at_s=at_s,
            batches=sum(one.batches for one in every),
            samples=sum(one.samples for one in every),
            nbytes=sum(one.nbytes for one in every),
            stages=rates.total_stages(one.stages for one in every),
            loading_s=loading_s,
            ready=sum(loop.ready for loop in loops),
            held=sum(loop.held for loop in loops),
            workers=sum(loop.workers for loop in loops),
            working=sum(loop.working for loop in loops),
            slots_nbytes=sum(loop.slots_nbytes for loop in loops),
            host_nbytes=self._memory.latest_nbytes,
            device_nbytes=device.nbytes,
            device_peak_nbytes=device.peak_nbytes,
            device_reserved_nbytes=device.reserved_nbytes,
            device_utilization=device.utilization,
        )

    def _snapshot(
        self, now: TimelinePoint, counters: _Counters, earlier: TimelinePoint, before: _Counters
    ) -> LiveSnapshot:
        window_s = now.at_s - earlier.at_s
        stages = rates.stages_between(earlier.stages, now.stages)
        loading_s = now.loading_s - earlier.loading_s
        loop_s = loading_s + stages.step_s
        nothing = LoaderStatistics()
        recent = {loader: one.samples - before.get(loader, nothing).samples for loader, one in counters.items()}
        busiest = max(recent, key=lambda loader: recent[loader], default=None)
        if busiest is not None and recent[busiest]:
            self._busiest = busiest
        snapshot = LiveSnapshot(
            pid=os.getpid(),
            command=self._command,
            rank=self._rank,
            world_size=self._world_size,
            launch=self._launch,
            now=now,
            window_s=window_s,
            samples_per_s=(now.samples - earlier.samples) / window_s if window_s > 0 else 0.0,
            batches_per_s=(now.batches - earlier.batches) / window_s if window_s > 0 else 0.0,
            stall_fraction=loading_s / loop_s if loop_s > 0 else 0.0,
            stages=stages,
            starting=sum(loop.starting for loop in self._loops.values()),
            restarts=sum(one.restarts for one in [*self._finished, *(counters[loader] for loader in self._open)]),
            processes=self._memory.peak().processes,
            since_batch_s=now.at_s - self._batch_at_s,
        )
        loader = self._busiest
        if loader is None:
            return snapshot
        self._registry.iterated()  # it has a number from now on
        is_watched = loader.iterator_kind in ("own", "fallback")
        snapshot = replace(snapshot, loader=loader.name, made_at=loader.made_at, is_watched=is_watched)
        counted = counters.get(loader) or loader.statistics()
        return with_position(replace(snapshot, copy_wait_s=counted.copy_wait_s), counted)


def with_position(snapshot: LiveSnapshot, counted: LoaderStatistics) -> LiveSnapshot:
    """Return the snapshot with the epoch and batch of its loader, which has counted `counted`."""
    done, epoch, eta_s = counted.batches, counted.epochs + 1, None
    if counted.length:
        # The last batch of an epoch still belongs to it: `epochs` may count that epoch already.
        epochs = max(0, min(counted.epochs, (counted.batches - 1) // counted.length))
        done, epoch = min(counted.batches - epochs * counted.length, counted.length), epochs + 1
        eta_s = (counted.length - done) / snapshot.batches_per_s if snapshot.batches_per_s else None
        if eta_s is not None and eta_s > _MAX_ETA_S:
            eta_s = None
    return replace(snapshot, epoch=epoch, batch=done, length=counted.length, eta_s=eta_s)
