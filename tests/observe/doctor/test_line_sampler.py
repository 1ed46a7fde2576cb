"""Looking at lines by a timer's signal, and what the time limit does with it."""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
import signal
import sys
import threading
import time
from types import CodeType, SimpleNamespace
from typing import Any

import pytest

from penstock.observe.doctor.probes import timer_signal
from penstock.observe.doctor.probes.line_sampler import LineSampler, find_line
from penstock.observe.doctor.probes.repeated_reads import ReadRecorder
from penstock.observe.doctor.probes.sample_cost import SampleProbe
from penstock.observe.doctor.probes.time_limit import time_limit
from penstock.observe.doctor.probes.timer_signal import TimerSignal


def _look(sampler: LineSampler, frame: Any, looks: int = 1) -> None:
    sampler._is_on = True
    for _ in range(looks):
        sampler.look(0, frame)
    sampler._is_on = False


@pytest.mark.parametrize(("looks", "paused", "seen"), [(20, 0, 1), (0, 20, 0), (9, 20, 0)])
def test_what_the_thread_does_while_the_sampler_is_paused_counts_for_nothing(
    looks: int, paused: int, seen: int
) -> None:
    sampler = LineSampler()
    for number in range(looks + paused):
        sampler.is_paused = number >= looks
        _look(sampler, sys._getframe())
    assert len(sampler.lines()) == seen, "9 looks are too few to tell"


def _frame(code: CodeType, line: int | None, caller: Any = None) -> Any:
    return SimpleNamespace(f_code=code, f_lineno=line, f_lasti=10_000, f_globals={"__name__": "lib"}, f_back=caller)


def test_an_instruction_that_belongs_to_no_line_is_that_of_the_line_before() -> None:
    code = _look.__code__
    file, number, function = find_line(_frame(code, None)) or ("", 0, "")
    assert (file, number) == (__file__, max(line for _, _, line in code.co_lines() if line is not None))
    assert function == "_look"


def test_what_a_line_calls_does_not_divide_its_time() -> None:
    sampler = LineSampler()
    user = _frame(_look.__code__, 7)
    for library in (json.loads, gzip.open, json.dumps) * 5:
        _look(sampler, _frame(library.__code__, 1, user))
    (line,) = sampler.lines()
    assert line.fraction == pytest.approx(1.0)
    assert line.calls.startswith("lib.")


def test_what_the_doctors_own_hooks_take_inside_of_a_line_is_that_lines() -> None:
    hook = _frame(ReadRecorder.note.__code__, 1, _frame(json.loads.__code__, 1, _frame(_look.__code__, 7)))
    assert (find_line(hook) or ())[:2] == (__file__, 7)
    loader = _frame(SampleProbe.run.__code__, 1, _frame(_look.__code__, 7))
    assert find_line(loader) is None, "a library's dataset is no line of the program that has its loader"


def test_the_alarms_of_a_program_are_its_own_while_it_is_examined() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: called.append(number))
    try:
        with time_limit(60.0, TimeoutError), LineSampler() as sampler:
            sampler.start()  # once more
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            while not (called and sampler.looks):
                time.sleep(0.001)
        assert called == [signal.SIGALRM]
        assert signal.getsignal(signal.SIGALRM) not in (signal.SIG_DFL, None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_without_the_kernels_timers_a_program_that_has_set_an_alarm_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_signal, "_library", lambda: None)
    timer = TimerSignal(60.0, lambda *_: None, 0)
    before = signal.getsignal(signal.SIGALRM)
    assert timer.start()
    assert signal.getitimer(signal.ITIMER_REAL)[1] == 60.0
    timer.stop()
    assert (signal.getitimer(signal.ITIMER_REAL)[0], signal.getsignal(signal.SIGALRM)) == (0.0, before)
    signal.setitimer(signal.ITIMER_REAL, 3600.0)
    try:
        assert not timer.start()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_another_thread_than_the_main_one_gets_no_signals_and_no_lines() -> None:
    started: list[bool] = []
    thread = threading.Thread(target=lambda: started.append(TimerSignal(60.0, lambda *_: None, 0).start()))
    thread.start()
    thread.join()
    assert started == [False]


def test_what_penstock_does_in_a_garbage_collection_is_the_line_that_caused_it() -> None:
    seen = []

    class Noting:
        def __eq__(self, other: object) -> bool:  # called by gc.callbacks.remove, in the frame of time_limit
            seen.append(find_line(sys._getframe().f_back))
            return False

        def __call__(self, phase: str, info: object) -> None:
            """Is a callback as any."""

    gc.callbacks.insert(0, Noting())
    try:
        with contextlib.suppress(TimeoutError), time_limit(60.0, TimeoutError):
            pass
    finally:
        del gc.callbacks[0]
    assert seen
    assert all(line is not None and line[0] == __file__ for line in seen)
