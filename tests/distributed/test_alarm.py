"""The alarm between ranks: heard in the pass in which it rings, and in no other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import TCPStore

from penstock.core.errors import RankError
from penstock.distributed import alarm
from penstock.distributed.alarm import Alarm


@pytest.fixture
def in_pass(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[Alarm]]]:
    """Return what makes the alarms of two ranks in the pass with a number."""
    # libuv keeps a pipe for the whole process.
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)]
    monkeypatch.setattr(alarm, "_get_default_store", lambda: stores[0])
    made: list[Alarm] = []

    def make(number: int) -> list[Alarm]:
        for rank in range(2):
            monkeypatch.setattr(alarm, "_passes", itertools.count(number))
            made.append(Alarm(rank))
        return made[-2:]

    yield make
    while made:
        made.pop().close()
    stores.clear()


def heard(one: Alarm) -> str:
    """Return what a rank gets to hear."""
    while True:
        try:
            one.check()
        except RankError as error:
            return str(error)
        time.sleep(0.01)


def test_a_rank_hears_which_other_has_failed_and_how(
    in_pass: Callable[[int], list[Alarm]], capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = in_pass(0)
    first.ring(ValueError("sample 3 is empty"))
    words = "the loader of rank 0 failed: ValueError: sample 3 is empty"
    assert heard(first) == heard(second) == f"{words}; no rank can go on without it"
    assert capfd.readouterr().err == f"penstock: rank 1 has heard that {words}\n"


def test_what_has_failed_in_one_pass_does_not_ring_in_the_next(in_pass: Callable[[int], list[Alarm]]) -> None:
    first, second = in_pass(0)
    first.ring(ValueError("of the first pass"))
    assert "of the first pass" in heard(second)
    third, fourth = in_pass(1)
    third.ring(KeyError("of the second pass"))
    assert "of the second pass" in heard(fourth)


def test_an_alarm_whose_store_has_gone_is_quiet(
    in_pass: Callable[[int], list[Alarm]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> bool:
        raise OSError("connection reset")

    first, _ = in_pass(0)
    monkeypatch.setattr(first, "_store", type("Gone", (), {"check": gone, "set": gone})())
    first.ring(ValueError("nobody hears it"))
    first.check()
