"""A failure alarm reaches all ranks once, whatever passes each of them has begun."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore

from penstock.core.errors import RankError
from penstock.distributed import failure_alarm, rank_news
from penstock.distributed.failure_alarm import FailureAlarm
from penstock.distributed.rank_news import RankNews


@pytest.fixture
def news(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RankNews]]:
    """Return the news of two ranks, over a real store."""
    monkeypatch.setattr(rank_news, "POLL_S", 0.02)
    monkeypatch.setattr(failure_alarm, "_HEARD_S", 1000.0)
    # libuv keeps a pipe for the whole process.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
    made = [RankNews(rank, 2, store.clone()) for rank in range(2)]  # type: ignore[attr-defined]
    yield made
    while made:
        made.pop().close()
    del store


def received(one: FailureAlarm) -> str:
    """Wait for the error of another rank, and return its text."""
    while True:
        try:
            one.check()
        except RankError as error:
            return str(error)
        time.sleep(0.01)


def test_a_rank_receives_which_other_rank_failed_and_its_error(
    news: list[RankNews], capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = map(FailureAlarm, news)
    first.signal(ValueError("sample 3 is empty"))
    words = "the loader of rank 0 failed: ValueError: sample 3 is empty"
    assert received(first) == received(second) == f"{words}; no rank can continue without it"
    assert capfd.readouterr().err == f"penstock: rank 1 has received: {words}\n"


def test_the_rank_that_fails_does_not_go_on_before_the_others_know(news: list[RankNews]) -> None:
    first, second = map(FailureAlarm, news)
    waiting = threading.Thread(target=first.signal, args=(ValueError("sample 3 is empty"),))
    waiting.start()
    assert "sample 3 is empty" in received(second)
    waiting.join()
    assert news[0].call_store("add", "penstock/news/0/heard", 0) == 2


def test_a_rank_that_has_begun_a_pass_alone_is_still_heard(news: list[RankNews]) -> None:
    second = FailureAlarm(news[1])
    FailureAlarm(news[0]).close()
    first = FailureAlarm(news[0])
    first.signal(ValueError("of its second pass"))
    first.close()
    assert "of its second pass" in received(second)


def test_a_failure_in_one_pass_is_not_signalled_in_the_next(news: list[RankNews]) -> None:
    first, second = map(FailureAlarm, news)
    first.signal(ValueError("of the first pass"))
    assert "of the first pass" in received(first)
    assert "of the first pass" in received(second)
    first.signal(KeyError("also of the first pass, which all ranks leave"))
    third, fourth = map(FailureAlarm, news)
    third.signal(KeyError("of the second pass"))
    assert "of the second pass" in received(fourth)


def test_an_alarm_without_its_store_does_nothing() -> None:
    def gone(*_: object) -> bool:
        raise OSError("connection reset")

    alarm = FailureAlarm(RankNews(0, 2, type("Gone", (), {"check": gone, "compare_set": gone})()))
    alarm.signal(ValueError("nobody hears it"))
    alarm.check()
    alarm.close()
