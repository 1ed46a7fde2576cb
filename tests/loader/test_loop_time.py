"""The time of several loops: each moment once, however they are nested."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from penstock.loader.counters import Counters
from penstock.loader.loop_time import LoopTime
from penstock.observe.live.torch_watch import TimedLoop
from penstock.observe.record import rates


class Slow:
    """Samples that take a millisecond."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.zeros(1)


def loop_s(*loaders: penstock.DataLoader) -> float:
    return rates.total(loader.statistics() for loader in loaders).loop_s


def test_a_loop_within_steps_of_another_is_counted_once() -> None:
    training, validation = penstock.DataLoader(Slow(), 2), penstock.DataLoader(Slow(), 3)
    began = time.perf_counter()
    for _ in training:
        for _ in validation:
            time.sleep(0.002)
    passed_s = time.perf_counter() - began
    outer, inner = training.statistics(), validation.statistics()
    assert outer.stages.nested_s >= 0.9 * inner.loop_s > 0
    assert loop_s(training, validation) <= passed_s


def test_loaders_that_are_zipped_have_their_steps_once() -> None:
    one, other = penstock.DataLoader(Slow(), 2), penstock.DataLoader(Slow(), 2)
    began = time.perf_counter()
    for _ in zip(one, other, strict=True):
        time.sleep(0.01)
    passed_s = time.perf_counter() - began
    assert 0.03 <= loop_s(one, other) <= passed_s
    assert one.statistics().stages.step_s >= 0.03 <= other.statistics().stages.step_s


def test_one_loop_after_another_has_nothing_nested() -> None:
    one, other = penstock.DataLoader(Slow(), 2), penstock.DataLoader(Slow(), 3)
    for _ in range(2):
        list(one)
        list(other)
    assert one.statistics().stages.nested_s == other.statistics().stages.nested_s == 0


def test_a_loop_that_is_left_early_does_not_count_what_comes_after() -> None:
    one, other = penstock.DataLoader(Slow(), 2), penstock.DataLoader(Slow(), 3)
    next(iter(one))
    list(other)
    next(iter(one))
    assert one.statistics().stages.nested_s == 0


def in_another_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def test_steps_that_begin_in_one_thread_and_end_in_another_have_nothing_nested() -> None:
    here = penstock.DataLoader(Slow(), 2)
    list(penstock.DataLoader(Slow(), 3))  # this thread has counted more than those that come
    batches = iter(here)
    for ask in (in_another_thread, lambda call: call(), in_another_thread):
        ask(batches.__next__)
    assert here.statistics().stages.nested_s == 0


def test_a_mark_of_another_thread_says_nothing_whichever_thread_came_first() -> None:
    time_here = LoopTime()
    marks = [time_here.count(time_here.counted_ns, 100), *(in_another_thread(new_mark(time_here)) for _ in range(2))]
    for mark in marks:
        assert in_another_thread(lambda mark=mark: time_here.others_ns(mark, 50)) == 0
    assert [time_here.others_ns(mark - 7, 50) for mark in marks] == [7, 0, 0]


def new_mark(loop_time: LoopTime) -> Callable[[], int]:
    return lambda: loop_time.count(loop_time.counted_ns, 100)


def test_loops_of_torch_within_steps_are_counted_once_too() -> None:
    training, validation = penstock.DataLoader(Slow(), 2), Counters()
    loader = TorchDataLoader(Slow(), 3)  # type: ignore[arg-type]
    for _ in training:
        iterator, timed = iter(loader), TimedLoop(validation, loader)
        for _ in range(2):
            timed.next_batch(iterator.__next__)
        with pytest.raises(StopIteration):
            timed.next_batch(iterator.__next__)
    nested_ns = training.statistics().stages.nested_s * 1e9
    assert nested_ns >= 0.9 * (validation.wait_ns + validation.step_ns) > 0
