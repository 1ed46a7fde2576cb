"""Signals to stop are noted, and nothing else about signals changes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from penstock.core.errors import OptionError
from penstock.core.signals.stop_signals import StopSignals


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    left = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert left == before


def test_a_signal_is_noted_and_the_handler_of_before_is_called_and_restored() -> None:
    calls: list[Any] = []
    before = signal.signal(signal.SIGUSR1, lambda *arguments: calls.append(arguments[0]))
    own = signal.getsignal(signal.SIGUSR1)
    signals = StopSignals([signal.SIGTERM, signal.SIGUSR1], lambda: calls.append("asked"))
    assert not signals.noted
    signal.raise_signal(signal.SIGUSR1)
    assert signals.noted
    assert calls == ["asked", signal.SIGUSR1]
    signals.close()
    assert signal.getsignal(signal.SIGUSR1) is own
    signal.signal(signal.SIGUSR1, before)


def test_a_process_goes_on_after_a_signal_that_would_have_ended_it() -> None:
    signals = StopSignals([signal.SIGTERM], lambda: None)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert signals.noted
    signals.close()


@pytest.mark.parametrize("first", [0, 1])
def test_several_are_closed_in_any_order(first: int) -> None:
    one = StopSignals([signal.SIGUSR1], lambda: None)
    signal.raise_signal(signal.SIGUSR1)
    both = [one, StopSignals([signal.SIGUSR1], lambda: None)]
    assert both[1].noted  # what came before it
    both.pop(first).close()
    signal.raise_signal(signal.SIGUSR1)  # which ends this process if nobody watches
    both.pop().close()


def test_a_handler_that_was_set_later_stays_and_may_go_on_calling() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: calls.append(number))
    signals = StopSignals([signal.SIGUSR1], lambda: calls.append(-1))
    ours = signal.getsignal(signal.SIGUSR1)
    assert callable(ours)
    later = ours.__call__
    signal.signal(signal.SIGUSR1, later)
    signals.close()
    assert signal.getsignal(signal.SIGUSR1) is later
    signal.raise_signal(signal.SIGUSR1)
    assert calls == [signal.SIGUSR1]
    signal.signal(signal.SIGUSR1, before)


def test_a_forked_process_ends_by_the_signal_as_before() -> None:
    with closing(StopSignals([signal.SIGTERM], lambda: None)) as signals:
        process = os.fork()
        if not process:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGTERM
        assert not signals.noted


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ([signal.SIGUSR1, signal.SIGINT], "SIGINT is Ctrl-C"),
        ([signal.SIGUSR1, signal.SIGKILL], "SIGKILL.* cannot be watched"),
        ([signal.SIGUSR1, 12345], "12345 cannot be watched"),
    ],
)
def test_a_signal_that_must_not_or_cannot_be_watched_is_refused(numbers: list[int], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        StopSignals(numbers, lambda: None)


def test_another_thread_than_the_main_one_is_refused() -> None:
    errors: list[str] = []

    def watch() -> None:
        try:
            StopSignals([signal.SIGUSR1], lambda: None)
        except OptionError as error:
            errors.append(str(error))

    thread = threading.Thread(target=watch, name="trainer")
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "in the main thread only, and this is trainer" in errors[0]
