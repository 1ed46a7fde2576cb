"""What has no pattern: lines beyond what they give, samplers, nested datasets, optimizers, denormal numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from sample_sets import Numbered
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset

from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probe_results import HotLine, Hotspot, SampleCosts, WorkerNoise
from penstock.observe.doctor.probes.sample_cost import SampleProbe
from penstock.observe.doctor.probes.steps.step_calls import StepCallRecorder
from penstock.observe.doctor.step_results import StepCall, StepCalls
from penstock.observe.doctor.trial import AS_IS, FREE, MORE_WORKERS, TimingWindow, Trial


def _trial(name: str, batch_s: float, wait_s: float = 0.0) -> Trial:
    window = TimingWindow(batches=10, wall_s=10 * batch_s, wait_s=10 * wait_s, step_s=10 * (batch_s - wait_s))
    return Trial(name=name, windows=(window,) * 4)


def _loop(**of_samples: object) -> Measurements:
    """A loop without workers that waits for its samples, of 3 ms each; two workers would be twice as fast."""
    samples = SampleCosts(
        samples=100,
        batch_samples=8,
        sample_s=0.003,
        median_s=0.003,
        storage_fraction=0.0,
        decode_fraction=0.0,
        transform_fraction=1.0,
        lines=(HotLine(line="train.py:9: label = self.encode(name)", fraction=0.95),),
    )
    return Measurements(
        name="train:main",
        machine=Machine(cores=2),
        settings=Settings(dataset="D", batch_size=8, length=100),
        has_step=True,
        trials=(_trial(AS_IS, 0.026, 0.024), _trial(FREE, 0.002), _trial(MORE_WORKERS, 0.013)),
        samples=replace(samples, **of_samples),  # type: ignore[arg-type]
    )


def _names(found: Measurements) -> list[str]:
    return [finding.name for finding in diagnose(found).findings]


@pytest.mark.parametrize(
    ("numbers", "names"),
    [
        pytest.param(49, ["costly-line", "no-workers"], id="58 µs for each number: it does other work"),
        pytest.param(150_528, ["no-workers", "costly-line"], id="19 ns for each: an image"),
    ],
)
def test_a_line_that_takes_far_longer_than_its_result_needs_comes_before_workers_that_share_it_out(
    numbers: int, names: list[str]
) -> None:
    assert _names(_loop(values_per_sample=numbers)) == names


def test_a_line_that_handles_many_numbers_to_keep_few_is_not_beyond_its_result() -> None:
    line = HotLine(line="train.py:9: power = spectrum(sound)", fraction=0.95, values=64_000)
    assert _names(_loop(values_per_sample=40, lines=(line,))) == ["no-workers", "costly-line"]


def _spread(*, is_random: bool) -> tuple[HotLine, ...]:
    return tuple(
        HotLine(line=f"train.py:{9 + at}: x = signal.f{at}(x)", fraction=fraction, is_random=is_random)
        for at, fraction in enumerate((0.36, 0.3, 0.2))
    )


_ROTATION = (HotLine(line="train.py:9: image = image.rotate(angle)", fraction=0.7, is_random=True),)
_NOISE = WorkerNoise(same_in_workers=False, same_in_epochs=False, has_init_fn=False)
_OWN = (Hotspot(where="D.noise (train.py:7)", fraction=0.5),)


@pytest.mark.parametrize(
    ("lines", "hotspots", "noise", "is_certain"),
    [
        pytest.param(_spread(is_random=True), (), None, False, id="nothing can be kept, and no line stands out"),
        pytest.param(_ROTATION, (), None, False, id="one line, by a library"),
        pytest.param(_spread(is_random=False), (), _NOISE, False, id="perhaps of what is random"),
        pytest.param(_spread(is_random=False), (), None, True, id="what is always the same can be made once"),
        pytest.param(_spread(is_random=True), _OWN, _NOISE, True, id="Python of its own"),
    ],
)
def test_what_libraries_make_of_random_numbers_is_no_certain_fault(
    lines: tuple[HotLine, ...], hotspots: tuple[Hotspot, ...], noise: WorkerNoise | None, is_certain: bool
) -> None:
    measured = replace(_loop(lines=lines, hotspots=hotspots, values_per_sample=150_528), worker_noise=noise)
    (found,) = (finding for finding in diagnose(measured).findings if finding.name == "costly-line")
    assert found.is_uncertain is not is_certain


@pytest.mark.parametrize(("start_s", "is_named"), [(2.0, True), (0.2, False)])
def test_a_sampler_that_works_before_an_epochs_first_index_is_named(start_s: float, is_named: bool) -> None:
    found = _loop(sampler_start_s=start_s, lines=())
    finding = next((one for one in diagnose(found).findings if one.name == "costly-sampler-start"), None)
    assert (finding is not None) is is_named
    assert finding is None or finding.gain == pytest.approx((2.0 + 2.6) / 2.6)


def test_the_start_of_a_shuffle_is_not_named_where_epochs_take_a_millisecond() -> None:
    found = _loop(sampler_start_s=0.0004, lines=())
    found = replace(found, settings=replace(found.settings, length=1), trials=(_trial(AS_IS, 0.0001, 0.00005),))
    assert "costly-sampler-start" not in _names(found)


class _Sorted(Sampler[int]):
    """Computes before the first index of an epoch."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        lengths = [sum(range(2000)) for _ in range(400)]
        yield from range(self.length if lengths else 0)


