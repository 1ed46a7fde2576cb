"""Findings about a finished run follow from its record alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.core.stats import IndexDigest, LoaderStatistics, StageTimes
from penstock.observe.doctor.causes import findings_of_run
from penstock.observe.record.run_record import LoaderRecord, RunRecord
from penstock.observe.record.timeline import TimelinePoint


def _run(
    timeline: tuple[TimelinePoint, ...] = (), settings: dict[str, object] | None = None, **counted: object
) -> RunRecord:
    statistics = LoaderStatistics(batches=100, samples=800, **counted)  # type: ignore[arg-type]
    loader = LoaderRecord(name="Images", settings=settings or {}, statistics=statistics)
    return RunRecord(command=("train.py",), started="", wall_s=60.0, cpus=4, loaders=(loader,), timeline=timeline)


def test_a_run_that_waited_names_what_it_waited_for_and_calls_its_gain_an_estimate() -> None:
    stages = StageTimes(fetch_s=80.0, collate_s=4.0, transport_s=1.0, wait_s=39.0, step_s=10.0)
    (finding,) = findings_of_run(_run(stages=stages, worker_type="process", workers=2))
    assert (finding.name, finding.gain, finding.is_measured) == ("samples-bound", 2.0, False)
    assert "num_workers=4" in finding.remedy


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        (("train.py", "--name", "a b"), "`penstock doctor train.py --name 'a b'`"),
        (("-m", "package.train", *map(str, range(30))), "`penstock doctor -m package.train ...`"),
    ],
)
def test_a_run_says_how_the_doctor_is_asked_about_its_program(command: tuple[str, ...], asked: str) -> None:
    stages = StageTimes(fetch_s=80.0, collate_s=4.0, transport_s=1.0, wait_s=39.0, step_s=10.0)
    run = replace(_run(stages=stages, worker_type="process", workers=2), command=command)
    (finding,) = findings_of_run(run)
    assert asked in finding.remedy


def test_a_run_without_workers_that_waited_should_have_some() -> None:
    stages = StageTimes(fetch_s=30.0, collate_s=1.0, step_s=10.0)
    (finding,) = findings_of_run(_run(stages=stages, worker_type="inline"))
    assert (finding.name, finding.remedy) == ("no-workers", "num_workers=4")
    assert finding.gain == pytest.approx(41 / (41 / 4))


def test_a_run_whose_samples_wait_gains_by_workers_beyond_the_cores() -> None:
    stages = StageTimes(fetch_s=160.0, asleep_s=152.0, wait_s=39.0, step_s=1.0)
    (finding,) = findings_of_run(_run(stages=stages, worker_type="process", workers=4))
    assert "`penstock doctor train.py`" in finding.remedy
    assert "num_workers=32" in finding.remedy
    assert "95.0 % of it waiting" in finding.evidence
    assert finding.gain == pytest.approx(40 / (152 / 32 + 9 / 4))
    (chosen,) = findings_of_run(_run(stages=stages, worker_type="process", workers=4, workers_reason="auto: tried"))
    assert "num_workers" not in chosen.remedy
    assert "cores" not in chosen.remedy
    assert chosen.gain is None
    many = _run(stages=replace(stages, wait_s=0.0, step_s=40.0), worker_type="process", workers=32)
    assert findings_of_run(many) == ()


def test_the_gain_of_workers_on_two_cores_is_not_that_of_one_worker() -> None:
    stages = StageTimes(fetch_s=19.0, step_s=1.0)
    (finding,) = findings_of_run(replace(_run(stages=stages, worker_type="inline"), cpus=2))
    assert finding.gain == pytest.approx(2.0)
    asleep = replace(stages, asleep_s=19.0)
    (finding,) = findings_of_run(replace(_run(stages=asleep, worker_type="inline"), cpus=2))
    assert finding.remedy.startswith("num_workers=24 ")
    assert finding.gain == pytest.approx(20 / (19 / 24 + 1 / 2))


def test_loaders_that_were_created_for_every_epoch_count_as_one() -> None:
    stages = StageTimes(fetch_s=0.4, wait_s=0.5, step_s=0.1)
    run = _run(stages=stages, worker_type="process", workers=2, epochs=1, first_batch_s=0.4)
    again = tuple(replace(run.loaders[0], name=f"Images #{number}") for number in range(2, 12))
    (finding,) = findings_of_run(replace(run, loaders=(*run.loaders, *again)))
    assert finding.name == "short-epochs"
    assert "11 times" in finding.evidence


def test_a_run_that_did_not_wait_has_no_finding() -> None:
    stages = StageTimes(fetch_s=30.0, collate_s=1.0, wait_s=0.5, step_s=50.0)
    assert findings_of_run(_run(stages=stages, worker_type="process", workers=2)) == ()


def test_a_run_whose_epochs_were_short_should_keep_its_workers() -> None:
    stages = StageTimes(fetch_s=1.0, wait_s=9.0, step_s=1.0)
    names = [
        one.name
        for one in findings_of_run(_run(stages=stages, worker_type="process", workers=2, epochs=20, first_batch_s=0.4))
    ]
    assert names == ["short-epochs"]


def test_short_epochs_have_no_estimate_where_the_step_takes_about_nothing() -> None:
    counted = {"worker_type": "process", "workers": 2, "epochs": 20, "first_batch_s": 0.49}
    (known,) = findings_of_run(_run(stages=StageTimes(wait_s=10.0, step_s=5.0), **counted))
    (unknown,) = findings_of_run(_run(stages=StageTimes(wait_s=10.0, step_s=0.05), **counted))
    assert (known.name, unknown.name) == ("short-epochs", "short-epochs")
    assert known.gain is not None
    assert unknown.gain is None


def test_an_iterator_for_each_batch_is_named_and_nothing_else_is_blamed_for_its_time() -> None:
    stages = StageTimes(fetch_s=1.0, collate_s=9.0, wait_s=20.0, step_s=1.0, workers_s=18.0)
    counted = {"stages": stages, "worker_type": "process", "workers": 2, "first_batch_s": 0.2}
    (finding,) = findings_of_run(_run(**counted, epochs=100, length=50))
    assert finding.name == "iterator-recreated"
    assert "100 iterators for 100 batches" in finding.evidence
    assert "iterator-recreated" not in {one.name for one in findings_of_run(_run(**counted, epochs=100, length=1))}


def test_workers_that_were_chosen_because_samples_wait_are_not_too_many() -> None:
    stages = StageTimes(fetch_s=1.0, step_s=50.0)
    asked = _run(stages=stages, worker_type="process", workers=13)
    assert [one.name for one in findings_of_run(asked)] == ["too-many-workers"]
    chosen = _run(stages=stages, worker_type="process", workers=13, workers_reason="auto: the step waited")
    assert findings_of_run(chosen) == ()


@pytest.mark.parametrize(("fetch_s", "is_advised"), [(3.0, True), (60.0, False)])
def test_no_workers_are_advised_against_transport_only_where_samples_take_less(
    fetch_s: float, is_advised: bool
) -> None:
    stages = StageTimes(fetch_s=fetch_s, wait_s=5.0, transport_s=10.0, step_s=15.0)
    (finding,) = findings_of_run(_run(stages=stages, worker_type="process", workers=32, workers_reason="auto"))
    assert finding.name == "transport-bound"
    assert ("num_workers=0" in finding.remedy) is is_advised


def test_a_run_whose_memory_grew_has_a_finding() -> None:
    stages = StageTimes(fetch_s=1.0, step_s=50.0)
    moments = tuple(
        TimelinePoint(
            at_s=float(number), batches=number + 1, samples=8 * number, host_nbytes=(1 << 30) + number * (100 << 20)
        )
        for number in range(30)
    )
    assert [one.name for one in findings_of_run(_run(moments, stages=stages, worker_type="process", workers=2))] == [
        "memory-grows"
    ]
    flat = tuple(replace(moment, host_nbytes=1 << 30) for moment in moments)
    assert findings_of_run(_run(flat, stages=stages, worker_type="process", workers=2)) == ()


def test_worker_crashes_and_skipped_samples_of_a_run_are_findings() -> None:
    stages = StageTimes(step_s=50.0)
    found = findings_of_run(
        _run(stages=stages, worker_type="process", workers=2, restarts=3, skipped=2, skipped_indices=(7, 9))
    )
    assert [one.name for one in found] == ["workers-crashed", "samples-skipped"]
    assert "7, 9" in found[1].evidence


def _passes(*digests: str, sampler: str = "DistributedSampler") -> RunRecord:
    ends = tuple(
        IndexDigest(epoch=epoch, batches=10, digest=digest, is_end=True) for epoch, digest in enumerate(digests)
    )
    counted = LoaderStatistics(epochs=len(digests), batches=20, samples=160, index_digests=ends)
    loader = LoaderRecord(name="Images", settings={}, statistics=counted, shuffled_by=sampler, made_at="train.py:3")
    return RunRecord(command=("train.py",), started="", wall_s=1.0, loaders=(loader,))


def test_an_order_that_never_changes_is_named_though_the_sampler_shuffles() -> None:
    (finding,) = findings_of_run(_passes("a", "a"))
    assert (finding.name, finding.loader) == ("same-order", "Images (train.py:3)")
    assert "set_epoch(epoch)" in finding.remedy
    (finding,) = findings_of_run(_passes("a", "a", sampler="RandomSampler"))
    assert "generator" in finding.remedy
    for healthy in (_passes("a", "b"), _passes("a"), _passes("a", "a", sampler="")):
        assert findings_of_run(healthy) == ()
