"""Locks that all workers share, noted in one process."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probe_results import HotLine, SampleCosts, SharedLock
from penstock.observe.doctor.probes import held_locks
from penstock.observe.doctor.probes.held_locks import LockRecorder
from penstock.observe.doctor.trial import AS_IS, FREE, MORE_WORKERS, TimingWindow, Trial


class Clock:
    """Seconds that the samples let pass."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(held_locks, "time", clock)
    return clock


def _recorded(make: Callable[[], Any]) -> SharedLock | None:
    recorder = LockRecorder()
    for _ in range(3):
        with recorder.sample():
            make()
    return recorder.result()


def _fraction_of(lock: AbstractContextManager[Any], clock: Clock) -> float | None:
    def make() -> None:
        clock.wait(1.0)
        with lock:
            clock.wait(2.0)
            with lock if isinstance(lock, type(multiprocessing.RLock())) else nullcontext():
                clock.wait(1.0)

    found = _recorded(make)
    return None if found is None else found.fraction


def test_the_time_under_a_lock_between_processes_is_a_fraction_of_the_samples(clock: Clock) -> None:
    assert _fraction_of(multiprocessing.Lock(), clock) == 0.75
    assert _fraction_of(multiprocessing.RLock(), clock) == 0.75


def test_locks_of_one_process_and_semaphores_let_others_work(clock: Clock) -> None:
    assert _fraction_of(threading.Lock(), clock) is None
    assert _fraction_of(multiprocessing.Semaphore(4), clock) is None


@pytest.mark.parametrize(("unlocks", "fraction"), [(True, 0.25), (False, 0.75)])
def test_the_lock_of_a_file_is_held_until_it_is_unlocked_or_the_file_is_closed(
    unlocks: bool, fraction: float, clock: Clock, tmp_path: Path
) -> None:
    fcntl = pytest.importorskip("fcntl")
    before = fcntl.flock

    def make() -> None:
        clock.wait(1.0)
        with (tmp_path / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            clock.wait(1.0)
            if unlocks:
                fcntl.flock(file, fcntl.LOCK_UN)
            clock.wait(2.0)

    found = _recorded(make)
    assert found is not None
    assert (found.fraction, "fcntl.LOCK_EX" in found.line) == (fraction, True)
    assert fcntl.flock is before


def _findings(
    lock: SharedLock | None,
    *,
    num_workers: int = 4,
    tries_more: bool = False,
    is_hidden: bool = False,
    lines: tuple[HotLine, ...] = (),
) -> list[str]:
    slow = TimingWindow(batches=10, wall_s=1.0, wait_s=0.9, step_s=0.1)
    free = TimingWindow(batches=10, wall_s=0.1, wait_s=0.0, step_s=0.1)
    if is_hidden:  # other programs have the processors for most of the step
        slow = free = TimingWindow(batches=10, wall_s=1.0, wait_s=0.0, step_s=1.0, queued_s=0.95)
    more = Trial(name=MORE_WORKERS, windows=(slow, slow) if tries_more else ())
    samples = SampleCosts(
        samples=99, batch_samples=16, sample_s=0.005, median_s=0.005, sleep_fraction=0.9, shared_lock=lock, lines=lines
    )
    found = diagnose(
        Measurements(
            name="",
            machine=Machine(cores=2, others_cores=2.0),
            settings=Settings(dataset="D", num_workers=num_workers, start_method="fork", batch_size=16),
            has_step=True,
            samples=samples,
            trials=(Trial(name=AS_IS, windows=(slow, slow)), Trial(name=FREE, windows=(free, free)), more),
        )
    )
    return [finding.name for finding in found.findings]


def test_more_workers_are_not_advised_where_one_lock_lets_one_of_them_work() -> None:
    assert _findings(None) == ["too-few-workers"]
    assert _findings(SharedLock(line="train.py:8: with self.lock:", fraction=0.95)) == ["workers-do-not-scale"]


def test_a_lock_that_all_workers_wait_for_comes_before_what_is_done_under_it() -> None:
    line = HotLine(line="train.py:9: raw = zlib.decompress(packed)", fraction=0.6)
    lock = SharedLock(line="train.py:8: self.lock.acquire()", fraction=0.95)
    assert _findings(lock, lines=(line,)) == ["workers-do-not-scale", "decompressed-for-each-sample"]
    assert _findings(None, lines=(line,))[0] == "decompressed-for-each-sample"


def test_a_lock_that_is_held_for_less_than_the_workers_need_is_no_limit() -> None:
    assert _findings(SharedLock(line="train.py:8: with self.lock:", fraction=0.5), num_workers=2) == ["too-few-workers"]


def test_workers_for_samples_that_wait_are_advised_where_a_delayed_step_hides_what_they_gain() -> None:
    assert _findings(None, tries_more=True) == []
    assert _findings(None, tries_more=True, is_hidden=True) == ["too-few-workers"]


@pytest.mark.parametrize("kind", [multiprocessing.Lock, multiprocessing.RLock])
def test_a_lock_that_is_taken_by_a_call_is_held_until_it_is_released(kind: Callable[[], Any], clock: Clock) -> None:
    lock = kind()

    def make() -> None:
        clock.wait(1.0)
        if lock.acquire(timeout=5.0):
            clock.wait(2.0)
            lock.release()
        clock.wait(1.0)

    before = lock.acquire
    found = _recorded(make)
    assert found is not None
    assert (found.fraction, "lock.acquire" in found.line) == (0.5, True)
    assert lock.acquire is before
    assert lock.acquire(block=False), "it was given back"
    lock.release()
