"""Measure loaders in interleaved rounds, so that noise on the machine affects all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from benchmarks.adapters import OURS, TORCH, WORKERS, DataLoaderAdapter, LoaderAdapter
from benchmarks.ceiling import ceiling
from benchmarks.epoch_timing import Consumer, EpochTiming, time_epoch
from benchmarks.fresh_process import forked
from benchmarks.served import PeerFailedError, served
from benchmarks.workloads import Workload

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of one run of the benchmark."""

    quick: bool
    consumer: str
    peers: tuple[LoaderAdapter, ...] = ()

    @property
    def repeats(self) -> int:
        """How many rounds each comparison has."""
        return 3 if self.quick else 5


@dataclass(frozen=True, kw_only=True)
class Timings(Generic[T]):
    """What each loader did in each round, and which loaders failed."""

    rounds: dict[str, list[T]]
    notes: list[str]

    def figures(self, figure: Callable[[T], float]) -> dict[str, list[float]]:
        """Return one number of each round."""
        return {name: [figure(each) for each in rounds] for name, rounds in self.rounds.items()}


def interleave(runs: Mapping[str, Callable[[], T]], repeats: int) -> Timings[T]:
    """Run all once per round, reversing the order from round to round; a peer that fails is left out from then on."""
    found: dict[str, list[T]] = {name: [] for name in runs}
    notes = []
    for number in range(repeats):
        names = list(found)
        for name in reversed(names) if number % 2 else names:
            try:
                found[name].append(runs[name]())
            except PeerFailedError as error:
                del found[name]
                notes.append(f"{name} failed: {error}")
    return Timings(rounds=found, notes=notes)


def time_loaders(
    options: RunOptions,
    workload: Workload,
    *,
    workers: int = WORKERS,
    consumer: str | None = None,
    peers: bool = True,
    bound: str | None = None,
    copying: bool = False,
    also: tuple[DataLoaderAdapter, ...] = (),
) -> Timings[EpochTiming]:
    """Time penstock, torch, `also` and the peers on `workload`, all of them open at once, each after one warm-up epoch.

    Penstock and torch load into one process, which is fresh, so that no other case has shaped its heap; every
    peer has a process of its own (`benchmarks.served` says why). Where there is a `bound`, the workload's ceiling
    runs in the same rounds, under that name; `copying` says which (`benchmarks.ceiling`).
    """
    chosen = tuple(peer for peer in options.peers if peers and peer.supports(workload))
    return forked(
        lambda: _time_loaders(
            options.repeats, consumer or options.consumer, also, chosen, workload, workers, bound, copying
        )
    )


def _time_loaders(
    repeats: int,
    consumer: str,
    also: tuple[DataLoaderAdapter, ...],
    peers: tuple[LoaderAdapter, ...],
    workload: Workload,
    workers: int,
    bound: str | None,
    copying: bool,
) -> Timings[EpochTiming]:
    notes = []
    runs: dict[str, Callable[[], EpochTiming]] = {}
    with ExitStack() as stack:
        # The ceiling comes first: its processes are forks of this one, which has no loader yet.
        bounds = {bound: stack.enter_context(ceiling(workload, copying=copying))} if bound else {}
        for adapter in (OURS, TORCH, *also):
            epochs = stack.enter_context(adapter.open(workload, workers=workers))
            runs[adapter.name] = partial(time_epoch, epochs, Consumer(consumer))
        for peer in peers:
            try:
                runs[peer.name] = stack.enter_context(served(peer, workload, consumer))
            except PeerFailedError as error:
                notes.append(f"{peer.name} did not start: {error}")
        runs.update(bounds)
        warm_up = interleave(runs, 1)
        ran = interleave({name: runs[name] for name in warm_up.rounds}, repeats)
        runs.clear()
    _check_batches(ran.rounds, workload)
    return Timings(rounds=ran.rounds, notes=notes + warm_up.notes + ran.notes)


def _check_batches(rounds: Mapping[str, list[EpochTiming]], workload: Workload) -> None:
    for name, epochs in rounds.items():
        if any(one.batches != workload.batches for one in epochs):
            counts = [one.batches for one in epochs]
            raise RuntimeError(f"{name} gave {counts} batches of {workload.name}, an epoch has {workload.batches}")
