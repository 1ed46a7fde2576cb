"""Lines of a step that prepare its batch: which they are, and when and how it is worth a change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probe_results import HotLine, SampleCosts
from penstock.observe.doctor.probes.steps.step_calls import StepCallRecorder
from penstock.observe.doctor.step_results import PreparingLine, StepCalls
from penstock.observe.doctor.trial import AS_IS, TimingWindow, Trial
from penstock.observe.record.finding import Finding

_WIDTH = 512


class _Spectrum(nn.Module):
    """A model of which the first operation has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(_WIDTH // 2 + 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        power = torch.fft.rfft(x).abs()
        return self.head(power)


def _observe(step: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> StepCalls:
    """Return what is seen of a program whose step makes what its model gets."""
    torch.manual_seed(0)
    model, recorder = _Spectrum(), StepCallRecorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        batch = torch.rand(8, _WIDTH)
        recorder.enter(batch)
        loss = step(model, batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorder.leave()
    return recorder.result()


def _prepares(step: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> str:
    return "\n".join(one.line for one in _observe(step).preparing)


def test_what_a_step_makes_of_its_batch_and_of_nothing_learned_prepares_it() -> None:
    bank = torch.rand(4, 1, 31)

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            kernel = bank[torch.randint(4, (1,))]
            wet = torch.conv1d(batch[:, None], kernel, padding=15)[:, 0]
        noisy = wet + 0.1 * torch.randn_like(wet)
        unused = noisy.cumsum(1)
        assert unused.shape == batch.shape
        outputs = model(noisy)
        assert outputs.requires_grad
        return outputs

    lines = _prepares(step)
    assert "wet = torch.conv1d" in lines
    assert "noisy = wet" in lines
    for other in ("kernel =", "unused =", "power =", "outputs ="):
        assert other not in lines


def test_outputs_of_a_teacher_and_all_that_is_made_of_them_are_learned() -> None:
    teacher = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()).requires_grad_(False).eval()

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(batch)
            weight = nn.functional.linear(batch, next(teacher.parameters()))
            scaled = (target * weight).softmax(1)
        return model(batch) * scaled

    assert _prepares(step) == ""


def test_a_batch_that_gradients_or_values_of_python_change_is_not_prepared_without_the_model() -> None:
    noise = iter((0.1, 0.2, 0.3))

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        asked = batch.clone().requires_grad_()
        model(asked).sum().backward()
        attacked = batch + 0.1 * asked.grad.sign()  # type: ignore[union-attr]
        noisy = attacked * next(noise)
        scaled = batch * next(iter([torch.rand(()).item()]))
        return model(noisy + scaled)

    assert _prepares(step) == ""


def test_what_uses_a_tensor_that_the_program_changes_in_each_step_depends_on_the_steps_before() -> None:
    mean = torch.zeros(_WIDTH)

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        mean.lerp_(batch.mean(0), 0.1)
        centered = batch - mean
        return model(centered)

    assert _prepares(step) == ""


@pytest.mark.parametrize(("taps", "is_left"), [(2400, False), (31, True)])
def test_an_fft_of_the_sizes_of_a_long_convolution_is_timed(taps: int, is_left: bool) -> None:
    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        rows, kernels = batch.repeat(1, 16), torch.ones(8, 1, taps)
        wet = torch.conv1d(nn.functional.pad(rows, (taps - 1, 0))[None], kernels, groups=8)[0, :, :_WIDTH]
        return model(wet)

    (found,) = (one for one in _observe(step).preparing if "wet =" in one.line)
    assert found.taps == (0 if is_left else taps)
    assert (found.left_by_fft == 1.0) is is_left
    assert is_left or found.left_by_fft < 0.8


def _found(line: PreparingLine, *, fraction: float = 0.5, loading_s: float = 0.0, **machine: Any) -> list[Finding]:
    calls = StepCalls(steps=3, trains=True, updates=True, preparing=(line,), training_lines=(line.line,))
    window = TimingWindow(batches=20, wall_s=1.0, wait_s=0.0, step_s=1.0)
    measured = Measurements(
        name="train",
        machine=Machine(**{"cores": 2, "intra_op_threads": 2, **machine}),
        settings=Settings(dataset="Clips", num_workers=2),
        samples=SampleCosts(samples=32, batch_samples=16, sample_s=loading_s / 16, median_s=loading_s / 16),
        has_step=True,
        trials=(Trial(name=AS_IS, windows=(window,) * 3),),
        step_lines=(HotLine(line=line.line, fraction=fraction),),
        step_calls=calls,
    )
    return [one for one in diagnose(measured).findings if one.name == "prepared-in-step"]


_LINE = "train.py:9: wave = rooms(wave)"


def test_a_preparation_that_an_fft_shortens_is_named_with_what_it_gains() -> None:
    (found,) = _found(PreparingLine(line=_LINE, cores=2.0, taps=2400, left_by_fft=0.1))
    assert found.gain == pytest.approx(1 / (1 - 0.45))
    assert not found.is_uncertain
    assert "torch.fft" in found.remedy
    assert "num_workers" not in found.remedy, "all cores are busy: workers would gain nothing"


def test_a_preparation_is_certainly_better_done_by_workers_only_where_it_leaves_cores_idle() -> None:
    idle, busy = PreparingLine(line=_LINE, cores=1.0), PreparingLine(line=_LINE, cores=2.0)
    (by_one,), (by_all,) = _found(idle), _found(busy)
    assert (by_one.is_uncertain, by_all.is_uncertain) == (False, True)
    assert "num_workers" in by_one.remedy
    (beside_others,) = _found(idle, others_cores=1.5)
    assert beside_others.is_uncertain
    (beside_workers,) = _found(idle, loading_s=0.04)  # of each 0.05 s
    assert beside_workers.is_uncertain
    assert _found(idle, fraction=0.2) == []
    assert _found(idle, accelerator="cuda") == [], "there, time passes in the lines that wait for it"
