"""A Ctrl-C that comes while Python would lose it is raised afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from penstock.core.signals.interrupts import hold_interrupts


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Have a program's own handler of SIGINT note the signals that reach it."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_raised_at_the_end_and_once() -> None:
    reached = []

    def interrupted() -> None:
        with hold_interrupts():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            reached.append("end")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reached == ["end"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_the_programs_own_handler_is_called_and_put_back(handled: list[int]) -> None:
    own = signal.getsignal(signal.SIGINT)
    with hold_interrupts():
        signal.raise_signal(signal.SIGINT)
        assert handled == []
    assert handled == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is own


def test_an_interrupt_is_not_lost_to_an_error_of_the_body() -> None:
    def interrupted() -> None:
        with hold_interrupts():
            signal.raise_signal(signal.SIGINT)
            raise OSError("no process")

    with pytest.raises(KeyboardInterrupt) as raised:
        interrupted()
    assert isinstance(raised.value.__context__, OSError)


def test_a_program_that_ignores_interrupts_is_not_interrupted() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with hold_interrupts():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_leaves_the_handler_alone(handled: list[int]) -> None:
    own, seen = signal.getsignal(signal.SIGINT), []

    def hold() -> None:
        with hold_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert seen == [own]
