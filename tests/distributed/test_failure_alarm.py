"""A failure alarm reaches all ranks once, whatever passes each of them has begun."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import TCPStore

from penstock.core.errors import RankError
from penstock.distributed import failure_alarm
from penstock.distributed.failure_alarm import FailureAlarm


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[FailureAlarm]]]:
    """Return what makes the alarms of two ranks after so many failures."""
    # libuv keeps a pipe for the whole process.
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)]
    monkeypatch.setattr(failure_alarm, "_get_default_store", lambda: stores[0])
    made: list[FailureAlarm] = []

    def make(number: int) -> list[FailureAlarm]:
        monkeypatch.setattr(failure_alarm, "_failures", number)
        made.extend(FailureAlarm(rank, 2) for rank in range(2))
        return made[-2:]

    yield make
    while made:
        made.pop().close()
    stores.clear()


def received(one: FailureAlarm) -> str:
    """Wait for the error of another rank, and return its text."""
    while True:
        try:
            one.check()
        except RankError as error:
            return str(error)
        time.sleep(0.01)


def test_a_rank_receives_which_other_rank_failed_and_its_error(
    after: Callable[[int], list[FailureAlarm]], capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = after(0)
    first.signal(ValueError("sample 3 is empty"))
    words = "the loader of rank 0 failed: ValueError: sample 3 is empty"
    assert received(first) == received(second) == f"{words}; no rank can continue without it"
    assert capfd.readouterr().err == f"penstock: rank 1 has received: {words}\n"


def test_the_rank_that_fails_does_not_go_on_before_the_others_know(
    after: Callable[[int], list[FailureAlarm]], capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = after(0)
    first.signal(ValueError("sample 3 is empty"))
    with pytest.raises(RankError, match="sample 3 is empty"):
        second.check()
    assert "rank 1 has received" in capfd.readouterr().err


def test_a_rank_that_has_begun_a_pass_alone_is_still_heard(after: Callable[[int], list[FailureAlarm]]) -> None:
    _, second = after(0)
    FailureAlarm(0, 2).close()
    first = FailureAlarm(0, 2)
    first.signal(ValueError("of its second pass"))
    first.close()
    assert "of its second pass" in received(second)
    assert failure_alarm._failures == 1


def test_a_failure_in_one_pass_is_not_signalled_in_the_next(after: Callable[[int], list[FailureAlarm]]) -> None:
    first, second = after(0)
    first.signal(ValueError("of the first pass"))
    assert "of the first pass" in received(second)
    third, fourth = after(1)
    third.signal(KeyError("of the second pass"))
    assert "of the second pass" in received(fourth)


def test_an_alarm_without_its_store_does_nothing(
    after: Callable[[int], list[FailureAlarm]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> bool:
        raise OSError("connection reset")

    first, _ = after(0)
    monkeypatch.setattr(first, "_store", type("Gone", (), {"check": gone, "set": gone, "add": gone})())
    first.signal(ValueError("nobody hears it"))
    first.check()
