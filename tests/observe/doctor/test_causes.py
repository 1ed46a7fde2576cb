"""Findings follow from snapshots alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.core.stats import IndexDigest, LoaderStatistics, StageTimes
from penstock.observe.doctor.causes import diagnose, findings_of_run
from penstock.observe.doctor.causes.evidence import gain_without, loading_parts_s, waits_for_processors
from penstock.observe.doctor.contents.seen_labels import LabelRecorder
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probe_results import (
    CopyOnWrite,
    DatasetPickle,
    HotLine,
    OneLabel,
    OtherLoop,
    RepeatedPass,
    SampleCosts,
    WorkerActivity,
    WorkerNoise,
    WorkerShare,
)
from penstock.observe.doctor.probes.steps.step_calls import StepCallRecorder
from penstock.observe.doctor.rendering import render
from penstock.observe.doctor.step_results import StepCall, StepCalls
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.doctor.trial import (
    AS_IS,
    FREE,
    MORE_WORKERS,
    NO_WORKERS,
    ONE_THREAD,
    PENSTOCK,
    PERSISTENT,
    PINNED,
    THREADS,
    Gain,
    TimingWindow,
    Trial,
    gain_between,
)
from penstock.observe.record.run_record import LoaderRecord, RunRecord
from penstock.observe.record.timeline import TimelinePoint


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
            storage_fraction=0.1,
            decode_fraction=0.7,
            transform_fraction=0.2,
            collate_s=0.001,
        ),
        transport_s=0.002,
    )
    return replace(given, **changes)  # type: ignore[arg-type]


def _names(found: Measurements) -> list[str]:
    return [finding.name for finding in diagnose(found).findings]


@pytest.mark.parametrize(("batch_s", "verdict"), [(0.005, "decode-bound"), (0.05, "healthy")])
def test_a_loop_that_lived_on_batches_made_ahead_is_not_healthy(batch_s: float, verdict: str) -> None:
    # It hardly waited, loading free was not tried, and two workers need 40 ms for a batch.
    assert diagnose(_loop(_trial(AS_IS, batch_s, 0.02 * batch_s))).verdict.name == verdict


def test_the_largest_part_of_loading_is_the_bottleneck() -> None:
    verdict = diagnose(_loop()).verdict
    assert (verdict.name, verdict.gain, verdict.is_measured) == ("decode-bound", 8.0, True)
    assert "26.7 ms (67%)" in verdict.evidence


def test_the_parts_of_a_batch_take_no_longer_than_the_batch() -> None:
    found = _loop()
    assert sum(loading_parts_s(found).values()) == pytest.approx(0.040)
    inline = replace(found, settings=Settings(dataset="D", batch_size=8), transport_s=None)
    assert sum(loading_parts_s(inline).values()) == pytest.approx(0.035)  # the step takes the rest


def _uneven(name: str, *batches_s: float, line: str = "") -> Trial:
    return Trial(name=name, windows=tuple(_trial("", seconds).windows[0] for seconds in batches_s), line=line)


def test_what_trials_did_not_confirm_comes_last_and_is_not_the_verdicts_advice() -> None:
    settings = Settings(dataset="D", start_method="fork", num_workers=2, length=10)
    trials = (
        replace(_trial(AS_IS, 0.040, 0.035), startup_s=0.5),
        _trial(FREE, 0.005),
        _uneven(PERSISTENT, 0.030, 0.060, 0.020, 0.050),
    )
    diagnosis = diagnose(_loop(*trials, settings=replace(settings, pin_memory=True)))
    assert [finding.name for finding in diagnosis.findings] == ["pinned-without-accelerator", "short-epochs"]
    assert diagnosis.findings[-1].is_uncertain
    alone = diagnose(_loop(*trials, settings=settings))
    assert alone.verdict.remedy != alone.findings[0].remedy


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
    inline = replace(_waiting(_trial(MORE_WORKERS, 0.020), _trial(THREADS, 0.035)), settings=Settings(dataset="D"))
    assert _names(inline) == ["no-workers"]  # and not the two workers that were tried, too
    (unclear,) = diagnose(_waiting(_uneven(MORE_WORKERS, 0.020, 0.060, 0.030))).findings
    assert (unclear.gain, unclear.is_uncertain) == (None, True)


def _line(text: str, fraction: float = 0.5) -> Measurements:
    costs = SampleCosts(samples=100, batch_samples=8, sample_s=0.010, median_s=0.010)
    return _loop(samples=replace(costs, lines=(HotLine(line=f"data.py:7: {text}", fraction=fraction),)))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("record = json.loads(self.lines[index])", "parsed-for-each-sample"),
        ("return torch.tensor(record['values'])", "parsed-for-each-sample"),
        ("when = [datetime.strptime(text, FORMAT) for text in self.times[index]]", "parsed-for-each-sample"),
        ("if hashlib.sha256(file.read()).hexdigest() != self.sums[index]:", "checked-for-each-sample"),
        ("record = copy.deepcopy(self.records[index])", "copied-for-each-sample"),
        ("self.seen = torch.cat([self.seen, x[None]])", "appended-for-each-sample"),
        ("self.seen = np.append(self.seen, x)", "appended-for-each-sample"),
        ("return torch.tensor([slow(number) for number in row])", None),  # what it calls takes the time
        ("image = torch.cat([image, self.border])", None),
    ],
)
def test_a_line_that_is_cheap_once_and_dear_for_every_sample_is_named(text: str, name: str | None) -> None:
    assert _names(_line(text)) == ([name] if name else [])
    assert _names(_line(text, 0.2)) == []


def test_of_two_such_lines_the_longer_is_named() -> None:
    found = _line("record = copy.deepcopy(self.records[index])", 0.5)
    other = HotLine(line="data.py:8: return torch.tensor(record['boxes'])", fraction=0.4)
    samples = found.samples
    assert samples is not None
    assert _names(replace(found, samples=replace(samples, lines=(*samples.lines, other)))) == ["copied-for-each-sample"]


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


def test_where_pinned_batches_were_faster_that_is_the_advice_and_its_gain_was_measured() -> None:
    cuda = Machine(cores=4, accelerator="cuda")
    hidden = _trial(AS_IS, 0.030, 0.0), _trial(FREE, 0.030)  # the copies are a part of the step
    found = _loop(*hidden, _trial(PINNED, 0.020), machine=cuda, transfer_s=0.010)
    diagnosis = diagnose(found)
    (finding,) = diagnosis.findings
    assert (finding.name, finding.is_measured) == ("not-pinned", True)
    assert finding.gain == pytest.approx(1.5)
    assert diagnosis.verdict.remedy == finding.remedy
    assert "from pageable memory to cuda" in render(found, diagnosis)
    calls = StepCalls(steps=3, pageable_copies=(StepCall(what=".to(...)", line="train.py:9: x.to(d)", per_step=1),))
    (finding,) = diagnose(replace(found, step_calls=calls)).findings
    assert (finding.name, finding.gain) == ("non-blocking-from-pageable", pytest.approx(1.5))
    assert _names(_loop(*hidden, _trial(PINNED, 0.030), machine=cuda)) == []
    is_pinned = replace(found, settings=replace(found.settings, pin_memory=True))
    assert "from pinned memory to cuda" in render(is_pinned, diagnosis)


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


def test_a_change_that_was_slower_is_not_advised() -> None:
    settings = Settings(dataset="D", start_method="fork", num_workers=2, length=10)
    trials = (replace(_trial(AS_IS, 0.040, 0.035), startup_s=0.5), _trial(FREE, 0.005))
    assert "short-epochs" in _names(_loop(*trials, settings=settings))
    slower = (*trials, _uneven(PERSISTENT, 0.045, 0.039, 0.060), _trial(MORE_WORKERS, 0.050, 0.045))
    found = diagnose(_loop(*slower, settings=settings))
    assert found.findings == ()
    assert "num_workers" not in found.verdict.remedy
    assert "persistent_workers" not in found.verdict.remedy
    inline = _loop(*trials, _trial(MORE_WORKERS, 0.050), settings=Settings(dataset="D"), machine=Machine(load=9.0))
    assert "no-workers" not in _names(inline)


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
    assert diagnose(_loop(*trials, machine=Machine(cores=4, others_cores=2.0))).verdict.name == "decode-bound"


_CROWDED = Machine(cores=2, others_cores=1.9, intra_op_threads=2)


def test_a_step_that_others_delay_does_not_hide_loading_that_a_quiet_machine_would_show() -> None:
    slow = (
        _trial(AS_IS, 0.420, 0.004),
        _trial(FREE, 0.400),
        _trial(ONE_THREAD, 0.006, line="torch.set_num_threads(1)"),
    )
    found = _loop(*slow, machine=_CROWDED)
    diagnosis = diagnose(found)
    assert diagnosis.verdict.name == "decode-bound"
    assert "on a quiet machine" in diagnosis.verdict.evidence
    assert "takes 400.0 ms with torch's 2 threads" in " ".join(render(found, diagnosis).split())
    cheap = SampleCosts(samples=100, batch_samples=8, sample_s=1e-4, median_s=1e-4)
    assert diagnose(replace(found, samples=cheap)).verdict.name == "healthy", "3 ms of loading beside 6 ms of step"
    assert diagnose(replace(found, machine=Machine(cores=2))).verdict.name == "healthy", "a quiet one shows it itself"


def test_without_workers_a_loop_on_a_busy_machine_waits_for_no_more_than_it_was_seen_to_wait() -> None:
    inline = Settings(dataset="Images", batch_size=8)
    trials = (_trial(AS_IS, 0.420, 0.004), _trial(FREE, 0.400), _trial(ONE_THREAD, 0.006))
    assert diagnose(_loop(*trials, machine=_CROWDED, settings=inline)).verdict.name == "healthy"


def test_a_loop_whose_step_others_slow_down_is_not_called_healthy_after_one_round() -> None:
    trials = (_trial(AS_IS, 0.420, 0.004, rounds=1), _trial(FREE, 0.400, rounds=1))
    assert diagnose(_loop(*trials, machine=_CROWDED)).verdict.name == "unknown"
    slow = _loop(
        trials[0], machine=_CROWDED, samples=SampleCosts(samples=9, batch_samples=8, sample_s=0.02, median_s=0.02)
    )
    assert diagnose(slow).verdict.name == "unknown", "loading free was not even tried"
    assert diagnose(_loop(*trials, machine=Machine(cores=2))).verdict.name == "healthy"


def test_more_workers_on_a_busy_machine_are_not_recommended_for_the_share_that_they_take_from_others() -> None:
    trials = (
        _trial(AS_IS, 0.040, 0.035),
        _trial(FREE, 0.005),
        _trial(MORE_WORKERS, 0.020, 0.015, line="num_workers=4"),
    )
    busy = Machine(cores=2, others_cores=1.0)
    named = {finding.name: finding.is_uncertain for finding in diagnose(_loop(*trials, machine=busy)).findings}
    assert named["too-few-workers"]
    waiting = replace(_loop(*trials, machine=busy), samples=replace(_loop().samples, sleep_fraction=0.9))  # type: ignore[type-var]
    named = {finding.name: finding.is_uncertain for finding in diagnose(waiting).findings}
    assert not named["too-few-workers"]
    inline = replace(_loop(*trials[:2], _trial(THREADS, 0.020, 0.015), machine=busy), settings=Settings(dataset="D"))
    named = {finding.name: finding.is_uncertain for finding in diagnose(inline).findings}
    assert named["threads-faster"], "two threads get two shares of what others leave"


def test_what_a_trial_of_persistent_workers_gained_beyond_their_start_is_not_believed() -> None:
    trials = (_trial(AS_IS, 0.040, 0.035), _trial(FREE, 0.005), _trial(PERSISTENT, 0.030))
    for startup_s, is_named in ((0.5, True), (0.05, False)):
        settings = Settings(dataset="D", num_workers=2, start_method="fork", batch_size=8, length=40)
        found = _loop(replace(trials[0], startup_s=0.081 + startup_s), *trials[1:], settings=settings)
        assert ("short-epochs" in _names(found)) is is_named


def test_a_start_that_no_window_shows_is_added_to_the_epoch_of_which_the_trial_says_nothing() -> None:
    settings = Settings(dataset="D", num_workers=2, start_method="fork", batch_size=8, length=40)
    as_is = replace(_trial(AS_IS, 0.040, 0.035), startup_s=1.681, unseen_startup_s=1.6)
    found = _loop(as_is, _trial(FREE, 0.005), _trial(PERSISTENT, 0.042), settings=settings)
    finding = next(one for one in diagnose(found).findings if one.name == "short-epochs")
    assert finding.gain == pytest.approx((40 * 0.040 + 1.6) / (40 * 0.040))
    assert not finding.is_measured
    assert "builds for its first sample" in finding.evidence


def _with_starts(*starts_s: float) -> Trial:
    """A loop of 16 ms per batch, in windows of 10 batches, some of which have the start of an epoch."""
    plain = TimingWindow(batches=10, wall_s=0.16, wait_s=0.01, step_s=0.15)
    windows = (replace(plain, wall_s=0.16 + one, wait_s=0.01 + one, start_s=one) for one in starts_s)
    return Trial(name=AS_IS, windows=tuple(windows), startup_s=0.781)


def test_persistent_workers_gain_what_an_epoch_has_of_starts_and_not_what_the_median_window_has() -> None:
    settings = Settings(dataset="D", num_workers=2, start_method="fork", batch_size=8, length=40)
    trials = (_with_starts(0.0, 0.0, 0.78, 0.0, 0.0), _trial(FREE, 0.015, rounds=5))
    for persistent_s, is_named in ((0.016, True), (0.035, False)):  # as slow as an epoch with its start
        found = _loop(*trials, _trial(PERSISTENT, persistent_s, rounds=5), settings=settings)
        named = {finding.name: finding for finding in diagnose(found).findings}
        assert ("short-epochs" in named) is is_named
        if is_named:
            gain = (40 * 0.016 + 0.7) / (40 * 0.016)
            assert named["short-epochs"].gain == pytest.approx(gain)
            assert (named["short-epochs"].is_measured, named["short-epochs"].is_uncertain) == (True, False)


def test_starts_of_workers_are_the_bottleneck_of_samples_that_cannot_be_made_in_the_training_process() -> None:
    settings = Settings(dataset="D", num_workers=2, start_method="fork", batch_size=8, length=40)
    trials = (_with_starts(0.0, 0.78, 0.78, 0.0), _trial(FREE, 0.012))
    found = _loop(*trials, settings=settings, samples=None, transport_s=None, notes=("samples: AttributeError",))
    verdict = diagnose(found).verdict
    assert (verdict.name, verdict.remedy) == ("start-up-bound", "persistent_workers=True")
    waits = (_trial(AS_IS, 0.060, 0.050), trials[1])
    assert diagnose(replace(found, trials=waits)).verdict.name == "unknown"


def test_starts_are_compared_with_steps_as_they_are_on_a_quiet_machine_and_only_perhaps() -> None:
    settings = Settings(dataset="D", num_workers=2, start_method="fork", batch_size=8, length=40)
    busy = Machine(cores=2, others_cores=1.0, intra_op_threads=2)
    as_is = replace(_uneven(AS_IS, 0.70, 0.30, 0.70), startup_s=1.6)  # its windows differ, and wait for nothing
    trials = (as_is, _trial(FREE, 0.70), _trial(ONE_THREAD, 0.010))
    short = _loop(*trials, settings=settings, machine=busy, samples=None)
    named = {finding.name: finding.is_uncertain for finding in diagnose(short).findings}
    assert named["short-epochs"]
    assert diagnose(short).verdict.name == "unknown", "no window had a start"
    assert "short-epochs" not in _names(replace(short, machine=replace(busy, others_cores=0.1)))
    loads_long = replace(_loop().samples, sample_s=0.1)  # type: ignore[type-var]
    assert "short-epochs" not in _names(replace(short, samples=loads_long))


def test_no_gain_is_estimated_while_other_programs_take_the_processors() -> None:
    line = HotLine(line="train.py:9: copy.deepcopy(record)", calls="copy.deepcopy", fraction=0.7)
    found = _loop()
    found = replace(found, samples=replace(found.samples, lines=(line,)))  # type: ignore[type-var]
    (finding,) = diagnose(found).findings
    assert finding.gain is not None
    (finding,) = diagnose(replace(found, machine=Machine(cores=4, others_cores=3.0))).findings
    assert (finding.name, finding.gain) == ("copied-for-each-sample", None)


@pytest.mark.parametrize(
    ("workers", "cores", "gain"),
    [
        (0, 4, 40 / (5 + 35 * 0.5)),  # the step takes turns with loading
        (2, 4, 40 / 20),  # it is hidden behind it
        (2, 2, 40 / (5 / 2 + 37.5 * 0.5)),  # it takes its share of the cores from it
    ],
)
def test_an_estimate_leaves_the_step_and_the_other_half_of_loading(workers: int, cores: int, gain: float) -> None:
    line = HotLine(line="train.py:9: copy.deepcopy(record)", calls="copy.deepcopy", fraction=0.6)
    costs = replace(_loop().samples, lines=(line,), sample_s=0.005, collate_s=0.008)  # type: ignore[type-var]
    settings = Settings(dataset="D", num_workers=workers, start_method="fork" * bool(workers), batch_size=8)
    found = _loop(samples=costs, settings=settings, machine=Machine(cores=cores), transport_s=None)
    assert diagnose(found).findings[0].gain == pytest.approx(gain)
    always = replace(line, fraction=0.95)
    found = replace(found, samples=replace(costs, lines=(always,), collate_s=0.0))
    assert diagnose(found).findings[0].gain == pytest.approx(40 / 5), "95 % are all of it"
    sent = replace(found, transport_s=0.003 if workers else None)
    assert diagnose(sent).findings[0].gain == pytest.approx(40 / (8 if workers else 5)), (
        "the loop also receives its batches"
    )


def test_what_a_loader_gains_beyond_the_wait_on_a_busy_machine_is_chance() -> None:
    for waited_s, is_uncertain in ((0.035, False), (0.010, True)):
        trials = _trial(AS_IS, 0.040, waited_s), _trial(FREE, 0.005), _trial(PENSTOCK, 0.015)
        found = _loop(*trials, machine=Machine(cores=4, others_cores=3.0))
        named = {one.name: one.is_uncertain for one in diagnose(found).findings}
        assert named["penstock-faster"] is is_uncertain


def test_a_lock_is_known_without_a_clear_trial_by_workers_that_sleep_while_the_loop_waits() -> None:
    activity = WorkerActivity(workers=1, busy_threads=1.0, cores=0.4, asleep_fraction=0.6)
    trials = (_trial(AS_IS, 0.081, 0.080), _trial(FREE, 0.001), _uneven(MORE_WORKERS, 0.120, 0.060, 0.080))
    found = _loop(*trials, worker_activity=activity)
    assert "workers-do-not-scale" in _names(found)
    assert "workers-do-not-scale" not in _names(replace(found, worker_activity=None))
    crowded = replace(found, machine=Machine(cores=1))
    assert "workers-do-not-scale" not in _names(crowded)
    slowed = replace(activity, asleep_fraction=0.1)  # by a step whose threads keep the cores
    assert "workers-do-not-scale" not in _names(replace(found, worker_activity=slowed))


def test_workers_that_sleep_while_the_step_runs_are_ahead_of_it_and_wait_for_no_lock() -> None:
    activity = WorkerActivity(workers=2, busy_threads=1.0, cores=0.3, asleep_fraction=0.7)
    trials = (_trial(AS_IS, 0.081, 0.028), _trial(FREE, 0.010), _uneven(MORE_WORKERS, 0.120, 0.060, 0.080))
    assert "workers-do-not-scale" not in _names(_loop(*trials, worker_activity=activity))


def _few_batches(batches: int, step_s: float, *free_s: float, asleep: float = 0.0) -> Measurements:
    """A loop whose 2 workers, with up to 4 batches ahead, need 300 ms for a batch, and that waits for none of a few."""
    window = TimingWindow(batches=batches, wall_s=batches * step_s, wait_s=0.0, step_s=batches * step_s)
    samples = replace(_loop().samples, sample_s=0.6 / 8, collate_s=0.0)  # type: ignore[type-var]
    return _loop(
        Trial(name=AS_IS, windows=(window,) * len(free_s)),
        _uneven(FREE, *free_s),
        machine=Machine(cores=2),
        samples=samples,
        worker_activity=WorkerActivity(workers=2, busy_threads=1.0, asleep_fraction=asleep),
    )


def test_a_loop_that_took_no_more_batches_than_were_made_ahead_is_bound_by_workers_that_never_were() -> None:
    line = HotLine(line="train.py:9: audio, _ = sf.read(path)", calls="soundfile.read", fraction=0.9)
    bound = _few_batches(1, 0.44, 0.21, 0.7, 0.5, 0.45)  # contended, the step takes longer than 300 ms
    bound = replace(bound, samples=replace(bound.samples, read_nbytes=300 << 20, lines=(line,)))  # type: ignore[type-var]
    diagnosis = diagnose(bound)
    assert (diagnosis.verdict.name, diagnosis.findings[0].name) == ("decode-bound", "reads-more-than-it-keeps")
    assert diagnosis.verdict.gain is None, "rounds with free loading do not tell"
    assert diagnose(_few_batches(2, 0.44, 0.22, 0.22)).verdict.gain == pytest.approx(2.0)
    assert diagnose(_few_batches(1, 0.44, 0.40, 0.42, 0.7, 0.45)).verdict.name == "unknown"
    for kept_up in (
        _few_batches(1, 0.44, 0.21, 0.7, 0.5, 0.45, asleep=0.3),
        _few_batches(2, 0.44, 0.21, 0.7, 0.5, 0.45),
        _few_batches(1, 0.88, 0.88, 0.9, 0.85, 0.88),
    ):
        assert diagnose(kept_up).verdict.name == "healthy"


def test_a_loop_that_was_far_faster_in_its_only_round_with_free_loading_is_not_called_healthy() -> None:
    diagnosis = diagnose(_loop(_trial(AS_IS, 0.040, 0.001, rounds=1), _trial(FREE, 0.020, rounds=1)))
    assert (diagnosis.verdict.name, "--seconds" in diagnosis.verdict.remedy) == ("unknown", True)


def test_a_loop_that_hardly_waits_is_healthy() -> None:
    found = _loop(_trial(AS_IS, 0.042, 0.001), _trial(FREE, 0.041))
    assert (diagnose(found).verdict.name, diagnose(found).findings) == ("healthy", ())


def test_a_loop_that_others_slow_down_is_not_called_healthy_before_an_epoch_was_seen() -> None:
    machine = Machine(cores=2, intra_op_threads=2, load=8.0, others_cores=1.8)
    settings = Settings(dataset="D", batch_size=8, length=100)
    trials = _trial(AS_IS, 0.6, 0.01), _trial(FREE, 0.6), _trial(ONE_THREAD, 0.03)
    slow = _loop(*trials, machine=machine, settings=settings, batches_requested=30)
    assert slow.machine.is_busy
    verdict = diagnose(slow).verdict
    assert verdict.name == "unknown"
    assert "20.0 times as long" in verdict.evidence
    assert "30 of the 100 batches" in verdict.evidence
    assert diagnose(replace(slow, batches_requested=130)).verdict.name == "healthy"
    assert diagnose(replace(slow, trials=(*trials[:2], _trial(ONE_THREAD, 0.4)))).verdict.name == "healthy"


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
    ("low", "median", "high", "rounds", "is_clear", "is_negligible"),
    [
        (1.2, 1.5, 1.9, 3, True, False),
        (0.5, 0.7, 0.9, 3, True, False),
        (0.9, 1.3, 1.9, 3, False, False),
        (0.97, 1.01, 1.1, 3, True, True),
        (2.0, 2.0, 2.0, 1, False, False),
    ],
)
def test_a_gain_is_clear_when_all_rounds_agree(
    low: float, median: float, high: float, rounds: int, is_clear: bool, is_negligible: bool
) -> None:
    found = Gain(median=median, low=low, high=high, rounds=rounds)
    assert (found.is_clear, found.is_negligible) == (is_clear, is_negligible)


def test_a_gain_compares_rounds_in_pairs() -> None:
    before = Trial(name="a", windows=tuple(_trial("", seconds).windows[0] for seconds in (0.1, 0.2)))
    after = Trial(name="b", windows=tuple(_trial("", seconds).windows[0] for seconds in (0.05, 0.1)))
    found = gain_between(before, after)
    assert found is not None
    assert (found.low, found.high) == (2.0, 2.0)


def test_workers_that_wait_for_each_other_are_found() -> None:
    trials = (_trial(AS_IS, 0.085, 0.08), _trial(FREE, 0.005), _trial(MORE_WORKERS, 0.085, 0.08))
    assert "workers-do-not-scale" in _names(_loop(*trials))
    faster = (_trial(AS_IS, 0.045, 0.04), _trial(FREE, 0.005), _trial(MORE_WORKERS, 0.045, 0.04))
    assert "workers-do-not-scale" not in _names(_loop(*faster))


def test_cheap_batches_need_no_workers_unless_a_trial_says_otherwise() -> None:
    samples = SampleCosts(samples=100, batch_samples=8, sample_s=1e-6, median_s=1e-6, batch_nbytes=64)
    trials = (_trial(AS_IS, 0.002, 0.0019), _trial(FREE, 0.0001))
    assert "workers-cost-more" in _names(_loop(*trials, samples=samples))
    slower = (*trials, _trial(NO_WORKERS, 0.004, 0.0039))
    assert "workers-cost-more" not in _names(_loop(*slower, samples=samples))


def test_a_batch_of_many_small_tensors_is_to_be_merged_where_its_transport_is_most_of_loading() -> None:
    samples = SampleCosts(samples=100, batch_samples=64, sample_s=6e-5, median_s=6e-5, batch_tensors=256)
    settings = Settings(dataset="D", num_workers=2, start_method="fork", batch_size=64, collates_by_default=False)
    trials = (_trial(AS_IS, 0.035, 0.030), _trial(FREE, 0.005), _trial(NO_WORKERS, 0.010, 0.004))
    found = _loop(*trials, samples=samples, settings=settings, transport_s=0.027)
    finding = diagnose(found).findings[0]
    assert (finding.name, finding.gain, finding.is_measured) == ("many-tensors", pytest.approx(3.5), True)
    assert "256 tensors" in finding.evidence
    assert "collate_fn" in finding.remedy
    (slower, *_) = diagnose(replace(found, trials=(*trials[:2], _trial(NO_WORKERS, 0.050, 0.045)))).findings
    assert (slower.name, slower.gain, "num_workers=0" in slower.remedy) == ("many-tensors", None, False)
    for other in (
        replace(found, samples=replace(samples, batch_tensors=5)),
        replace(found, samples=replace(samples, batch_tensors_nbytes=256 << 20)),  # their bytes are the cost
        replace(found, samples=replace(samples, sample_s=0.001)),  # making them takes longer
        replace(found, settings=replace(settings, kind="penstock")),  # sends them in one slot
    ):
        assert "many-tensors" not in _names(other)


def test_workers_that_sleep_beside_cheap_batches_share_no_lock_and_are_not_needed() -> None:
    busy = _loop(
        _trial(AS_IS, 0.010, 0.009),
        _trial(FREE, 0.001),
        _trial(NO_WORKERS, 0.004, 0.003),
        machine=Machine(cores=2, others_cores=1.5),
        settings=Settings(dataset="D", num_workers=12, start_method="fork", batch_size=8),
        samples=SampleCosts(samples=100, batch_samples=8, sample_s=0.0003, median_s=0.0003),
        worker_activity=WorkerActivity(workers=12, busy_threads=0.0, asleep_fraction=0.95),
        transport_s=0.001,
    )
    finding = diagnose(busy).findings[0]
    assert (finding.name, finding.gain, finding.is_uncertain) == ("workers-cost-more", 2.5, False)
    dear = replace(busy, samples=SampleCosts(samples=100, batch_samples=8, sample_s=0.002, median_s=0.002))
    assert "workers-do-not-scale" in _names(dear)


def test_as_many_workers_as_there_are_is_no_advice_to_have_fewer() -> None:
    hidden = (_trial(AS_IS, 0.101, 0.001), _trial(FREE, 0.100))
    for workers, is_named in ((3, False), (4, True)):  # 1.5 for each core are 3
        settings = Settings(dataset="D", num_workers=workers, start_method="fork")
        assert ("too-many-workers" in _names(_loop(*hidden, settings=settings, machine=Machine(cores=2)))) is is_named


def test_a_step_takes_no_longer_than_it_took_in_the_loop_as_it_is() -> None:
    trials = (_trial(AS_IS, 0.100, 0.092), _trial(FREE, 0.800, rounds=1))
    busy = _loop(*trials, machine=Machine(cores=2, others_cores=1.5))
    assert diagnose(busy).verdict.name == "decode-bound", "the only round of free loading was slow, its step is not"


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


def test_contention_needs_more_threads_than_cores() -> None:
    trials = (_trial(AS_IS, 0.100, 0.001), _trial(FREE, 0.040))
    assert "cpu-contention" in _names(_loop(*trials, machine=Machine(cores=4, intra_op_threads=4)))
    assert "cpu-contention" not in _names(_loop(*trials, machine=Machine(cores=8, intra_op_threads=4)))


def test_contention_comes_with_what_a_trial_with_fewer_workers_gained() -> None:
    trials = (_trial(AS_IS, 0.100, 0.001), _trial(FREE, 0.040))
    machine = Machine(cores=4, intra_op_threads=4)
    inline = _trial(NO_WORKERS, 0.080, line="num_workers=0")
    gains = {one.remedy: one.gain for one in diagnose(_loop(*trials, inline, machine=machine)).findings}
    assert gains["num_workers=0"] == pytest.approx(1.25)
    assert gains["torch.set_num_threads(2) in the training process"] is None
    slower = _trial(NO_WORKERS, 0.120, line="num_workers=0")
    assert "num_workers=0" not in {one.remedy for one in diagnose(_loop(*trials, slower, machine=machine)).findings}


def test_loading_that_a_loop_hardly_waits_for_matters_where_free_loading_makes_its_step_faster() -> None:
    trials = (_trial(AS_IS, 0.100, 0.001), _trial(FREE, 0.040))
    assert diagnose(_loop(*trials)).verdict.name == "decode-bound"
    assert diagnose(_loop(*trials, machine=Machine(cores=4, others_cores=3.0))).verdict.name != "decode-bound"


def test_contention_below_its_threshold_is_advised_where_a_trial_with_fewer_workers_gained_on_a_quiet_machine() -> None:
    trials = (_trial(AS_IS, 0.100, 0.001), _trial(FREE, 0.070), _trial(NO_WORKERS, 0.080, line="num_workers=0"))
    found = _loop(*trials, machine=Machine(cores=4, intra_op_threads=4))
    assert "cpu-contention" in _names(found)
    assert "cpu-contention" not in _names(replace(found, trials=found.trials[:2]))
    assert "cpu-contention" not in _names(replace(found, machine=replace(found.machine, others_cores=2.0)))


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


def _run(
    timeline: tuple[TimelinePoint, ...] = (), settings: dict[str, object] | None = None, **counted: object
) -> RunRecord:
    statistics = LoaderStatistics(batches=100, samples=800, **counted)  # type: ignore[arg-type]
    loader = LoaderRecord(name="Images", settings=settings or {}, statistics=statistics)
    return RunRecord(command=("train.py",), started="", wall_s=60.0, cpus=4, loaders=(loader,), timeline=timeline)


def test_a_run_that_waited_names_what_it_waited_for_and_calls_its_gain_an_estimate() -> None:
    stages = StageTimes(fetch_s=80.0, collate_s=4.0, transport_s=1.0, wait_s=39.0, step_s=10.0)
    (finding,) = findings_of_run(_run(stages=stages, worker_type="process", workers=2))
    assert (finding.name, finding.gain, finding.is_measured) == ("loading-bound", 2.0, False)
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


def test_a_loop_that_was_seen_within_an_epoch_is_bound_by_the_starts_that_it_will_have() -> None:
    settings = Settings(dataset="D", num_workers=2, start_method="spawn", batch_size=8, length=40)
    as_is = replace(_trial(AS_IS, 0.040, 0.001), startup_s=1.2, unseen_startup_s=1.1)
    diagnosis = diagnose(_loop(as_is, _trial(FREE, 0.030), settings=settings))
    assert (diagnosis.verdict.name, diagnosis.verdict.remedy) == ("start-up-bound", diagnosis.findings[0].remedy)
    assert "an epoch of 40 batches" in diagnosis.verdict.evidence


def test_a_busy_machine_on_which_starts_may_matter_is_not_called_healthy() -> None:
    settings = Settings(dataset="D", num_workers=2, start_method="spawn", batch_size=8, length=40)
    as_is = replace(_uneven(AS_IS, 0.70, 0.30, 0.70), startup_s=3.0)
    trials = (as_is, _trial(FREE, 0.70), _trial(ONE_THREAD, 0.100))
    quick = replace(_loop().samples, sample_s=1e-6, median_s=1e-6)  # type: ignore[type-var]
    busy = _loop(
        *trials, settings=settings, machine=Machine(cores=2, others_cores=1.0, intra_op_threads=2), samples=quick
    )
    assert waits_for_processors(busy)
    assert diagnose(replace(busy, batches_requested=50)).verdict.name == "unknown"


@pytest.mark.parametrize(("sample_s", "verdict"), [(4e-4, "decode-bound"), (5e-5, "healthy")])
def test_a_step_that_others_delay_hides_no_loading_of_a_loop_without_workers(sample_s: float, verdict: str) -> None:
    samples = replace(_loop().samples, sample_s=sample_s, median_s=sample_s, collate_s=1e-4)  # type: ignore[type-var]
    trials = (_trial(AS_IS, 0.026, 0.0047), _uneven(FREE, 0.010, 0.060, 0.005), _trial(ONE_THREAD, 0.004))
    busy = _loop(
        *trials,
        settings=Settings(dataset="D", batch_size=8, length=40),
        machine=Machine(cores=2, others_cores=1.0, intra_op_threads=2),
        samples=samples,
        transport_s=None,
        batches_requested=50,
    )
    assert diagnose(busy).verdict.name == verdict


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
    side_by_side, in_turn = (
        replace(_waiting(), settings=settings, trials=(_trial(AS_IS, batch_s, 0.9 * batch_s), _trial(FREE, 0.001)))
        for batch_s in (0.011, 0.080)
    )
    assert _names(side_by_side) == ["too-few-workers"]
    assert _names(in_turn) == ["workers-do-not-scale"]
    busy = replace(in_turn, machine=Machine(cores=4, others_cores=3.0))
    (finding,) = diagnose(busy).findings
    assert (finding.name, finding.is_uncertain) == ("too-few-workers", True), "others may take the time"
    for asleep, name in ((0.2, "too-few-workers"), (0.97, "workers-do-not-scale")):  # 130 or 620 ms, samples 76
        slept = replace(busy, worker_activity=WorkerActivity(workers=8, busy_threads=1.0, asleep_fraction=asleep))
        assert [(one.name, one.is_uncertain) for one in diagnose(slept).findings] == [(name, False)]


def test_uneven_samples_are_told_to_be_made_further_ahead_where_hardly_any_are() -> None:
    settings = Settings(dataset="D", num_workers=4, start_method="fork", batch_size=8, prefetch_factor=1)
    samples = SampleCosts(
        samples=64, batch_samples=8, sample_s=0.002, median_s=1e-4, slow_indices=(3,), slow_fraction=0.9
    )
    found = _loop(_trial(AS_IS, 0.020, 0.015), _trial(FREE, 0.005), settings=settings, samples=samples)
    assert _names(found)[:2] == ["prefetches-little", "slow-samples"]
    assert _names(replace(found, settings=replace(settings, prefetch_factor=2)))[0] == "slow-samples"
    even = replace(samples, slow_indices=(), sample_s=0.002)
    assert "prefetches-little" not in _names(replace(found, samples=even))


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


@pytest.mark.parametrize("rounds", [2, 4])
def test_nothing_is_estimated_where_workers_delay_the_step_by_as_much_as_nobody_knows(rounds: int) -> None:
    delayed = _loop(_trial(AS_IS, 0.5, 0.25, rounds), _trial(FREE, 0.05, rounds=rounds))
    assert gain_without(1.0, delayed) is None
    steady = _loop(_trial(AS_IS, 0.5, 0.45, rounds), _trial(FREE, 0.05, rounds=rounds))
    assert gain_without(1.0, steady) == pytest.approx(9.6, rel=0.1)


def test_a_dataset_that_workers_have_got_can_be_pickled() -> None:
    found = replace(_loop(), dataset_pickle=DatasetPickle(nbytes=0, seconds=0.0, failure="TypeError: h5py"))
    assert "not-picklable" not in _names(found)
    assert "not-picklable" in _names(replace(found, trials=()))


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


def test_steps_that_grow_come_before_what_loading_costs_if_the_loop_hardly_waits() -> None:
    for waits_s, first in ((0.0005, "steps-grow"), (0.004, "workers-cost-more")):
        grown = [(step_s, step_s + waits_s) for step_s in (0.002, 0.003, 0.004, 0.005)]
        now, free, none = (
            tuple(
                TimingWindow(batches=1, wall_s=wall_s, wait_s=wall_s - step_s, step_s=step_s) for step_s, wall_s in one
            )
            for one in (
                grown,
                [(step_s * 0.7, step_s * 0.7) for step_s, _ in grown],
                [(step_s, wall_s / 1.5) for step_s, wall_s in grown],
            )
        )
        trials = (Trial(name=AS_IS, windows=now), Trial(name=FREE, windows=free), Trial(name=NO_WORKERS, windows=none))
        found = _loop(*trials, transport_s=0.002)
        found = replace(found, samples=replace(found.samples, sample_s=1e-5, median_s=1e-5, collate_s=0.0))  # type: ignore[type-var]
        assert _names(found)[0] == first
        assert "steps-grow" in _names(found)


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
    assert ("threads-in-workers" in _names(others)) is is_named
    sends = replace(others, samples=replace(found.samples, sample_s=1e-5))  # type: ignore[type-var]
    # where others have the cores, a thread of Python's that sends batches waits for a core, and then for the lock
    assert ("threads-in-workers" in _names(sends)) is (busy > THRESHOLDS.certain_contending_threads)


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


@pytest.mark.parametrize(
    ("steps_between", "has_gradients", "gain"), [(10, True, 2.0 / 1.1), (10, False, 2.0 / 1.1), (40, True, None)]
)
def test_a_validation_after_every_few_steps_is_named_with_what_doing_it_once_would_gain(
    steps_between: int, has_gradients: bool, gain: float | None
) -> None:
    found = _loop(_trial(AS_IS, 0.040, 0.001), _trial(FREE, 0.039))
    one = RepeatedPass(
        dataset="Rows", batches=40, batch_s=0.01, passes=3, steps_between=steps_between, has_gradients=has_gradients
    )
    found = replace(found, repeated_passes=(one,), settings=replace(found.settings, length=100))
    findings = diagnose(found).findings
    if gain is None:
        assert findings == (), "20 % may be worth it"
        return
    assert (findings[0].name, findings[0].gain) == ("validates-often", pytest.approx(gain))
    assert ("no_grad" in findings[0].remedy) is has_gradients


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


def test_a_worker_that_takes_twice_as_long_beside_another_reads_all_though_the_loop_hardly_waits() -> None:
    settings = Settings(dataset="Stream", num_workers=2, start_method="fork", batch_size=8, is_iterable=True)
    contended = _loop(_trial(AS_IS, 0.032, 0.001), _trial(FREE, 0.022), settings=settings, machine=Machine(cores=2))
    contended = replace(contended, worker_share=WorkerShare(sample_s=0.02, alone_s=0.01))
    assert _names(contended)[0] == "each-worker-reads-all"
    own_part = replace(contended, worker_share=WorkerShare(sample_s=0.012, alone_s=0.01))
    ahead = WorkerActivity(workers=2, busy_threads=1.0, making_cores=9.0)  # of what may have been made ahead
    assert "each-worker-reads-all" not in _names(replace(own_part, worker_activity=ahead))
    hidden = replace(contended, trials=(_trial(AS_IS, 0.022, 0.001), _trial(FREE, 0.022)))
    assert "each-worker-reads-all" not in _names(hidden), "it costs this loop nothing"


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
