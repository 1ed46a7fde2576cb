"""`penstock run` and the doctor say the same of the same loop: one name, and one number of workers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.core.stats import LoaderStatistics, StageTimes
from penstock.observe.doctor.causes import Diagnosis, diagnose, findings_of_run
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probe_results import SampleCosts
from penstock.observe.doctor.trial import AS_IS, FREE, TimingWindow, Trial
from penstock.observe.record.finding import Finding
from penstock.observe.record.run_record import LoaderRecord, RunRecord

BATCHES, CORES = 100, 2


def _run(workers: int, stages: StageTimes, **counted: Any) -> tuple[Finding, ...]:
    statistics = LoaderStatistics(
        batches=BATCHES,
        samples=8 * BATCHES,
        workers=workers,
        worker_type="process" if workers else "inline",
        stages=stages,
        **counted,
    )
    loader = LoaderRecord(name="Images", settings={}, statistics=statistics)
    return findings_of_run(RunRecord(command=("t.py",), started="", wall_s=60.0, cpus=CORES, loaders=(loader,)))


def _doctor(workers: int, stages: StageTimes, startup_s: float = 0.0, **changes: Any) -> Diagnosis:
    """Measure the loop that `stages` are the sums of."""
    step_s, made_s = stages.step_s / BATCHES, (stages.fetch_s + stages.collate_s) / BATCHES
    wait_s = (stages.wait_s if workers else stages.fetch_s + stages.collate_s) / BATCHES + stages.transport_s / BATCHES
    samples = SampleCosts(
        samples=BATCHES,
        batch_samples=8,
        sample_s=stages.fetch_s / BATCHES / 8,
        median_s=stages.fetch_s / BATCHES / 8,
        sleep_fraction=stages.asleep_s / stages.fetch_s,
        collate_s=stages.collate_s / BATCHES,
    )
    as_is = TimingWindow(batches=10, wall_s=10 * (step_s + wait_s), wait_s=10 * wait_s, step_s=10 * step_s)
    free = TimingWindow(batches=10, wall_s=10 * step_s, wait_s=0.0, step_s=10 * step_s)
    settings = {"dataset": "Images", "num_workers": workers, "batch_size": 8, "start_method": "fork" * bool(workers)}
    assert made_s > 0
    return diagnose(
        Measurements(
            name="t.py",
            machine=Machine(cores=CORES),
            settings=Settings(**settings | changes.pop("settings", {})),
            has_step=True,
            trials=(
                Trial(name=AS_IS, windows=(as_is,) * 3, startup_s=startup_s),
                Trial(name=FREE, windows=(free,) * 3),
            ),
            samples=samples,
            transport_s=stages.transport_s / BATCHES if workers else None,
            **changes,
        )
    )


@pytest.mark.parametrize(
    ("workers", "stages", "name"),
    [
        (0, StageTimes(fetch_s=40.0, collate_s=1.0, step_s=20.0), "no-workers"),
        (2, StageTimes(fetch_s=80.0, collate_s=1.0, transport_s=1.0, wait_s=39.0, step_s=5.0), "samples-bound"),
        (
            2,
            StageTimes(fetch_s=80.0, collate_s=1.0, asleep_s=76.0, transport_s=1.0, wait_s=39.0, step_s=5.0),
            "waiting-bound",
        ),
        (2, StageTimes(fetch_s=4.0, collate_s=80.0, transport_s=1.0, wait_s=40.0, step_s=5.0), "collate-bound"),
        (2, StageTimes(fetch_s=2.0, collate_s=1.0, transport_s=20.0, wait_s=1.0, step_s=5.0), "transport-bound"),
    ],
)
def test_what_a_loop_waits_for_has_one_name(workers: int, stages: StageTimes, name: str) -> None:
    said, diagnosis = _run(workers, stages)[0], _doctor(workers, stages, settings={"collates_by_default": False})
    assert said.name == name
    assert name in (diagnosis.verdict.name, *(one.name for one in diagnosis.findings))
    advised = [re.findall(r"num_workers=(\d+)", one.remedy) for one in (said, *diagnosis.findings, diagnosis.verdict)]
    numbers = {found[0] for found in advised if found}
    assert len(numbers) <= 1, "one number of workers"


def test_epochs_that_start_their_workers_have_one_name() -> None:
    stages = StageTimes(fetch_s=4.0, collate_s=0.5, transport_s=0.1, wait_s=20.0, step_s=5.0)
    (said,) = _run(2, stages, epochs=20, first_batch_s=0.9, length=5)
    diagnosis = _doctor(2, stages, startup_s=0.9, settings={"length": 5})
    assert said.name == diagnosis.findings[0].name == "short-epochs"
    assert "persistent_workers=True" in said.remedy
    assert "persistent_workers=True" in diagnosis.findings[0].remedy


def test_an_iterator_for_each_batch_has_one_name() -> None:
    stages = StageTimes(fetch_s=4.0, collate_s=0.5, transport_s=0.1, wait_s=20.0, step_s=5.0, workers_s=18.0)
    said = _run(2, stages, epochs=BATCHES, first_batch_s=0.2, length=50)[0]
    diagnosis = _doctor(2, stages, iterators_created=9, batches_requested=9, settings={"length": 50})
    assert said.name == diagnosis.findings[0].name == "iterator-recreated"
    assert said.remedy == diagnosis.findings[0].remedy


def test_too_many_workers_are_told_to_be_as_many() -> None:
    stages = StageTimes(fetch_s=30.0, collate_s=1.0, transport_s=0.1, wait_s=0.1, step_s=100.0)
    said, diagnosis = _run(12, stages)[0], _doctor(12, stages)
    (found,) = (one for one in diagnosis.findings if one.name == "too-many-workers")
    assert (said.name, said.remedy) == (found.name, found.remedy) == ("too-many-workers", "num_workers=3")
