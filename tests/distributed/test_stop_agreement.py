"""Ranks that are asked to stop do so at the same step, whatever the order of events."""

from __future__ import annotations

import random

import pytest
from made_ranks import CountedStore, ScriptedNews

from penstock.core.errors import RankError
from penstock.distributed.stop_agreement import StopAgreement


class Job:
    """Ranks whose steps, and whose requests for news, a test puts in any order.

    Args:
        world: how many ranks.
        lead: how many steps a rank may have begun more than the slowest; a collective in each step allows one.
        steps: of each rank; it then ends.
    """

    def __init__(self, world: int, lead: int, steps: int) -> None:
        self.store = CountedStore()
        self.news = [ScriptedNews(rank, world, self.store.of(rank)) for rank in range(world)]
        self.agreements: list[StopAgreement | None] = [None] * world
        self.calls = [0] * world
        self.stopped: list[int | None] = [None] * world
        self.ended = [False] * world
        self._lead, self._steps = lead, steps

    def step(self, rank: int) -> bool:
        """Have a rank do a step and ask whether to stop; return False if it has to wait or has ended."""
        if self.ended[rank] or self.calls[rank] + 1 - min(self.calls) > self._lead:
            return False
        if self.agreements[rank] is None:
            self.agreements[rank] = StopAgreement(self.news[rank], 0)
        agreement = self.agreements[rank]
        assert agreement is not None
        if not agreement.is_ready():
            return False
        self.calls[rank] += 1
        if agreement.should_stop():
            self.stopped[rank] = self.calls[rank]
        if self.stopped[rank] or self.calls[rank] == self._steps:
            self.news[rank].close()
            self.ended[rank] = True
        return True

    def ask(self, rank: int) -> None:
        """Have a rank's thread ask for news, unless the rank has ended."""
        if not self.ended[rank]:
            self.news[rank].ask()


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("lead", [1, 3, 1000])
def test_all_ranks_stop_at_the_same_step_and_none_waits_for_ever(world: int, lead: int) -> None:
    stops = set()
    for seed in range(60):
        chance = random.Random(seed)
        steps = chance.choice([5, 20, 60])
        job = Job(world, lead, steps)
        signals = {
            chance.randrange(steps * world * 2): rank for rank in range(world) if rank == 0 or chance.random() < 0.5
        }
        asks = chance.choice([0.1, 0.5, 0.9])
        event = 0
        while not all(job.ended):
            assert event < 100_000, f"seed {seed}: ranks wait for each other"
            rank = signals.get(event, chance.randrange(world))
            agreement = job.agreements[rank]
            if event in signals and agreement is not None and not job.ended[rank]:
                agreement.ask()
            if chance.random() < asks:
                job.ask(rank)
            else:
                job.step(rank)
            event += 1
        assert len({*job.stopped}) == 1, f"seed {seed}: {job.stopped}"
        stops.add(job.stopped[0])
    assert None in stops
    assert len(stops) > 10


def test_steps_send_nothing_before_somebody_is_asked_to_stop() -> None:
    job = Job(2, 1, 1000)
    while not all(job.ended):
        for rank in range(2):
            job.step(rank)
    assert [*job.store.values] == ["penstock/left/0", "penstock/left/1"]
    assert [*job.store.requests.values()] == [1, 1]


def test_ranks_stop_at_the_next_step_of_the_one_that_is_ahead() -> None:
    job = Job(3, 1000, 1000)
    for rank, calls in enumerate([4, 9, 6]):
        for _ in range(calls):
            assert job.step(rank)
    assert job.agreements[2] is not None
    job.agreements[2].ask()
    for rank in (2, 1):
        job.ask(rank)
        assert not job.step(rank)
    for rank in (0, 1, 2):
        job.ask(rank)
    assert job.step(1)
    for _ in range(4):
        assert job.step(2)
    for _ in range(5):
        assert job.step(0)
    assert not job.step(0)  # it may serve the store, and has not read that the others know
    job.ask(0)
    assert job.step(0)
    assert job.stopped == [10, 10, 10]


def test_a_rank_that_begins_after_another_was_asked_stops_with_it() -> None:
    job = Job(2, 1000, 1000)
    job.step(0)
    assert job.agreements[0] is not None
    job.agreements[0].ask()
    job.ask(0)
    job.ask(1)
    for _ in range(10):
        for rank in range(2):
            job.step(rank)
            job.ask(rank)
    assert job.stopped == [2, 2]


def test_a_rank_that_never_asks_whether_to_stop_is_named() -> None:
    job = Job(3, 1000, 1000)
    for rank in (0, 2):
        job.step(rank)
    agreement = job.agreements[0]
    assert agreement is not None
    agreement.ask()
    for rank in (0, 1, 2):
        job.ask(rank)
    with pytest.raises(RankError, match=r"no answer of the ranks \[1\]; have all ranks call stop_requested"):
        agreement.should_stop()


def test_a_rank_goes_on_without_a_decision_when_the_store_has_gone() -> None:
    job = Job(2, 1000, 1000)
    job.step(1)
    assert job.agreements[1] is not None
    job.agreements[1].ask()
    job.ask(1)
    assert not job.step(1)
    job.news[1].is_lost = True
    assert job.step(1)
    assert job.stopped == [None, None]
