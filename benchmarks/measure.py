"""How it is measured: laps of one epoch each, interleaved between contestants, with a consumer that reads the data."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from benchmarks.contestants import OURS, TORCH, WORKERS, Contestant, Epochs
from benchmarks.served import PeerFailedError, served
from benchmarks.workloads import Workload

CACHE_LINE_NBYTES = 64


@dataclass(frozen=True, kw_only=True)
class Lap:
    """One epoch: how long it took, and how much CPU (user and system) the process that consumed it spent."""

    seconds: float
    cpu_s: float
    batches: int


class Consumer:
    """What the loop does with a batch.

    `touch` reads one byte of every cache line, the least that a step can do. `copy` copies the batch once into a buffer
    that is reused, as pinning it would. `drop` does not look at it.
    """

    WAYS = ("touch", "copy", "drop")

    def __init__(self, way: str) -> None:
        if way not in self.WAYS:
            raise ValueError(f"a consumer touches, copies or drops a batch, it does not {way!r}")
        self._way = way
        self._buffer = np.empty(0, np.uint8)
        self.seen = 0

    def __call__(self, batch: Any) -> None:
        """Consume one batch: a tensor, an array, or a list, tuple or dict of them."""
        if self._way == "drop":
            return
        for array in _arrays(batch):
            flat = array.reshape(-1).view(np.uint8)
            if self._way == "touch":
                self.seen ^= int(np.bitwise_xor.reduce(flat[::CACHE_LINE_NBYTES]))
                continue
            if len(self._buffer) < len(flat):
                self._buffer = np.zeros(len(flat), np.uint8)
            self._buffer[: len(flat)] = flat


def lap(epochs: Epochs, consume: Consumer) -> Lap:
    """Run one epoch."""
    gc.collect()
    batches = 0
    cpu, start = time.process_time(), time.perf_counter()
    for batch in epochs:
        consume(batch)
        batches += 1
    return Lap(seconds=time.perf_counter() - start, cpu_s=time.process_time() - cpu, batches=batches)


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
class Race[T]:
    """What every contestant did in each round, and who dropped out."""

    rounds: dict[str, list[T]]
    notes: list[str]

    def figures(self, figure: Callable[[T], float]) -> dict[str, list[float]]:
        """Return one number of each round."""
        return {name: [figure(each) for each in rounds] for name, rounds in self.rounds.items()}


def interleave[T](runs: Mapping[str, Callable[[], T]], repeats: int) -> Race[T]:
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
    beside: Mapping[str, Callable[[], Lap]] | None = None,
) -> Race[Lap]:
    """Race penstock, torch and the peers over `workload`, all of them open at once, each warmed up by one epoch.

    Penstock and torch load into this process; every peer has a process of its own (`benchmarks.served` says why).
    `beside` are further runs for the same rounds, such as a ceiling.
    """
    way = way or plan.way
    notes = []
    runs: dict[str, Callable[[], Lap]] = {}
    with ExitStack() as stack:
        for contestant in (OURS, TORCH):
            epochs = stack.enter_context(contestant.open(workload, workers=workers))
            runs[contestant.name] = partial(lap, epochs, Consumer(way))
        for peer in plan.peers if peers else ():
            if peer.suits(workload):
                try:
                    runs[peer.name] = stack.enter_context(served(peer, workload, way))
                except PeerFailedError as error:
                    notes.append(f"{peer.name} did not start: {error}")
        runs.update(beside or {})
        warm_up = interleave(runs, 1)
        ran = interleave({name: runs[name] for name in warm_up.rounds}, plan.repeats)
        runs.clear()
    _check_batches(ran.rounds, workload)
    return Race(rounds=ran.rounds, notes=notes + warm_up.notes + ran.notes)


def _check_batches(rounds: Mapping[str, list[Lap]], workload: Workload) -> None:
    for name, laps in rounds.items():
        if any(one.batches != workload.batches for one in laps):
            counts = [one.batches for one in laps]
            raise RuntimeError(f"{name} gave {counts} batches of {workload.name}, an epoch has {workload.batches}")


def _arrays(batch: Any) -> Iterator[np.ndarray]:
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, list | tuple):
        yield from chain.from_iterable(map(_arrays, batch))
    else:
        yield batch if isinstance(batch, np.ndarray) else batch.numpy()
