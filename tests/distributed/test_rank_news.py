"""Messages reach all ranks in one order, for few requests."""

from __future__ import annotations

import heapq
import threading
from collections import Counter

import pytest
import torch.distributed as dist
from made_ranks import CountedStore, ScriptedNews

from penstock.core.errors import RankError
from penstock.distributed.failure_alarm import FailureAlarm
from penstock.distributed.rank_news import POLL_S, Message, RankNews, store_of_attempt
from penstock.distributed.stop_agreement import StopAgreement


def simulate(world: int, loaders: int, seconds: float, fails_at: float) -> tuple[Counter[int], list[float], int]:
    """Let ranks begin at time 0, by a clock of its own, and one of them fail.

    Returns:
        The requests in each whole second up to the failure; when each rank has heard of it, by its number of seconds
        after the failure; the most requests of one rank.
    """
    store = CountedStore()
    news = [ScriptedNews(rank, world, store.of(rank), clock=lambda: 0.0) for rank in range(world)]
    alarms = [[FailureAlarm(one) for _ in range(loaders)] for one in news]
    due = [(one._due_s, one.rank) for one in news]
    heapq.heapify(due)
    per_second: Counter[int] = Counter()
    heard: dict[int, float] = {}
    most = 0
    while due:
        now, rank = heapq.heappop(due)
        if now >= fails_at and not heard and "penstock/news/0" not in store.values:
            most = max(store.requests.values())
            news[world // 3].post("failure", "of a sample")
        before = store.requests[rank]
        pause = news[rank].ask()
        if now < fails_at:
            per_second[int(now)] += store.requests[rank] - before
        if alarms[rank][-1]._received is not None:
            heard.setdefault(rank, now - fails_at)
        if now + pause < seconds:
            heapq.heappush(due, (now + pause, rank))
    assert len(heard) == world
    return per_second, [heard[rank] for rank in range(world)], most


def test_4096_ranks_with_four_loaders_each_send_half_a_request_a_second_and_rank() -> None:
    per_second, heard, most = simulate(4096, loaders=4, seconds=24, fails_at=20)
    assert [per_second[second] for second in range(20)] == [2047] + [2048] * 19
    assert most == 20 / POLL_S
    assert max(heard) <= POLL_S


def test_passes_of_any_length_send_no_more_requests() -> None:
    store = CountedStore()
    news = RankNews(0, 2, store.of(0), clock=lambda: 0.0)
    for _ in range(50):
        alarm, other = FailureAlarm(news), FailureAlarm(news)
        alarm.close()
        other.close()
    assert store.requests[0] == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock-news"]


def test_messages_that_are_sent_at_once_are_read_by_all_in_the_same_order() -> None:
    store = CountedStore()
    news = [ScriptedNews(rank, 3, store.of(rank)) for rank in range(3)]
    keys = [one.post(kind, "what it says") for one, kind in zip(news, "aba", strict=True)]
    assert keys == ["penstock/news/0", "penstock/news/1", "penstock/news/0"]
    for one in news:
        one.ask()
    expected = [Message("a", 0, "what it says", keys[0] or ""), Message("b", 1, "what it says", keys[1] or "")]
    assert [one.messages for one in news] == [expected] * 3


def test_nothing_is_asked_when_the_store_has_gone() -> None:
    class Gone:
        asked = 0

        def check(self, keys: list[str]) -> bool:
            self.asked += 1
            raise OSError("connection reset")

    gone = Gone()
    news = RankNews(0, 2, gone, clock=lambda: 0.0)
    alarm = FailureAlarm(news)
    news.wake()
    thread = news._thread
    assert thread is not None
    thread.join()
    news.wake()
    assert news.post("failure", "nobody hears it") is None
    alarm.check()
    alarm.close()
    assert gone.asked == 1


ATTEMPT = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize("change", [{"TORCHELASTIC_RESTART_COUNT": "1"}, {"WORLD_SIZE": "1"}])
def test_a_restarted_job_reads_nothing_that_the_attempt_before_has_left_in_a_shared_store(
    change: dict[str, str],
) -> None:
    shared = dist.HashStore()

    def ranks(environment: dict[str, str]) -> list[ScriptedNews]:
        world = int(environment["WORLD_SIZE"])
        return [ScriptedNews(rank, world, store_of_attempt(shared, environment)) for rank in range(world)]

    before = ranks(ATTEMPT)
    agreement, alarm = StopAgreement(before[1], 1.0), FailureAlarm(before[1])
    before[0].post("failure", "of a sample")
    before[0].post("stop", "")
    before[1].ask()
    agreement.end()
    with pytest.raises(RankError, match="of a sample"):
        alarm.check()
    assert agreement._key is not None

    after = ranks(ATTEMPT | change)
    for news in after:
        agreement, alarm = StopAgreement(news, 1.0), FailureAlarm(news)
        news.ask()
        alarm.check()
        assert news.messages == []
        assert not agreement.should_stop()
    assert after[0].post("failure", "a new one") == "penstock/news/0"
