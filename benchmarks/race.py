"""How it is measured: laps of penstock, torch and others, interleaved so that a noisy machine is noisy for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from benchmarks.ceiling import ceiling
from benchmarks.contestants import OURS, TORCH, WORKERS, Contestant
from benchmarks.fresh import forked
from benchmarks.laps import Consumer, Lap, lap
from benchmarks.served import PeerFailedError, served
from benchmarks.workloads import Workload

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What this run of the benchmark was asked for."""

    quick: bool
    way: str
    peers: tuple[Contestant, ...] = ()

    @property
    def repeats(self) -> int:
        """How many rounds each comparison has."""
        return 3 if self.quick else 5


@dataclass(frozen=True, kw_only=True)
class Race(Generic[T]):
    """What every contestant did in each round, and who dropped out."""

    rounds: dict[str, list[T]]
    notes: list[str]

    def figures(self, figure: Callable[[T], float]) -> dict[str, list[float]]:
        """Return one number of each round."""
        return {name: [figure(each) for each in rounds] for name, rounds in self.rounds.items()}


def interleave(runs: Mapping[str, Callable[[], T]], repeats: int) -> Race[T]:
    """Run all once per round, in an order that is reversed from round to round; a peer that fails drops out."""
    found: dict[str, list[T]] = {name: [] for name in runs}
    notes = []
    for number in range(repeats):
        names = list(found)
        for name in reversed(names) if number % 2 else names:
            try:
                found[name].append(runs[name]())
            except PeerFailedError as error:
                del found[name]
                notes.append(f"{name} dropped out: {error}")
    return Race(rounds=found, notes=notes)


def race(
    plan: Plan,
    workload: Workload,
    *,
    workers: int = WORKERS,
    way: str | None = None,
    peers: bool = True,
    bound: str | None = None,
) -> Race[Lap]:
    """Race penstock, torch and the peers over `workload`, all of them open at once, each warmed up by one epoch.

    Penstock and torch load into one process, which is fresh, so that neither finds a heap that another row has shaped;
    every peer has a process of its own (`benchmarks.served` says why). Where there is a `bound`, the workload's ceiling
    runs in the same rounds, under that name.
    """
    chosen = tuple(peer for peer in plan.peers if peers and peer.suits(workload))
    return forked(lambda: _race(plan.repeats, way or plan.way, chosen, workload, workers, bound))


def _race(
    repeats: int, way: str, peers: tuple[Contestant, ...], workload: Workload, workers: int, bound: str | None
) -> Race[Lap]:
    notes = []
    runs: dict[str, Callable[[], Lap]] = {}
    with ExitStack() as stack:
        # The ceiling comes first: its processes are forks of this one, which has no loader yet.
        bounds = {bound: stack.enter_context(ceiling(workload))} if bound else {}
        for contestant in (OURS, TORCH):
            epochs = stack.enter_context(contestant.open(workload, workers=workers))
            runs[contestant.name] = partial(lap, epochs, Consumer(way))
        for peer in peers:
            try:
                runs[peer.name] = stack.enter_context(served(peer, workload, way))
            except PeerFailedError as error:
                notes.append(f"{peer.name} did not start: {error}")
        runs.update(bounds)
        warm_up = interleave(runs, 1)
        ran = interleave({name: runs[name] for name in warm_up.rounds}, repeats)
        runs.clear()
    _check_batches(ran.rounds, workload)
    return Race(rounds=ran.rounds, notes=notes + warm_up.notes + ran.notes)


def _check_batches(rounds: Mapping[str, list[Lap]], workload: Workload) -> None:
    for name, laps in rounds.items():
        if any(one.batches != workload.batches for one in laps):
            counts = [one.batches for one in laps]
            raise RuntimeError(f"{name} gave {counts} batches of {workload.name}, an epoch has {workload.batches}")
