"""Which rank held up the others, from the counters that ranks have."""

from __future__ import annotations

import random

import pytest

from penstock.core.stats import LoaderStatistics, StageTimes
from penstock.observe.doctor.causes import findings_of_run
from penstock.observe.record.rank_record import RankRecord
from penstock.observe.record.run_record import LoaderRecord, RunRecord
from penstock.observe.record.straggler import find_straggler


def ranks_in_step(loading_s: dict[int, float], world: int, *, step_s: float = 0.1, seed: int = 0) -> list[RankRecord]:
    """Return the counters of ranks that meet in each step; `loading_s` is for a batch, 1 ms where it is not said."""
    chance = random.Random(seed)
    waited, stepped, batches = [0.0] * world, [0.0] * world, 200
    for _ in range(batches):
        waits = [max(0.0, loading_s.get(rank, 0.001) * chance.uniform(0.7, 1.3)) for rank in range(world)]
        computed = [step_s * chance.uniform(0.95, 1.05) for _ in range(world)]
        met = max(wait + own for wait, own in zip(waits, computed, strict=True))
        for rank in range(world):
            waited[rank] += waits[rank]
            stepped[rank] += met - waits[rank]
    return [
        RankRecord(rank=rank, batches=batches, loop_s=waited[rank] + stepped[rank], loading_s=waited[rank])
        for rank in range(world)
    ]


@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_the_rank_that_waits_for_its_data_is_found(world: int) -> None:
    for slow in {0, world - 1}:
        found = find_straggler(ranks_in_step({slow: 0.08}, world), 0.1)
        assert found is not None
        assert found.ranks == (slow,)
        assert 0.3 < found.lost_fraction < 0.5


def test_several_slow_ranks_are_named_together() -> None:
    found = find_straggler(ranks_in_step({2: 0.08, 5: 0.08}, 8), 0.1)
    assert found is not None
    assert found.ranks == (2, 5)


@pytest.mark.parametrize("world", [2, 8])
def test_ranks_that_all_wait_alike_hold_up_nobody(world: int) -> None:
    assert find_straggler(ranks_in_step(dict.fromkeys(range(world), 0.08), world), 0.1) is None
    assert find_straggler(ranks_in_step({}, world), 0.1) is None


def test_a_rank_that_waits_while_others_go_on_holds_up_nobody() -> None:
    alone = [
        RankRecord(rank=0, batches=100, loop_s=10.0, loading_s=0.1),
        RankRecord(rank=1, batches=100, loop_s=18.0, loading_s=8.0),
    ]
    assert find_straggler(alone, 0.1) is None


def test_ranks_with_other_numbers_of_batches_do_not_go_in_step() -> None:
    slow = RankRecord(rank=1, batches=50, loop_s=50.0, loading_s=30.0)
    assert find_straggler([RankRecord(rank=0, batches=100, loop_s=50.0, loading_s=1.0), slow], 0.1) is None
    assert find_straggler([slow, RankRecord(rank=2, missing_reason="killed")], 0.1) is None


def test_the_report_of_a_run_names_it_first() -> None:
    ranks = tuple(ranks_in_step({3: 0.08}, 4))
    counted = LoaderStatistics(batches=800, samples=800, stages=StageTimes(wait_s=17.0, step_s=55.0))
    loaders = (LoaderRecord(name="Images", settings={}, statistics=counted),)
    record = RunRecord(command=("train.py",), started="", wall_s=1.0, ranks=ranks, loaders=loaders)
    finding = findings_of_run(record)[0]
    assert finding.name == "straggler"
    assert "rank 3 waited for data" in finding.evidence
    assert finding.gain is not None
    assert finding.gain == pytest.approx(1.75, abs=0.2)
