"""The simulated trainer: worked out by hand, within the formula's limits, and nothing lost or made twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scaling.fleet import Machines
from benchmarks.scaling.scenarios import EXAMPLE, gpu_share
from benchmarks.scaling.simulation import simulate, simulated_pace
from benchmarks.scaling.trainer import Trainer, pace

trainers = st.builds(
    Trainer,
    workers=st.integers(1, 8),
    batch_size=st.integers(1, 32),
    step_s=st.floats(0.0, 0.05),
    handling_s=st.floats(0.0, 0.002),
    result_s=st.floats(0.0, 0.001),
    task_s=st.floats(1e-6, 0.002),
    row_s=st.floats(0.0, 1e-4),
    round_trip_s=st.floats(0.0, 0.02),
    link_s=st.floats(0.0, 0.001),
    prefetch_factor=st.integers(1, 4),
)
costs = st.lists(st.floats(0.0, 0.05), min_size=1, max_size=40)


def test_two_workers_alternate() -> None:
    epoch = simulate(Trainer(workers=2, batch_size=1), [1.0], batches=4)
    assert epoch.handed_out_s == [1.0, 1.0, 2.0, 2.0]


def test_a_slow_sample_delays_those_behind_it_until_the_window_is_full() -> None:
    """Worker 0 takes 10 s for the first sample. Two batches per worker may be in flight: worker 1 makes the other
    three by 3 s, and then waits until the first is handed out."""
    epoch = simulate(Trainer(workers=2, batch_size=1), [10.0] + [1.0] * 7, batches=8)
    assert epoch.handed_out_s == [10.0, 10.0, 10.0, 10.0, 11.0, 11.0, 12.0, 12.0]


def test_a_wider_window_hides_a_slow_sample() -> None:
    epoch = simulate(Trainer(workers=2, batch_size=1, prefetch_factor=4), [10.0] + [1.0] * 7, batches=8)
    assert epoch.handed_out_s == [10.0] * 8


def test_a_link_carries_one_batch_at_a_time() -> None:
    epoch = simulate(Trainer(workers=4, batch_size=2, link_s=1.0), [0.5], batches=4)
    assert epoch.handed_out_s == [3.0, 5.0, 7.0, 9.0]


def test_a_step_hides_the_workers() -> None:
    epoch = simulate(Trainer(workers=1, batch_size=1, step_s=5.0), [1.0], batches=3)
    assert epoch.handed_out_s == [1.0, 6.0, 11.0]


def test_handling_is_added_to_the_step() -> None:
    epoch = simulate(Trainer(workers=4, batch_size=1, step_s=5.0, handling_s=0.5), [1.0], batches=3)
    assert epoch.handed_out_s == [1.5, 7.0, 12.5]


def test_workers_continue_while_the_loop_is_in_its_step() -> None:
    epoch = simulate(Trainer(workers=1, batch_size=1, step_s=3.0, prefetch_factor=4), [1, 1, 1, 6, 1], batches=4)
    assert epoch.handed_out_s == [1.0, 4.0, 7.0, 10.0]  # the dear one is made from 3 s to 9 s


def test_the_cost_of_a_result_is_paid_before_its_batch_is_handed_out() -> None:
    epoch = simulate(Trainer(workers=1, batch_size=1, result_s=0.5), [1.0], batches=3)
    assert epoch.handed_out_s == [1.5, 2.5, 3.5]


def test_a_worker_that_sends_its_batch_makes_no_other_in_the_meantime() -> None:
    alone = Trainer(workers=1, batch_size=10, link_s=0.01)
    assert pace(alone, 0.01).samples_per_s == pytest.approx(50.0)
    assert simulated_pace(alone, [0.01]).samples_per_s == pytest.approx(50.0)
    assert pace(replace(alone, workers=4), 0.01).bound == "link"
    assert simulated_pace(replace(alone, workers=4), [0.01], skip=20).samples_per_s == pytest.approx(100.0)


@settings(deadline=None)
@given(trainers, costs, st.integers(1, 40))
def test_no_batch_is_lost_and_workers_are_never_busy_longer_than_the_run(
    trainer: Trainer, samples_s: list[float], batches: int
) -> None:
    epoch = simulate(trainer, samples_s, batches)
    assert len(epoch.handed_out_s) == batches
    assert epoch.handed_out_s == sorted(epoch.handed_out_s)
    window = max(2, trainer.workers * trainer.prefetch_factor)
    assert batches * trainer.batch_size <= epoch.samples <= (batches + window) * trainer.batch_size
    last = epoch.handed_out_s[-1] + trainer.step_s
    assert epoch.busy_s <= trainer.workers * last * (1 + 1e-9)


@settings(deadline=None)
@given(trainers, costs)
def test_the_simulation_is_never_faster_than_the_formula_in_the_long_run(
    trainer: Trainer, samples_s: list[float]
) -> None:
    batches = 60
    epoch = simulate(trainer, samples_s * trainer.batch_size, batches)
    rows = batches * trainer.batch_size
    made_s = sum(samples_s[index % len(samples_s)] for index in range(rows))
    work_s = batches * (trainer.task_s + trainer.round_trip_s) + rows * trainer.row_s + made_s
    assert epoch.handed_out_s[-1] >= work_s / trainer.workers * (1 - 1e-9)
    assert epoch.handed_out_s[-1] >= rows * trainer.link_s * (1 - 1e-9)
    assert epoch.handed_out_s[-1] >= batches * (trainer.handling_s + trainer.step_s) - trainer.step_s - 1e-9


@settings(deadline=None)
@given(trainers, st.floats(1e-4, 0.05))
def test_even_samples_match_the_formula_when_one_part_is_far_slower_than_the_others(
    trainer: Trainer, sample_s: float
) -> None:
    alone = replace(trainer, link_s=0.0, step_s=0.0, handling_s=0.0, result_s=0.0)
    found = simulated_pace(alone, [sample_s], skip=alone.workers * 8, batches=alone.workers * 40)
    assert found.samples_per_s == pytest.approx(pace(alone, sample_s).samples_per_s, rel=0.05)


@given(trainers, st.floats(1e-6, 0.1), st.floats(1.0, 5.0))
def test_the_formula_never_predicts_more_with_a_slower_part(trainer: Trainer, sample_s: float, times: float) -> None:
    here = pace(trainer, sample_s).samples_per_s
    assert pace(trainer, sample_s * times).samples_per_s <= here
    assert pace(replace(trainer, step_s=trainer.step_s * times), sample_s).samples_per_s <= here
    assert pace(replace(trainer, link_s=trainer.link_s * times), sample_s).samples_per_s <= here
    assert pace(replace(trainer, workers=trainer.workers + 1), sample_s).samples_per_s >= here


def test_cores_limit_samples_that_burn_cpu_and_not_those_that_sleep() -> None:
    crowded = Trainer(workers=16, batch_size=8, cores=4.0, on_core=True)
    assert pace(crowded, 0.001).bound == "cores"
    assert pace(crowded, 0.001).samples_per_s == pytest.approx(4000.0)
    assert simulated_pace(crowded, [0.001]).samples_per_s == pytest.approx(4000.0)
    assert pace(replace(crowded, on_core=False), 0.001).samples_per_s == pytest.approx(16_000.0)


def test_uneven_samples_cost_throughput_and_spare_cores_recover_it() -> None:
    work = replace(EXAMPLE, batch_size=16, step_s=EXAMPLE.step_s / 16)
    full, spare = (gpu_share(work, Machines(fill=fill), slow_share=0.01, slow_times=100.0) for fill in (1.0, 0.5))
    assert full < spare <= 1.0 + 1e-9


def test_a_trainer_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 worker, workers is 0"):
        Trainer(workers=0, batch_size=1)
    with pytest.raises(ValueError, match="both must be at least 1"):
        Trainer(workers=1, batch_size=0)
