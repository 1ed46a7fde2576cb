"""Findings follow from snapshots alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.causes.evidence import loading_parts_s
from penstock.observe.doctor.contents.seen_labels import LabelRecorder
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probe_results import (
    CopyOnWrite,
    HotLine,
    OneLabel,
    OtherLoop,
    SampleCosts,
    WorkerActivity,
    WorkerNoise,
)
from penstock.observe.doctor.probes.steps.step_calls import StepCallRecorder
from penstock.observe.doctor.rendering import render
from penstock.observe.doctor.step_results import StepCall, StepCalls
from penstock.observe.doctor.trial import (
    AS_IS,
    FEWER_WORKERS,
    FREE,
    MORE_WORKERS,
    PENSTOCK,
    Gain,
    TimingWindow,
    Trial,
    gain_between,
)
from penstock.observe.record.finding import Finding


def _trial(name: str, batch_s: float, wait_s: float = 0.0, rounds: int = 4, line: str = "") -> Trial:
    window = TimingWindow(batches=10, wall_s=10 * batch_s, wait_s=10 * wait_s, step_s=10 * (batch_s - wait_s))
    return Trial(name=name, windows=(window,) * rounds, line=line, startup_s=0.05)


def _loop(*trials: Trial, **changes: object) -> Measurements:
    """A decode-bound loop with 2 workers, whose step takes 5 ms, changed as asked."""
    given = Measurements(
        name="train:main",
        machine=Machine(cores=4),
        settings=Settings(dataset="Images", num_workers=2, start_method="fork", batch_size=8),
        has_step=True,
        trials=trials or (_trial(AS_IS, 0.040, 0.035), _trial(FREE, 0.005)),
        samples=SampleCosts(
            samples=100,
            batch_samples=8,
            sample_s=0.010,
            median_s=0.010,
            sleep_fraction=0.1,
            collate_s=0.001,
        ),
        transport_s=0.002,
    )
    return replace(given, **changes)  # type: ignore[arg-type]


def _names(found: Measurements) -> list[str]:
    return [finding.name for finding in diagnose(found).findings]


def test_the_largest_part_of_loading_is_the_bottleneck() -> None:
    verdict = diagnose(_loop()).verdict
    assert (verdict.name, verdict.gain, verdict.is_measured) == ("samples-bound", 8.0, True)
    assert "34.3 ms (86%)" in verdict.evidence


def test_the_parts_of_a_batch_take_no_longer_than_the_batch() -> None:
    found = _loop()
    assert sum(loading_parts_s(found).values()) == pytest.approx(0.040)
    inline = replace(found, settings=Settings(dataset="D", batch_size=8), transport_s=None)
    assert sum(loading_parts_s(inline).values()) == pytest.approx(0.035)  # the step takes the rest


def _uneven(name: str, *batches_s: float, line: str = "") -> Trial:
    return Trial(name=name, windows=tuple(_trial("", seconds).windows[0] for seconds in batches_s), line=line)


def test_a_loop_that_waits_is_not_called_healthy_where_trials_with_free_loading_disagree() -> None:
    trials = (_uneven(AS_IS, 0.040, 0.020, 0.030), _uneven(FREE, 0.010, 0.040, 0.035))
    waiting = tuple(replace(one, wait_s=0.8 * one.wall_s) for one in trials[0].windows)
    verdict = diagnose(_loop(replace(trials[0], windows=waiting), trials[1])).verdict
    assert verdict.name == "unknown"
    assert "quieter machine" in verdict.remedy


def _waiting(*trials: Trial) -> Measurements:
    costs = SampleCosts(samples=100, batch_samples=8, sample_s=0.010, median_s=0.010, sleep_fraction=0.95)
    return _loop(_trial(AS_IS, 0.040, 0.035), _trial(FREE, 0.005), *trials, samples=costs)


def test_samples_that_wait_get_workers_beyond_the_cores_unless_a_trial_speaks_against_it() -> None:
    (finding,) = diagnose(_waiting()).findings
    assert finding.name == "too-few-workers"
    assert finding.remedy.startswith("num_workers=20,")
    assert finding.gain == pytest.approx(0.040 / (0.076 / 20 + 0.009 / 4)), "what computes takes turns with the waits"
    assert [one.name for one in diagnose(_waiting(_trial(MORE_WORKERS, 0.020, 0.015))).findings] == ["too-few-workers"]
    assert diagnose(_waiting(_trial(MORE_WORKERS, 0.040, 0.035))).findings == ()  # they wait for each other
    inline = replace(_waiting(_trial(MORE_WORKERS, 0.020), _trial(PENSTOCK, 0.035)), settings=Settings(dataset="D"))
    assert _names(inline) == ["no-workers"]  # and not the two workers that were tried, too


def test_batches_made_far_ahead_that_take_much_memory_are_named() -> None:
    samples = SampleCosts(samples=9, batch_samples=8, sample_s=0.001, median_s=0.001, batch_nbytes=4 << 20)
    settings = Settings(dataset="D", num_workers=2, prefetch_factor=200, start_method="fork")
    found = _loop(samples=samples, settings=settings)
    assert "prefetches-much" in _names(found)
    for few in (replace(settings, prefetch_factor=4), replace(settings, length=50)):
        assert "prefetches-much" not in _names(replace(found, settings=few))


def test_float64_samples_are_named_unless_something_is_computed_in_float64() -> None:
    samples = SampleCosts(
        samples=9, batch_samples=8, sample_s=0.001, median_s=0.001, batch_nbytes=8192, float64_fraction=1.0
    )
    step, x = StepCallRecorder(), torch.ones(2, 4, dtype=torch.float64)
    step.enter()
    torch.nn.functional.linear(x.float(), torch.ones(3, 4))
    step.leave()
    (finding,) = (one for one in diagnose(_loop(samples=samples, step_calls=step.result())).findings)
    assert finding.name == "float64-samples"
    assert not finding.is_uncertain
    assert ".float() in test_causes.py" in finding.evidence
    step.enter()
    torch.nn.functional.linear(x, torch.ones(3, 4, dtype=torch.float64))
    step.leave()
    assert _names(_loop(samples=samples, step_calls=step.result())) == []


@pytest.mark.parametrize(("reads", "accelerator", "is_bad_here"), [(1, "", False), (1, "cuda", True), (40, "", True)])
def test_values_that_a_step_reads_make_a_loop_unhealthy_only_where_that_costs_something(
    reads: int, accelerator: str, is_bad_here: bool
) -> None:
    calls = StepCalls(
        steps=3, synchronizing=(StepCall(what=".item()", line="train.py:9: loss.item()", per_step=reads),)
    )
    hidden = _trial(AS_IS, 0.005, 0.0), _trial(FREE, 0.005)
    found = _loop(*hidden, step_calls=calls, machine=Machine(cores=4, accelerator=accelerator))
    assert _names(found) == ["sync-every-step"]
    assert (diagnose(found).verdict.name == "healthy") is not is_bad_here
    assert ("On a machine with an accelerator" in render(found, diagnose(found))) is not is_bad_here


def test_an_iterator_for_each_batch_is_named_unless_an_epoch_has_no_more_and_without_workers_none_are_started() -> None:
    found = _loop(iterators_created=9, batches_requested=9)
    named = {"iterator-recreated"}
    assert named <= {*_names(found)}
    own = replace(found.settings, num_workers=0, start_method="", length=40)
    finding = next(one for one in diagnose(replace(found, settings=own)).findings if one.name in named)
    assert "workers" not in finding.cause
    assert not named & {*_names(replace(found, settings=replace(own, length=1)))}


def test_a_dataset_that_remembers_what_it_made_is_not_random() -> None:
    noise = WorkerNoise(same_in_workers=True, same_in_epochs=True)
    assert _names(_loop(worker_noise=noise)) == ["same-noise"]
    growing = CopyOnWrite(samples=9, nbytes=0, repeat_nbytes=0, growing_attribute="self.seen")
    assert _names(_loop(worker_noise=noise, copy_on_write=growing)) == []


def test_objects_that_workers_copy_are_to_be_kept_in_memory_that_they_share() -> None:
    grown = CopyOnWrite(samples=100, nbytes=8 << 20, repeat_nbytes=0, objects=500_000, attribute="self.rows")
    finding = next(one for one in diagnose(_loop(copy_on_write=grown)).findings if one.name == "copy-on-write")
    assert "self.rows = penstock.shared(self.rows)" in finding.remedy


def test_a_wait_that_other_programs_cause_is_not_blamed_on_loading() -> None:
    samples = SampleCosts(samples=100, batch_samples=8, sample_s=0.0005, median_s=0.0005)
    trials = (_trial(AS_IS, 0.040, 0.020), _trial(FREE, 0.020))
    assert diagnose(_loop(*trials, samples=samples)).verdict.name != "healthy"
    assert (
        diagnose(_loop(*trials, samples=samples, machine=Machine(cores=4, others_cores=2.0))).verdict.name == "healthy"
    )
    assert diagnose(_loop(*trials, machine=Machine(cores=4, others_cores=2.0))).verdict.name == "samples-bound"


def _with_starts(*starts_s: float) -> Trial:
    """A loop of 16 ms per batch, in windows of 10 batches, some of which have the start of an epoch."""
    plain = TimingWindow(batches=10, wall_s=0.16, wait_s=0.01, step_s=0.15)
    windows = (replace(plain, wall_s=0.16 + one, wait_s=0.01 + one, start_s=one) for one in starts_s)
    return Trial(name=AS_IS, windows=tuple(windows), startup_s=0.781)


def test_no_gain_is_estimated_while_other_programs_take_the_processors() -> None:
    line = HotLine(line="train.py:9: copy.deepcopy(record)", calls="copy.deepcopy", fraction=0.7)
    found = _loop()
    found = replace(found, samples=replace(found.samples, lines=(line,)))  # type: ignore[type-var]
    (finding,) = diagnose(found).findings
    assert finding.gain is not None
    (finding,) = diagnose(replace(found, machine=Machine(cores=4, others_cores=3.0))).findings
    assert (finding.name, finding.gain) == ("copied-for-each-sample", None)


def test_a_lock_is_known_without_a_clear_trial_by_workers_that_sleep_while_the_loop_waits() -> None:
    activity = WorkerActivity(workers=1, busy_threads=1.0, cores=0.4, asleep_fraction=0.6)
    trials = (_trial(AS_IS, 0.081, 0.080), _trial(FREE, 0.001), _uneven(MORE_WORKERS, 0.120, 0.060, 0.080))
    found = _loop(*trials, worker_activity=activity)
    assert "workers-do-not-scale" in _names(found)
    assert "workers-do-not-scale" not in _names(replace(found, worker_activity=None))
    slowed = replace(activity, asleep_fraction=0.1)  # by a step whose threads keep the cores
    assert "workers-do-not-scale" not in _names(replace(found, worker_activity=slowed))


def test_workers_that_sleep_while_the_step_runs_are_ahead_of_it_and_wait_for_no_lock() -> None:
    activity = WorkerActivity(workers=2, busy_threads=1.0, cores=0.3, asleep_fraction=0.7)
    trials = (_trial(AS_IS, 0.081, 0.028), _trial(FREE, 0.010), _uneven(MORE_WORKERS, 0.120, 0.060, 0.080))
    assert "workers-do-not-scale" not in _names(_loop(*trials, worker_activity=activity))


def test_a_loop_that_hardly_waits_is_healthy() -> None:
    found = _loop(_trial(AS_IS, 0.042, 0.001), _trial(FREE, 0.041))
    assert (diagnose(found).verdict.name, diagnose(found).findings) == ("healthy", ())


def test_a_loop_that_hardly_waits_and_has_a_fault_is_compute_bound() -> None:
    found = _loop(_trial(AS_IS, 0.042, 0.001), _trial(FREE, 0.041))
    found = replace(found, settings=replace(found.settings, pin_memory=True))
    diagnosis = diagnose(found)
    assert (diagnosis.verdict.name, diagnosis.verdict.remedy) == ("compute-bound", diagnosis.findings[0].remedy)


def test_on_an_accelerator_free_loading_decides_and_not_the_time_that_was_waited() -> None:
    trials = (_trial(AS_IS, 0.040, 0.030), _trial(FREE, 0.0395))  # it waits for the device, in the loader's name
    assert diagnose(_loop(*trials, machine=Machine(cores=4, accelerator="cuda"))).verdict.name == "healthy"
    assert diagnose(_loop(*trials, machine=Machine(cores=4))).verdict.name == "healthy"  # nothing to gain here either


def test_the_change_that_gained_most_is_the_one_that_is_named() -> None:
    trials = (
        _trial(AS_IS, 0.040, 0.035),
        _trial(FREE, 0.005),
        _trial(MORE_WORKERS, 0.020, 0.015, line="num_workers=4"),
        _trial(PENSTOCK, 0.030, 0.025),
    )
    finding = next(one for one in diagnose(_loop(*trials)).findings if one.name == "too-few-workers")
    assert (finding.remedy, finding.gain, finding.is_measured) == ("num_workers=4", 2.0, True)


def test_a_gain_that_rounds_do_not_agree_on_is_not_named() -> None:
    unclear = (0.030, 0.060, 0.020, 0.050)
    windows = tuple(_trial("", seconds).windows[0] for seconds in unclear)
    trials = (_trial(AS_IS, 0.040, 0.035), _trial(FREE, 0.005), Trial(name=MORE_WORKERS, windows=windows))
    assert "too-few-workers" not in _names(_loop(*trials))


@pytest.mark.parametrize(
    ("low", "median", "high", "rounds", "is_clear", "pays"),
    [
        (1.4, 1.5, 1.7, 3, True, True),
        (0.6, 0.7, 0.75, 3, True, False),
        (1.2, 1.5, 1.9, 3, False, False),
        (0.97, 1.01, 1.1, 3, True, False),
        (2.0, 2.0, 2.0, 1, False, False),
    ],
)
def test_a_gain_is_known_when_two_rounds_agree_about_how_much(
    low: float, median: float, high: float, rounds: int, is_clear: bool, pays: bool
) -> None:
    found = Gain(median=median, low=low, high=high, rounds=rounds)
    assert (found.is_clear, found.pays()) == (is_clear, pays)


def test_on_a_busy_machine_no_gain_is_stated_and_what_loading_needs_of_an_idle_one_decides() -> None:
    busy = Machine(cores=4, others_cores=3.0)
    trials = (_trial(AS_IS, 0.042, 0.001), _trial(FREE, 0.010), _trial(PENSTOCK, 0.015))
    found = diagnose(_loop(*trials, machine=busy))
    assert found.verdict.name == "samples-bound", "40 ms of loading beside a step of 10 ms"
    assert (found.verdict.gain, *(one.gain for one in found.findings)) == (None,) * (1 + len(found.findings))
    slow_step = (_trial(AS_IS, 0.142, 0.030), _trial(FREE, 0.100))
    assert diagnose(_loop(*slow_step, machine=busy)).verdict.name == "healthy"


def test_a_few_samples_that_a_busy_machine_slowed_do_not_keep_a_step_from_hiding_its_loading() -> None:
    busy, slow_step = Machine(cores=4, others_cores=3.0), (_trial(AS_IS, 0.142, 0.050), _trial(FREE, 0.080))
    costs = _loop().samples
    assert costs is not None
    some = replace(costs, slow_indices=(1, 2), slow_fraction=0.02)
    assert diagnose(_loop(*slow_step, machine=busy, samples=some)).verdict.name == "healthy"
    many = replace(costs, slow_indices=(1, 2), slow_fraction=0.5)
    assert diagnose(_loop(*slow_step, machine=busy, samples=many)).verdict.name != "healthy"


def test_what_would_cost_only_on_an_accelerator_leaves_a_program_healthy_for_a_check() -> None:
    diagnosis = diagnose(_loop(_trial(AS_IS, 0.042, 0.001), _trial(FREE, 0.041)))
    finding = Finding(name="x", cause="c", evidence="e", remedy="r", is_for_accelerators=True)
    assert replace(diagnosis, findings=(finding,)).is_healthy
    assert not replace(diagnosis, findings=(replace(finding, is_for_accelerators=False),)).is_healthy


def test_a_machine_that_is_too_busy_to_tell_is_no_fault_of_the_program() -> None:
    waiting = (_trial(AS_IS, 0.040, 0.035), _uneven(FREE, 0.045, 0.060, 0.010, 0.042))
    unknown = diagnose(_loop(*waiting))
    assert (unknown.verdict.name, unknown.is_healthy) == ("unknown", True)
    assert not diagnose(_loop()).is_healthy
    assert not diagnose(_loop(error="OSError: gone")).is_healthy


def test_a_gain_compares_rounds_in_pairs() -> None:
    before = Trial(name="a", windows=tuple(_trial("", seconds).windows[0] for seconds in (0.1, 0.2)))
    after = Trial(name="b", windows=tuple(_trial("", seconds).windows[0] for seconds in (0.05, 0.1)))
    found = gain_between(before, after)
    assert found is not None
    assert (found.low, found.high) == (2.0, 2.0)


def test_cheap_batches_need_no_workers_unless_a_trial_says_otherwise() -> None:
    samples = SampleCosts(samples=100, batch_samples=8, sample_s=1e-6, median_s=1e-6, batch_nbytes=64)
    trials = (_trial(AS_IS, 0.002, 0.0019), _trial(FREE, 0.0001))
    assert "workers-cost-more" in _names(_loop(*trials, samples=samples))
    slower = (*trials, _trial(FEWER_WORKERS, 0.004, 0.0039, line="num_workers=0"))
    assert "workers-cost-more" not in _names(_loop(*slower, samples=samples))


def test_as_many_workers_as_there_are_is_no_advice_to_have_fewer() -> None:
    hidden = (_trial(AS_IS, 0.101, 0.001), _trial(FREE, 0.100))
    for workers, is_named in ((3, False), (4, True)):  # 1.5 for each core are 3
        settings = Settings(dataset="D", num_workers=workers, start_method="fork")
        assert ("too-many-workers" in _names(_loop(*hidden, settings=settings, machine=Machine(cores=2)))) is is_named


def test_a_step_takes_no_longer_than_it_took_in_the_loop_as_it_is() -> None:
    trials = (_trial(AS_IS, 0.100, 0.092), _trial(FREE, 0.800, rounds=1))
    busy = _loop(*trials, machine=Machine(cores=2, others_cores=1.5))
    assert diagnose(busy).verdict.name == "samples-bound", "the only round of free loading was slow, its step is not"


def test_python_objects_that_a_worker_pickles_are_named_where_the_program_collates() -> None:
    settings = Settings(dataset="D", num_workers=2, start_method="fork", batch_size=8, collates_by_default=False)
    samples = SampleCosts(
        samples=100, batch_samples=8, sample_s=1e-5, median_s=1e-5, collate_s=1e-4, numbers_per_sample=9000
    )
    found = _loop(settings=settings, samples=samples, transport_s=0.03)
    diagnosis = diagnose(found)
    assert (diagnosis.verdict.name, diagnosis.findings[0].name) == ("transport-bound", "python-numbers")
    assert "pickles" in diagnosis.findings[0].cause
    assert "python-numbers" not in _names(replace(found, transport_s=1e-5))


def test_a_quota_below_the_cores_is_a_finding_only_if_the_loop_uses_more() -> None:
    assert "cpu-quota" in _names(_loop(machine=Machine(cores=16, quota_cores=2.0, intra_op_threads=1)))
    assert "cpu-quota" not in _names(_loop(machine=Machine(cores=16, quota_cores=8.0, intra_op_threads=1)))


def test_more_workers_than_cores_are_a_finding_if_fewer_would_hide_loading_as_well() -> None:
    settings = Settings(dataset="D", num_workers=16, start_method="fork")
    hidden = (_trial(AS_IS, 0.101, 0.001), _trial(FREE, 0.100))
    assert "too-many-workers" in _names(_loop(*hidden, settings=settings))
    assert "too-many-workers" not in _names(_loop(settings=settings))  # it waits, and nothing says that fewer would do


def test_loading_that_a_loop_hardly_waits_for_matters_where_free_loading_makes_its_step_faster() -> None:
    trials = (_trial(AS_IS, 0.100, 0.001), _trial(FREE, 0.040))
    assert diagnose(_loop(*trials)).verdict.name == "samples-bound"
    assert diagnose(_loop(*trials, machine=Machine(cores=4, others_cores=3.0))).verdict.name != "samples-bound"


def test_a_gain_beyond_what_a_loop_waits_is_explained_by_its_step() -> None:
    verdict = diagnose(_loop(_trial(AS_IS, 0.100, 0.040), _trial(FREE, 0.010))).verdict
    assert (
        "waits for data 40% of its time; with loading free it is 10.0 times as fast, as its step takes 6.0 times"
        in (verdict.evidence)
    )
    assert "its step" not in diagnose(_loop(_trial(AS_IS, 0.100, 0.090), _trial(FREE, 0.010))).verdict.evidence


def test_a_loop_that_failed_has_no_bottleneck() -> None:
    diagnosis = diagnose(_loop(error="OSError: sample 37 is corrupt"))
    assert (diagnosis.verdict.name, diagnosis.findings[0].name) == ("fails", "fails")
    assert "sample 37" in diagnosis.verdict.evidence


# ── runs ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_dataset_that_keeps_its_samples_is_told_from_one_that_caches_them() -> None:
    growth = CopyOnWrite(samples=100, nbytes=9 << 20, repeat_nbytes=0, growing_attribute="self.kept")
    assert _names(_loop(copy_on_write=growth)) == ["cache-in-each-worker"]
    assert _names(_loop(copy_on_write=replace(growth, repeat_nbytes=9 << 20))) == ["kept-by-the-dataset"]
    assert _names(_loop(copy_on_write=replace(growth, nbytes=9 << 10, repeat_nbytes=9 << 10))) == []


def test_a_short_start_of_another_loops_workers_counts_where_it_is_frequent() -> None:
    other = OtherLoop(dataset="D", num_workers=2, starts=10, loaders=10, startup_s=0.03)
    diagnosis = diagnose(_loop(other_loops=(other,), batches_requested=250))
    assert "other-loader-restarted" not in [one.name for one in diagnosis.findings], "1.2 ms in 40"
    often = diagnose(_loop(other_loops=(other,), batches_requested=5))
    assert (often.verdict.name, often.findings[0].name) == ("start-up-bound", "other-loader-restarted")
    assert often.verdict.remedy == often.findings[0].remedy


def test_workers_that_wait_in_turn_are_not_told_to_be_more() -> None:
    settings = Settings(dataset="D", num_workers=8, start_method="fork", batch_size=8)
    trials = (_trial(AS_IS, 0.080, 0.072), _trial(FREE, 0.001))
    for asleep, name in ((0.2, "too-few-workers"), (0.97, "workers-do-not-scale")):  # 130 or 620 ms, samples 76
        activity = WorkerActivity(workers=8, busy_threads=1.0, asleep_fraction=asleep)
        for machine in (Machine(cores=4), Machine(cores=4, others_cores=3.0)):
            slept = replace(_waiting(), settings=settings, trials=trials, worker_activity=activity, machine=machine)
            assert [(one.name, one.is_uncertain) for one in diagnose(slept).findings] == [(name, False)]


def test_an_estimate_that_gains_nothing_is_no_finding() -> None:
    line = HotLine(line="train.py:9: copy.deepcopy(record)", calls="copy.deepcopy", fraction=0.7)
    found = _loop()
    samples = replace(found.samples, lines=(line,))  # type: ignore[type-var]
    assert _names(replace(found, samples=samples)) == ["copied-for-each-sample"]
    free = _trial(FREE, 0.0385)
    assert _names(replace(found, samples=samples, trials=(found.trials[0], free))) == []


def test_a_sampler_is_named_where_it_takes_longer_than_the_samples_and_no_worker_shares_it() -> None:
    found = _loop()
    costs = replace(found.samples, sampler_s=0.030, sample_s=0.001)  # type: ignore[type-var]
    line = HotLine(line="train.py:7: pool = [i for i in self.all if ok(i)]", fraction=0.9)
    diagnosis = diagnose(replace(found, samples=costs, called_lines=(line,)))
    assert (diagnosis.verdict.name, diagnosis.findings[0].name) == ("sampler-bound", "costly-sampler")
    assert "train.py:7" in diagnosis.findings[0].evidence
    assert "costly-sampler" not in _names(replace(found, samples=replace(costs, sampler_s=0.0005)))


@pytest.mark.parametrize(
    ("steps_s", "is_named"),
    [
        ((2, 3, 4, 5, 6), True),
        ((2, 3, 3, 5, 6), True),
        ((2, 6, 2, 6, 2), False),
        ((4, 5, 5, 5, 5), False),
        ((2, 2.1, 2.2, 39, 40), False),
    ],
)
def test_steps_that_take_longer_and_longer_are_named(steps_s: tuple[float, ...], is_named: bool) -> None:
    trials = tuple(_uneven(name, *steps_s) for name in (AS_IS, FREE))
    assert ("steps-grow" in _names(_loop(*trials))) is is_named
    steady = (trials[0], _trial(FREE, 0.005))
    assert "steps-grow" not in _names(_loop(*steady)), "then it is what feeds them"


@pytest.mark.parametrize(
    ("runnable", "busy", "is_named"), [(1.9, 2.0, True), (1.0, 2.0, False), (0.9, 6.0, True), (1.9, 1.0, False)]
)
def test_threads_of_workers_count_where_they_want_cores_at_the_same_time(
    runnable: float, busy: float, is_named: bool
) -> None:
    activity = WorkerActivity(workers=2, busy_threads=busy, cores=0.9, runnable_threads=runnable)
    found = _loop(worker_activity=activity, machine=Machine(cores=2 if busy > 1 else 4))
    assert ("threads-in-workers" in _names(found)) is is_named
    others = replace(found, machine=replace(found.machine, others_cores=2.0))
    # where others have the cores, threads of Python's wait for a core, and then for their lock
    assert ("threads-in-workers" in _names(others)) is (busy > 4)


def test_one_label_is_named_where_the_step_computes_with_it() -> None:
    labels = torch.zeros(64)
    for step, is_used in (
        (lambda batch: (batch[0] - batch[1]).mean(), True),
        (lambda batch: (batch[0] - batch[1].view(64)).mean(), True),
        (lambda batch: batch[0].mean() + len(batch[1]), False),
    ):
        recorder = StepCallRecorder()
        batch = [torch.ones(64), labels]
        recorder.enter(batch)
        step(batch)
        recorder.leave()
        found = _loop(one_label=OneLabel(samples=64, label=0.0), step_calls=recorder.result())
        assert [one.is_uncertain for one in diagnose(found).findings if one.name == "one-label"] == [not is_used]
        shuffled = replace(found, settings=replace(found.settings, shuffles=True))
        assert ("one-label" in _names(shuffled)) is is_used, "an autoencoder's data may be of one class"


@pytest.mark.parametrize("is_left_out", [True, False])
def test_values_that_are_not_finite_are_named_unless_the_loss_leaves_them_out(is_left_out: bool) -> None:
    recorder, weight = StepCallRecorder(), torch.ones(1, requires_grad=True)
    batch = [torch.tensor([1.0, float("nan")])]
    recorder.enter(batch)
    known = batch[0][~torch.isnan(batch[0])] if is_left_out else batch[0]
    (known * weight).sum().backward()
    recorder.leave()
    found = _loop(step_calls=recorder.result())
    found = replace(found, samples=replace(found.samples, not_finite=(1,)))  # type: ignore[type-var]
    assert ("values-not-finite" in _names(found)) is not is_left_out


def test_samples_of_one_class_are_named_with_what_mixes_them() -> None:
    recorder = LabelRecorder()
    for batch in ([torch.zeros(32, 4), torch.full((32,), 3)], {"x": torch.zeros(32), "label": torch.full((32,), 3)}):
        recorder.add(batch)
    assert recorder.result() == OneLabel(samples=64, label=3)
    found = _loop(one_label=recorder.result())
    for settings, words in [
        (Settings(dataset="D"), "shuffle=True"),
        (Settings(dataset="D", shuffles=True), "dataset[0][1]"),
        (Settings(dataset="D", is_iterable=True), "interleave"),
    ]:
        (finding,) = (one for one in diagnose(replace(found, settings=settings)).findings if one.name == "one-label")
        assert words in finding.remedy
    recorder.add([torch.zeros(32), torch.tensor([3, 4] * 16)])
    assert recorder.result() is None, "a third of the samples are mixed"


@pytest.mark.parametrize("batches", [[[0]] * 40 + [[1]] * 40, [[0] * 32] * 40 + [[0] * 31 + [1]]])
def test_labels_that_are_rare_or_come_one_by_one_are_not_taken_for_sorted_ones(batches: list[list[int]]) -> None:
    recorder = LabelRecorder()
    for labels in batches:
        recorder.add([torch.zeros(len(labels), 4), torch.tensor(labels)])
    assert recorder.result() is None


def test_batches_of_one_class_each_are_named_although_the_class_changes() -> None:
    recorder = LabelRecorder()
    for label in (0, 0, 1, 1, 2, 2):
        recorder.add([torch.zeros(32, 4), torch.full((32,), label)])
    recorder.add([torch.zeros(32, 4), torch.tensor([2] * 16 + [3] * 16)])  # the end of a class
    assert recorder.result() == OneLabel(samples=192, label=0, labels=3)
    (finding,) = (one for one in diagnose(_loop(one_label=recorder.result())).findings if one.name == "one-label")
    assert (finding.remedy, "3 runs" in finding.evidence) == ("shuffle=True", True)


@pytest.mark.parametrize(
    "batch", [torch.zeros(8), [torch.zeros(8, 2), torch.zeros(8, 2)], {"ids": torch.zeros(8).long()}]
)
def test_what_is_no_label_is_not_taken_for_one(batch: object) -> None:
    recorder = LabelRecorder()
    recorder.add(batch)
    assert recorder.result() is None


def test_workers_that_each_make_the_whole_stream_are_known_by_the_processor_time_of_a_batch() -> None:
    activity = WorkerActivity(workers=4, busy_threads=1.0, making_cores=1.5)
    settings = Settings(dataset="Stream", num_workers=4, start_method="fork", batch_size=8, is_iterable=True)
    trials = (_trial(AS_IS, 0.20, 0.19), _trial(FREE, 0.01))
    found = _loop(*trials, settings=settings, worker_activity=activity)  # 300 ms for a batch of 81
    assert _names(found)[0] == "each-worker-reads-all"
    shared = replace(activity, making_cores=0.5)
    assert "each-worker-reads-all" not in _names(replace(found, worker_activity=shared))
    by_number = replace(settings, is_iterable=False)
    assert "each-worker-reads-all" not in _names(replace(found, settings=by_number))


def test_what_workers_made_ahead_is_not_counted_as_work_for_the_batches_of_the_loop() -> None:
    settings = Settings(dataset="Stream", num_workers=2, start_method="spawn", batch_size=8, is_iterable=True)
    activity = WorkerActivity(workers=2, busy_threads=1.0, making_cores=2.0)
    for rounds, is_named in ((1, False), (20, True)):  # 4 batches ahead of 1, or of 20
        window = TimingWindow(batches=1, wall_s=0.080, wait_s=0.079, step_s=0.001)
        trials = (Trial(name=AS_IS, windows=(window,) * rounds), _trial(FREE, 0.001))
        found = _loop(*trials, settings=settings, worker_activity=activity)
        assert ("each-worker-reads-all" in _names(found)) is is_named


def test_torch_with_more_threads_than_cores_is_named() -> None:
    many = Machine(cores=2, intra_op_threads=64)
    trials = (_trial(AS_IS, 0.042, 0.001), _trial(FREE, 0.041))
    (finding,) = diagnose(_loop(*trials, machine=many, settings=Settings(dataset="Rows"))).findings
    assert (finding.name, "set_num_threads(2)" in finding.remedy) == ("threads-beyond-cores", True)
    as_started = replace(many, intra_op_threads=2)
    assert diagnose(_loop(*trials, machine=as_started, settings=Settings(dataset="Rows"))).findings == ()


def test_an_iterator_that_each_step_makes_of_another_loader_is_to_be_made_once() -> None:
    other = OtherLoop(dataset="Rows", num_workers=2, starts=50, loaders=1, startup_s=0.06)
    found = _loop(_trial(AS_IS, 0.06, 0.001), _trial(FREE, 0.059))
    for requested, words in ((51, "make its iterator once"), (500, "persistent_workers=True")):
        finding = diagnose(replace(found, other_loops=(other,), batches_requested=requested)).findings[0]
        assert (finding.name, words in finding.remedy) == ("other-loader-restarted", True)