def test_what_a_sampler_computes_at_an_epochs_start_is_counted_apart_from_its_draws() -> None:
    probe = SampleProbe(DataLoader(Numbered(16, (2,)), batch_size=4, sampler=_Sorted(16)), seconds=0.2)
    probe.run()
    costs = probe.costs()
    assert costs is not None
    assert costs.sampler_start_s > 0.002 > costs.sampler_s


@pytest.mark.parametrize(("nested", "is_named"), [(700, True), (3, False)])
def test_datasets_inside_each_other_are_named_where_passing_samples_on_takes_the_time(
    nested: int, is_named: bool
) -> None:
    spot = Hotspot(where="ConcatDataset.__getitem__ (dataset.py:333)", fraction=0.8)
    assert ("nested-datasets" in _names(_loop(nested=nested, hotspots=(spot,), lines=()))) is is_named
    assert "nested-datasets" not in _names(_loop(nested=nested, hotspots=(replace(spot, fraction=0.1),), lines=()))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_is_collated_with_the_threads_that_collate_it_in_the_loop(workers: int) -> None:
    threads: list[int] = []

    def collate(samples: list[Any]) -> Any:
        threads.append(torch.get_num_threads())
        return torch.stack(samples)

    loader = DataLoader(Numbered(16, (2,)), batch_size=4, num_workers=workers, collate_fn=collate)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        probe = SampleProbe(loader, seconds=0.1)
        probe.run()
        probe.costs()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(threads) == {1 if workers else 2}


def test_datasets_that_were_added_in_a_loop_are_counted() -> None:
    dataset = part = TensorDataset(torch.arange(2))
    for _ in range(600):
        dataset = dataset + part
    probe = SampleProbe(DataLoader(Subset(dataset, range(8)), batch_size=4), seconds=0.1)
    probe.run()
    costs = probe.costs()
    assert costs is not None
    assert costs.nested == 601


def _step_bound(line: HotLine, calls: StepCalls) -> Measurements:
    trials = (_trial(AS_IS, 0.020, 0.001), _trial(FREE, 0.020))
    return replace(_loop(lines=()), trials=trials, step_lines=(line,), step_calls=calls)


@pytest.mark.parametrize(
    ("tensors", "numbers", "is_named"), [(900, 14_400, True), (900, 1 << 24, False), (8, 90, False)]
)
def test_an_optimizer_of_many_small_tensors_that_takes_most_of_a_step_is_named(
    tensors: int, numbers: int, is_named: bool
) -> None:
    line = HotLine(line="train.py:9: optimizer.step()", fraction=0.8, calls="torch.optim.adam.Adam.step")
    found = _step_bound(line, StepCalls(steps=3, optimized=(tensors, numbers)))
    assert ("many-small-parameters" in _names(found)) is is_named


def test_a_schedule_that_takes_a_large_part_of_every_step_is_named() -> None:
    line = HotLine(line="train.py:9: scheduler.step()", fraction=0.6, calls="torch.optim.lr_scheduler.LambdaLR.get_lr")
    assert _names(_step_bound(line, StepCalls(steps=3)))[0] == "schedules-every-step"
    wrapped = replace(line, line="train.py:8: optimizer.step()", calls="torch.optim.lr_scheduler.wrap_step.wrapper")
    assert "schedules-every-step" not in _names(_step_bound(wrapped, StepCalls(steps=3)))


def test_the_scheduler_of_a_diffusion_is_no_schedule_of_a_learning_rate() -> None:
    line = HotLine(line="train.py:9: x = noise_scheduler.step(noise, t, x).prev_sample", fraction=0.6, calls="")
    assert "schedules-every-step" not in _names(_step_bound(line, StepCalls(steps=3)))
    for own in ("self.lr_scheduler.step()", "if step % 2: scheduler.step()"):
        found = _step_bound(replace(line, line=f"train.py:9: {own}"), StepCalls(steps=3))
        assert "schedules-every-step" in _names(found)


def _fading(start: float) -> Callable[[], None]:
    def step() -> None:
        state = torch.full((64,), start)
        for _ in range(3):
            state = state * 0.5

    return step


@pytest.mark.parametrize(("start", "is_found"), [(1e-38, True), (1.0, False), (0.0, False)])
def test_denormal_numbers_of_every_step_are_found(start: float, is_found: bool) -> None:
    recorder = StepCallRecorder()
    for _ in range(3):
        recorder.enter(torch.zeros(2))
        _fading(start)()
        recorder.leave()
    found = recorder.result().denormals
    assert bool(found) is is_found
    assert all(call.per_step == 1.0 for call in found)
    named = _step_bound(HotLine(line="train.py:9: x", fraction=0.5), StepCalls(steps=3, denormals=found))
    assert ("denormal-numbers" in _names(named)) is is_found


def test_denormal_numbers_in_a_costly_line_are_certain() -> None:
    line = HotLine(line="train.py:9: state = state * leak", fraction=0.5)
    calls = StepCalls(steps=3, denormals=(StepCall(what="numbers", line=line.line, per_step=0.9),))
    finding = next(one for one in diagnose(_step_bound(line, calls)).findings if one.name == "denormal-numbers")
    assert not finding.is_uncertain
