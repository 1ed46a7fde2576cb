"""What the steps of a loop do: what they keep, which parameters they train, and what slows all of them down."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probe_results import HotLine
from penstock.observe.doctor.probes.steps.leak_watch import LEAST_STEPS, LeakWatch
from penstock.observe.doctor.probes.steps.step_calls import StepCallRecorder
from penstock.observe.doctor.rendering import render
from penstock.observe.doctor.step_results import KeptTensors, StepCalls
from penstock.observe.doctor.trial import AS_IS, TimingWindow, Trial

Step = Callable[[nn.Module, torch.Tensor], object]


def observed(step: Step, steps: int = 3) -> StepCalls:
    """Return what a recorder sees of `step`, called with a model and a batch."""
    torch.manual_seed(0)
    recorder, model = StepCallRecorder(), nn.Linear(4, 1)
    for _ in range(steps):
        recorder.enter()
        step(model, torch.ones(2, 4))
        recorder.leave()
    return recorder.result()


def trained(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    return loss


def test_anomaly_detection_and_profilers_are_named() -> None:
    assert observed(trained).debugged_by == ()
    with torch.autograd.set_detect_anomaly(True), torch.profiler.profile():
        calls = observed(trained)
    (finding,) = diagnose(_timed(step_calls=calls)).findings
    assert finding.name == "debugging-every-step"
    assert "set_detect_anomaly(True)" in finding.evidence
    assert "torch.profiler" in finding.evidence


def _timed(**seen: Any) -> Measurements:
    windows = (TimingWindow(batches=20, wall_s=1.0, wait_s=0.1, step_s=0.9),) * 3
    trials = (Trial(name=AS_IS, windows=windows),)
    own = Settings(dataset="Rows")
    return Measurements(name="train", machine=Machine(cores=2), settings=own, has_step=True, trials=trials, **seen)


def _rows(steps: int, step: Step, model: nn.Module) -> StepCalls:
    recorder = StepCallRecorder()
    for _ in range(steps):
        batch = torch.rand(16, 4, dtype=next(model.parameters()).dtype)
        recorder.enter(batch)
        step(model, batch)
        recorder.leave()
    return recorder.result()


@pytest.mark.parametrize("update", ["optimizer", "data", "none"])
def test_parameters_that_get_gradients_and_do_not_change_are_counted(update: str) -> None:
    body, head = nn.Linear(4, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*head.parameters(), *(body.parameters() if update == "optimizer" else [])], lr=0.1)

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if update == "data":
            for one in body.parameters():
                one.data.add_(one.grad, alpha=-0.1)  # type: ignore[arg-type]

    found = _rows(3, step, nn.Sequential(body, head))
    assert found.parameters == 4 * 8 + 8 + 8 + 1
    assert found.untrained_parameters == (4 * 8 + 8 if update == "none" else 0)


def test_a_frozen_body_and_steps_without_an_update_have_no_useless_gradients() -> None:
    body, head = nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    assert _rows(3, step, nn.Sequential(body, head)).untrained_parameters == 0

    def accumulates(model: nn.Module, batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()

    assert _rows(3, accumulates, nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))).untrained_parameters == 0


def test_memory_that_a_step_resizes_or_frees_can_be_resized_while_it_is_observed() -> None:
    def step(model: nn.Module, batch: torch.Tensor) -> None:
        kept = torch.zeros(3)
        kept.resize_(9)
        joined = torch.empty(0)
        torch.cat([batch, batch], out=joined)
        model(batch).sum().backward()
        weight = next(model.parameters())
        storage, values = weight.untyped_storage(), weight.detach().clone()
        nbytes = storage.nbytes()
        storage.resize_(0)
        storage.resize_(nbytes)
        with torch.no_grad():
            weight.copy_(values)

    assert _rows(2, step, nn.Linear(4, 1)).steps == 2


def test_functional_transforms_and_traces_with_labels_run_while_they_are_observed(
    recwarn: pytest.WarningsRecorder,
) -> None:
    recorder, model = StepCallRecorder(), nn.Linear(4, 3)
    for _ in range(2):
        batch = torch.rand(16, 4), torch.randint(0, 3, (16,))
        recorder.enter(batch)

        def loss(weights: dict[str, torch.Tensor], batch: Any = batch) -> torch.Tensor:
            return nn.functional.cross_entropy(torch.func.functional_call(model, weights, batch[0]), batch[1])

        gradients = torch.func.grad(loss)(dict(model.named_parameters()))
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        recorder.leave()
        assert torch.allclose(gradients["weight"], model.weight.grad)  # type: ignore[arg-type]
        model.zero_grad()
    assert recorder.result().trains
    assert not list(recwarn)


def test_inputs_with_gradients_are_no_parameters() -> None:
    def attack(model: nn.Module, batch: torch.Tensor) -> None:
        inputs = batch.clone().requires_grad_()
        model(inputs).sum().backward()
        with torch.no_grad():
            for one in model.parameters():
                one -= 0.1 * one.grad  # type: ignore[operator]

    found = _rows(3, attack, nn.Linear(4, 1))
    assert (found.parameters, found.untrained_parameters) == (5, 0)


class Unfriendly:
    """Its attributes and its class cannot be asked for."""

    __slots__ = ()

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)

    @property
    def __class__(self) -> type:
        raise RuntimeError("its class")


def test_a_batch_that_answers_no_questions_does_not_fail_the_step() -> None:
    recorder, model = StepCallRecorder(), nn.Linear(4, 1)
    for _ in range(2):
        batch = {"x": torch.randn(8, 4), "extra": Unfriendly()}
        recorder.enter(batch)
        loss = model(batch["x"]).square().mean()
        loss.backward()
        loss.item()
        recorder.leave()
    assert [call.what for call in recorder.result().synchronizing] == [".item()"]


def test_what_a_step_deletes_is_freed_while_it_is_observed() -> None:
    are_alive: list[bool] = []

    def deletes(model: nn.Module, x: torch.Tensor) -> None:
        hidden = model(x)
        before, loss = weakref.ref(hidden), hidden.square().mean()
        loss.backward()
        loss.item()
        del hidden, loss
        are_alive.append(before() is not None)

    observed(deletes)
    assert are_alive
    assert not any(are_alive)


def _kept(step: Callable[[nn.Module, torch.Tensor], object], steps: int = LEAST_STEPS + 3) -> list[KeptTensors]:
    torch.manual_seed(0)
    watch, model = LeakWatch(), nn.Linear(4, 1)
    for _ in range(steps):
        batch = torch.rand(64, 4)
        watch.enter()
        step(model, batch)
        del batch
        watch.leave()
    return [*watch.result()]


def test_losses_that_a_program_keeps_in_a_list_of_dicts_or_in_a_sum_are_found_with_the_line_that_makes_them() -> None:
    history: list[dict[str, object]] = []
    total = torch.zeros(())

    def listed(model: nn.Module, batch: torch.Tensor) -> None:
        loss = model(batch).square().mean()
        loss.backward()
        history.append({"loss": loss, "kind": "train"})

    def summed(model: nn.Module, batch: torch.Tensor) -> None:
        nonlocal total
        loss = model(batch).square().mean()
        loss.backward()
        total = total + loss

    (kept, *_) = _kept(listed)
    assert (kept.has_graph, "loss = model(batch)" in kept.line) == (True, True)
    assert [(one.is_chain, "total = total + loss" in one.line) for one in _kept(summed)] == [(True, True)]
    assert _kept(listed, steps=LEAST_STEPS - 1) == [], "too few steps"


def test_a_centre_that_is_updated_with_its_graph_is_found() -> None:
    centre = torch.zeros(1)

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        nonlocal centre
        outputs = model(batch)
        (outputs - centre.detach()).square().mean().backward()
        centre = 0.9 * centre + 0.1 * outputs.mean(0)

    assert any(one.is_chain for one in _kept(step))


def test_the_last_losses_a_bounded_queue_and_sums_of_a_few_losses_are_kept_by_nobody() -> None:
    last: torch.Tensor | None = None
    recent: deque[torch.Tensor] = deque(maxlen=100)
    values: list[float] = []
    waiting: list[torch.Tensor] = []

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        nonlocal last
        loss = model(batch).square().mean()
        waiting.append(loss)
        if len(waiting) == 2:
            torch.stack(waiting).sum().backward()
            waiting.clear()
        values.append(loss.item())
        recent.append(loss.detach().clone())
        last = loss

    assert _kept(step) == []


_LOSS = KeptTensors(
    line="train.py:9: loss = f(x)", step_nbytes=4, steps=9, has_graph=True, is_chain=False, held_by="a list of 12"
)


@pytest.mark.parametrize(
    ("kept", "is_named"),
    [
        (_LOSS, True),
        (replace(_LOSS, has_graph=False), False),  # the values of an epoch
        (replace(_LOSS, has_graph=False, is_chain=True), True),
        (replace(_LOSS, has_graph=False, step_nbytes=8 << 20), True),
    ],
)
def test_what_is_kept_counts_with_its_graph_or_where_an_epoch_has_very_much_of_it(
    kept: KeptTensors, is_named: bool
) -> None:
    found = replace(_timed(kept_tensors=(kept,)), settings=Settings(dataset="Rows", length=100))
    findings = diagnose(found).findings
    assert [one.name for one in findings] == ["kept-by-the-program"] * is_named
    assert all("train.py:9: loss = f(x)" in one.evidence for one in findings)


@pytest.mark.parametrize("cleared", [True, False])
def test_gradients_that_are_cleared_before_the_optimizer_uses_them_update_nothing(cleared: bool) -> None:
    optimizers: list[torch.optim.Optimizer] = []

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        optimizers[:] = optimizers or [torch.optim.SGD(model.parameters(), lr=0.1)]
        optimizers[0].zero_grad()
        model(batch).square().mean().backward()
        if cleared:
            optimizers[0].zero_grad()
        optimizers[0].step()

    names = [one.name for one in diagnose(_timed(step_calls=_rows(3, step, nn.Linear(4, 1)))).findings]
    assert ("never-updated" in names) is cleared


@pytest.mark.parametrize(
    ("calls", "name"),
    [
        ("torch.serialization.save", "saves-every-step"),
        ("copy.deepcopy", "copied-every-step"),
        ("sklearn.metrics._ranking.roc_auc_score", "measures-every-step"),
        ("logging.Logger.info", "logs-every-step"),
        ("torch.utils.data.dataloader._BaseDataLoaderIter.__next__", "waits-for-another-loader"),
        ("torch.optim.adamw.AdamW.step", None),
        ("", None),  # whatever its text says
    ],
)
def test_what_every_step_calls_of_a_library_is_named_with_what_it_costs(calls: str, name: str | None) -> None:
    line = HotLine(line="train.py:9: torch.save(copy.deepcopy(model))", calls=calls, fraction=0.8)
    found = _timed(step_lines=(line,))
    window = TimingWindow(batches=1, wall_s=1.0, wait_s=0.0, step_s=1.0)
    found = replace(found, trials=(Trial(name=AS_IS, windows=(window,) * 2),))
    diagnosis = diagnose(found)
    assert [one.name for one in diagnosis.findings] == [name] * (name is not None)
    if name is None:
        assert (diagnosis.verdict.name, "train.py:9" in diagnosis.verdict.evidence) == ("healthy", True)
        assert "80% of the step's time: train.py:9" in " ".join(render(found, diagnosis).split())
        return
    assert diagnosis.findings[0].gain == pytest.approx(5.0)
    for other in (replace(line, turns_fraction=0.1), replace(line, fraction=0.15)):
        assert diagnose(replace(found, step_lines=(other,))).findings == ()
