"""Plans for fleets: limits, monotonicity, and a plan worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scale import GIGABIT, Machines, Plan, Work, plan

WORK = Work()

works = st.builds(
    Work,
    sample_s=st.floats(1e-5, 1.0),
    sample_nbytes=st.integers(100, 10_000_000),
    stored_nbytes=st.integers(100, 10_000_000),
    batch_size=st.integers(1, 1024),
    step_s=st.floats(1e-3, 5.0),
    host_s=st.floats(0.0, 0.1),
)
fleets = st.builds(
    Machines,
    gpus_per_trainer=st.integers(1, 16),
    cores_per_machine=st.integers(1, 256),
    fill=st.floats(0.1, 1.0),
    gbit=st.floats(1.0, 400.0),
    trainer_gbit=st.floats(1.0, 800.0),
    storage_gbit=st.floats(1.0, 10_000.0),
    memory_gb_per_s=st.floats(10.0, 1000.0),
    device_gb_per_s=st.floats(1.0, 100.0),
    copy_gb_per_s=st.floats(0.5, 20.0),
    handling_s=st.floats(1e-5, 0.01),
)
numbers_of_gpus = st.integers(1, 5000)


def stage(found: Plan, name: str) -> float:
    return next(one.samples_per_s for one in found.stages if one.name == name)


def test_a_plan_worked_out_by_hand() -> None:
    machines = Machines(fill=1.0, gbit=100, trainer_gbit=25, storage_gbit=10, copy_gb_per_s=3, handling_s=0.001)
    found = plan(WORK, machines, 64)
    assert found.wanted == pytest.approx(64 * 256 / 0.18)  # 91 022 samples/s
    assert found.trainers == 8
    assert stage(found, "trainer's link") == pytest.approx(8 * 25e9 / 8 / 600_000)  # 41 667
    assert stage(found, "trainer's memory") == pytest.approx(8 * 200e9 / 4 / 600_000)  # each byte passes four times
    assert stage(found, "copy into a slot") == pytest.approx(64 * 3e9 / 600_000)
    assert stage(found, "loop's thread") == pytest.approx(64 * 256 / 0.001)
    assert stage(found, "link to the GPU") == pytest.approx(64 * 25e9 / 600_000)
    assert stage(found, "store") == pytest.approx(10e9 / 8 / 110_000)  # 11 364
    assert found.next_stage.name == "store"
    assert found.fed == pytest.approx(11_363.6, abs=0.1)
    assert found.machines == 3  # 11 364 x 0.012 = 136.4 cores, of 64 each
    assert found.machines_wanted == 18  # 1 092 cores
    assert found.machines_for == "cores"
    assert found.busy_share == pytest.approx(11_363.6 / 91_022, rel=1e-4)


def test_slots_hold_the_batches_in_flight_and_the_one_in_use() -> None:
    machines = Machines(gbit=100, trainer_gbit=100, latency_s=0.0, storage_gbit=1000)
    found = plan(replace(WORK, sample_nbytes=1), machines, 8)
    assert found.batches_in_flight == 18  # 256 x 12 ms of work in each, one every 180 ms: 17.07
    assert found.slots_nbytes == 8 * 19 * 256


def test_a_round_trip_as_long_as_a_step_takes_one_slot_more_and_no_throughput() -> None:
    near = plan(WORK, Machines(latency_s=0.0), 8)
    far = plan(WORK, Machines(latency_s=WORK.step_s), 8)
    assert far.batches_in_flight == near.batches_in_flight + 1
    assert (far.fed, far.machines) == (near.fed, near.machines)


@given(works, fleets, numbers_of_gpus)
def test_gpus_are_fed_at_most_what_they_want_and_what_every_stage_carries(
    work: Work, machines: Machines, gpus: int
) -> None:
    found = plan(work, machines, gpus)
    assert 0 < found.fed <= found.wanted
    assert all(found.fed <= one.samples_per_s * (1 + 1e-9) for one in found.stages)
    assert found.fed == found.wanted or found.fed == found.next_stage.samples_per_s


@given(works, fleets, numbers_of_gpus)
def test_the_machines_can_make_and_send_what_is_fed_and_one_fewer_could_not(
    work: Work, machines: Machines, gpus: int
) -> None:
    found = plan(work, machines, gpus)

    def carried(number: int) -> float:
        link = machines.gbit * GIGABIT
        of_one = min(machines.cores_per_machine / work.sample_s, link / work.sample_nbytes, link / work.stored_nbytes)
        return number * of_one * machines.fill

    assert carried(found.machines) * (1 + 1e-6) >= found.fed
    assert carried(found.machines - 1) < found.fed * (1 + 1e-6)
    assert found.machines_wanted >= found.machines


@given(works, fleets, numbers_of_gpus, st.floats(1.0, 10.0))
def test_costlier_samples_never_take_fewer_machines(work: Work, machines: Machines, gpus: int, times: float) -> None:
    costlier = replace(work, sample_s=work.sample_s * times)
    assert plan(costlier, machines, gpus).machines >= plan(work, machines, gpus).machines


@given(works, fleets, st.integers(1, 600), st.integers(1, 8))
def test_more_gpus_want_more_and_never_take_fewer_machines(
    work: Work, machines: Machines, gpus: int, times: int
) -> None:
    one, more = plan(work, machines, gpus), plan(work, machines, gpus * times)
    assert more.wanted == pytest.approx(times * one.wanted)
    assert more.machines_wanted >= one.machines_wanted
    assert more.fed >= one.fed * (1 - 1e-9)
    assert more.trainers >= one.trainers


@given(
    works,
    fleets,
    numbers_of_gpus,
    st.sampled_from(["trainer_gbit", "storage_gbit", "memory_gb_per_s", "device_gb_per_s", "copy_gb_per_s"]),
    st.floats(1.0, 10.0),
)
def test_a_wider_stage_never_feeds_less(work: Work, machines: Machines, gpus: int, name: str, times: float) -> None:
    wider = replace(machines, **{name: getattr(machines, name) * times})
    assert plan(work, wider, gpus).fed >= plan(work, machines, gpus).fed


@given(works, fleets, numbers_of_gpus)
def test_the_figure_reported_as_enough_is_enough(work: Work, machines: Machines, gpus: int) -> None:
    found = plan(work, machines, gpus)
    names = {
        "trainer's link": "trainer_gbit",
        "trainer's memory": "memory_gb_per_s",
        "copy into a slot": "copy_gb_per_s",
        "link to the GPU": "device_gb_per_s",
        "store": "storage_gbit",
    }
    for name, field in names.items():
        one = next(one for one in found.stages if one.name == name)
        widened = plan(work, replace(machines, **{field: one.enough(found.wanted)}), gpus)
        assert stage(widened, name) == pytest.approx(found.wanted)
    loop = next(one for one in found.stages if one.name == "loop's thread")
    assert gpus * work.batch_size / (loop.enough(found.wanted) / 1e3) == pytest.approx(found.wanted)


def test_with_unlimited_stages_only_the_steps_limit() -> None:
    endless = Machines(
        gbit=inf, trainer_gbit=inf, storage_gbit=inf, memory_gb_per_s=inf, device_gb_per_s=inf, copy_gb_per_s=inf
    )
    found = plan(WORK, replace(endless, handling_s=0.0), 1024)
    assert found.fed == found.wanted
    assert found.machines_for == "cores"


@pytest.mark.parametrize("name", ["sample_s", "sample_nbytes", "stored_nbytes", "batch_size", "step_s"])
def test_work_that_costs_nothing_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be greater than 0, it is 0"):
        replace(WORK, **{name: 0})


def test_a_machine_cannot_be_fuller_than_full() -> None:
    with pytest.raises(ValueError, match=r"fill .* it is 1\.5"):
        Machines(fill=1.5)


def test_a_plan_for_no_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 GPU, gpus is 0"):
        plan(WORK, Machines(), 0)
