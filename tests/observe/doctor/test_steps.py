"""What the steps of a loop do: graphs that they keep, and lines that no gradient depends on."""

from __future__ import annotations

import itertools
import linecache
import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.observe.doctor.causes import Diagnosis, diagnose
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probe_results import HotLine
from penstock.observe.doctor.probes.steps.call_statements import reached_by
from penstock.observe.doctor.probes.steps.constant_lines import ConstantLines
from penstock.observe.doctor.probes.steps.step_calls import StepCallRecorder
from penstock.observe.doctor.step_results import StepCall, StepCalls
from penstock.observe.doctor.trial import AS_IS, TimingWindow, Trial

Step = Callable[[nn.Module, torch.Tensor], object]


class Meter:
    """As examples of ImageNet training have it."""

    def __init__(self) -> None:
        self.sum = 0

    def update(self, value: object) -> None:
        self.sum = self.sum + value


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


def test_a_list_of_losses_with_their_graphs_is_named() -> None:
    kept: list[torch.Tensor] = []

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        loss = model(batch).square().mean()
        loss.backward()
        kept.append(loss)

    assert observed(step).graphs_held_by == "kept"


def test_a_sum_of_losses_and_a_meter_that_adds_them_are_named() -> None:
    total: torch.Tensor | int = 0
    meter = Meter()

    def added(model: nn.Module, batch: torch.Tensor) -> None:
        nonlocal total
        loss = model(batch).square().mean()
        loss.backward()
        total = total + loss

    def metered(model: nn.Module, batch: torch.Tensor) -> None:
        loss = model(batch).square().mean()
        loss.backward()
        meter.update(loss)

    assert observed(added).graphs_held_by == "total"
    assert observed(metered).graphs_held_by == "meter.sum"


def test_a_list_of_outputs_with_their_graphs_is_named() -> None:
    outputs: list[torch.Tensor] = []

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        output = model(batch)
        output.square().mean().backward()
        outputs.append(output)

    assert observed(step).graphs_held_by == "outputs"
    outputs.clear()
    assert observed(lambda model, batch: outputs.append(trained(model, batch).detach())).graphs_held_by is None


def test_losses_without_graphs_the_last_one_and_a_bounded_queue_keep_no_graph() -> None:
    values: list[object] = []
    last: torch.Tensor | None = None
    recent: deque[torch.Tensor] = deque(maxlen=100)

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        nonlocal last
        loss = model(batch).square().mean()
        loss.backward()
        values.extend([loss.detach(), loss.item()])
        recent.append(loss)
        last = loss

    assert observed(step).graphs_held_by is None


def test_a_loss_of_several_steps_before_its_backward_keeps_no_graph() -> None:
    waiting: list[torch.Tensor] = []

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        waiting.append(model(batch).square().mean())
        if len(waiting) == 2:
            torch.stack(waiting).sum().backward()
            waiting.clear()

    assert observed(step, steps=6).graphs_held_by is None


def training_lines(step: Step) -> str:
    """Return the lines that contribute to training, as one text."""
    return "\n".join(observed(step).training_lines)


@pytest.mark.parametrize("in_optimizer", [False, True])
def test_lines_that_gradients_depend_on_are_known(in_optimizer: bool) -> None:
    teacher = nn.Linear(4, 1)

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        with torch.no_grad():
            target = teacher(batch)
        scaled = batch * 2
        outputs = model(scaled)
        loss = (outputs - target).square().mean()
        loss.backward()
        spread = torch.histc(model.weight.grad, bins=10)
        assert spread.sum() > 0
        if in_optimizer:
            optimizer.step()

    lines = training_lines(step)
    for needed in ("target = teacher", "scaled = ", "outputs = ", "loss = ", "loss.backward()"):
        assert needed in lines
    assert "histc" not in lines
    assert ("optimizer.step()" in lines) == in_optimizer


def test_lines_of_an_optimizer_of_the_programs_own_are_training() -> None:
    class Signs(torch.optim.Optimizer):
        def step(self) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    direction = torch.sign(parameter.grad)
                    parameter.data.sub_(direction * group["lr"])

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        trained(model, batch)
        Signs(model.parameters(), {"lr": 0.1}).step()

    assert "direction = torch.sign" in training_lines(step)


def examined(line: HotLine, **changes: Any) -> Diagnosis:
    """Return what follows for a loop whose step passes mostly in `line`."""
    window = TimingWindow(batches=1, wall_s=1.0, wait_s=0.0, step_s=1.0)
    measured = Measurements(
        name="train.py",
        machine=Machine(cores=4),
        settings=Settings(dataset="Images", num_workers=2, start_method="fork", batch_size=8),
        has_step=True,
        trials=(Trial(name=AS_IS, windows=(window,) * 2),),
        step_lines=(line,),
        step_calls=StepCalls(steps=3, trains=True, training_lines=("train.py:5: outputs = model(images)",)),
    )
    return diagnose(replace(measured, **changes))


def test_a_line_of_the_step_that_no_gradient_depends_on_is_named_with_its_cost() -> None:
    line = HotLine(line="train.py:9: spread = torch.histc(gradient)", calls="", fraction=0.6)
    (finding,) = examined(line).findings
    assert (finding.name, "train.py:9" in finding.evidence) == ("costly-step-line", True)
    assert finding.gain == pytest.approx(2.5)
    growing = [TimingWindow(batches=1, wall_s=1.0, wait_s=0.0, step_s=seconds) for seconds in (0.2, 0.4, 0.6, 0.8, 1.0)]
    named = {one.name: one for one in examined(line, trials=(Trial(name=AS_IS, windows=tuple(growing)),)).findings}
    assert named["costly-step-line"].gain is None, "it takes another part of every step"
    assert "steps-grow" in named
    for other in (
        replace(line, line="train.py:5: outputs = model(images)"),
        replace(line, calls="torch.optim.adamw.AdamW.step"),
        replace(line, calls="torch._tensor.Tensor.backward"),
        replace(line, fraction=0.25),
        replace(line, turns_fraction=0.1),
    ):
        assert examined(other).findings == ()
    calls = StepCalls(steps=3, trains=True, operations={line.line: 1.0})
    cuda = Machine(cores=4, accelerator="cuda")
    assert examined(line, machine=cuda, step_calls=calls).findings == (), "it waits for the device there"
    assert examined(line, step_calls=StepCalls(steps=3)).findings == (), "no training was seen"


def test_a_step_that_computes_outside_of_torch_is_named_though_gradients_may_depend_on_it() -> None:
    line = HotLine(line="train.py:9: rates = np.cos(np.arange(steps))", calls="", fraction=0.6)
    calls = StepCalls(steps=3, trains=True, takes_values=True, observed_lines=("train.py:5: outputs = model(images)",))
    (finding,) = examined(line, step_calls=calls).findings
    assert (finding.name, "train.py:9" in finding.evidence) == ("computes-outside-torch", True)
    assert finding.gain == pytest.approx(2.5)
    for other in (replace(line, fraction=0.25), replace(line, turns_fraction=0.1), replace(line, feeds_loader=True)):
        assert examined(other, step_calls=calls).findings == ()
    in_torch = replace(calls, operations={line.line: 1.0})
    assert examined(line, step_calls=in_torch).findings == ()
    assert examined(line, step_calls=replace(calls, trains=False)).findings == (), "no training was seen"


def test_kept_graphs_are_a_finding_that_names_what_holds_them() -> None:
    line = HotLine(line="train.py:5: outputs = model(images)", calls="", fraction=0.9)
    calls = StepCalls(steps=3, trains=True, graphs_held_by="losses", training_lines=(line.line,))
    (finding,) = examined(line, step_calls=calls).findings
    assert (finding.name, "losses holds them" in finding.evidence) == ("graphs-kept", True)


def test_anomaly_detection_and_profilers_are_named() -> None:
    assert observed(trained).debugged_by == ()
    with torch.autograd.set_detect_anomaly(True), torch.profiler.profile():
        calls = observed(trained)
    line = HotLine(line="train.py:5: outputs = model(images)", calls="", fraction=0.9)
    (finding,) = examined(line, step_calls=replace(calls, training_lines=(line.line,))).findings
    assert finding.name == "debugging-every-step"
    assert "set_detect_anomaly(True)" in finding.evidence
    assert "torch.profiler" in finding.evidence


def test_a_compiled_model_is_observed_and_its_kept_losses_are_named() -> None:
    losses: list[torch.Tensor] = []
    compiled = torch.compile(nn.Linear(4, 1), backend="eager")

    def step(_: nn.Module, batch: torch.Tensor) -> None:
        loss = compiled(batch).square().mean()
        loss.backward()
        losses.append(loss)

    assert observed(step).graphs_held_by == "losses"
    line = HotLine(
        line="train.py:7: y = compiled(x)", calls="torch._dynamo.eval_frame.OptimizedModule.__call__", fraction=0.6
    )
    assert examined(line).findings == ()


class Hostile:
    """Its attributes, values and class cannot be asked for."""

    __slots__ = ()

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)

    @property
    def __class__(self) -> type:
        raise RuntimeError("its class")


class Opened(dict[str, object]):
    def values(self) -> Any:
        raise RuntimeError("a file would be opened")


def test_objects_of_the_program_are_not_asked_for_anything() -> None:
    hostile, opened, kept = Hostile(), Opened(), list[torch.Tensor]()

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        first, second = hostile, opened  # in the frame that is looked at
        loss = model(batch).square().mean()
        loss.backward()
        kept.append(loss)
        del first, second

    assert observed(step).graphs_held_by == "kept"


def _positions(length: int) -> torch.Tensor:
    angles = [[math.sin(at / 10**column) for column in range(4)] for at in range(length)]
    return torch.tensor(angles)


def _constant(step: Step, batches: Sequence[torch.Tensor]) -> ConstantLines:
    torch.manual_seed(0)
    recorder, model = StepCallRecorder(), nn.Linear(4, 1)
    for batch in batches:
        recorder.enter(batch)
        step(model, batch)
        recorder.leave()
    return recorder.constant_lines


def _texts(found: ConstantLines) -> list[str]:
    return [linecache.getline(file, line).strip() for file, lines in found.lines().items() for line in sorted(lines)]


def test_what_every_step_computes_of_nothing_that_changes_is_known_with_the_python_around_it() -> None:
    def step(model: nn.Module, batch: torch.Tensor) -> None:
        places = _positions(2)
        loss = model(batch + places).square().mean()
        loss.backward()

    found = _constant(step, torch.rand(3, 2, 4))
    texts = _texts(found)
    assert any("math.sin" in text for text in texts), "a line without an operation of torch's"
    assert not any("model(" in text or "backward" in text for text in texts)
    assert 0.0 < found.fraction() < 1.0
    assert _texts(found) == texts, "asking does not change the answer"


@pytest.mark.parametrize("batches", [torch.rand(3, 2, 4), torch.ones(3, 2, 4)], ids=["others", "the same"])
def test_what_is_made_of_the_batch_or_of_parameters_or_by_chance_is_not_constant(batches: torch.Tensor) -> None:
    kept = torch.zeros(4)

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        noise = torch.rand(2, 4)
        mask = batch > 0.5
        norms = [one.detach().square().sum() for one in model.parameters()]
        kept.add_(1.0)
        scaled = kept * 2
        loss = model(batch * mask + noise + scaled).square().mean() + sum(norms)
        loss.backward()

    assert _texts(_constant(step, batches)) == []


def test_one_step_shows_nothing_constant_and_large_or_strange_tensors_count_as_changing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step(model: nn.Module, batch: torch.Tensor) -> None:
        places = torch.arange(8.0).view(2, 4) / 3
        (model(batch + places) * torch.func.vmap(torch.sin)(places)[:, :1]).sum().backward()

    assert _texts(_constant(step, torch.rand(1, 2, 4))) == []
    assert len(_texts(_constant(step, torch.rand(2, 2, 4)))) == 1
    monkeypatch.setattr("penstock.observe.doctor.probes.steps.constant_lines._MOST_NUMBERS", 4)
    assert _texts(_constant(step, torch.rand(2, 2, 4))) == []


def _timed(**seen: Any) -> Measurements:
    windows = (TimingWindow(batches=20, wall_s=1.0, wait_s=0.1, step_s=0.9),) * 3
    trials = (Trial(name=AS_IS, windows=windows),)
    own = Settings(dataset="Rows")
    return Measurements(name="train", machine=Machine(cores=2), settings=own, has_step=True, trials=trials, **seen)


def test_work_that_every_step_repeats_is_a_finding_with_its_cost() -> None:
    line = HotLine(line="model.py:24: mask = torch.triu(torch.ones(size, size))", fraction=0.5)
    found = _timed(constant_lines=line)
    (finding,) = diagnose(found).findings
    assert (finding.name, finding.gain) == ("same-in-every-step", pytest.approx(1 / (1 - 0.45)))
    assert "model.py:24" in finding.evidence
    assert diagnose(replace(found, constant_lines=replace(line, fraction=0.1))).findings == ()


def _rows(steps: int, step: Step, model: nn.Module) -> StepCalls:
    recorder = StepCallRecorder()
    for _ in range(steps):
        batch = torch.rand(16, 4, dtype=next(model.parameters()).dtype)
        recorder.enter(batch)
        step(model, batch)
        recorder.leave()
    return recorder.result()


def test_a_layer_that_is_applied_to_one_row_after_another_is_known() -> None:
    def by_row(model: nn.Module, batch: torch.Tensor) -> None:
        torch.stack([model(row) for row in batch]).sum().backward()

    (call,) = _rows(2, by_row, nn.Linear(4, 1)).repeated_layers
    assert (call.per_step, "model(row)" in call.line) == (16, True)
    assert _rows(2, lambda model, batch: model(batch).sum().backward(), nn.Linear(4, 1)).repeated_layers == ()
    deep = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))
    assert _rows(2, lambda model, batch: model(batch).sum().backward(), deep).repeated_layers == (), "40 layers"


def test_float64_parameters_are_known_and_float64_metrics_are_none() -> None:
    def step(model: nn.Module, batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        (batch.double() @ batch.double().T).sum()

    assert _rows(1, step, nn.Linear(4, 1).double()).double_parameters == 5
    assert _rows(1, step, nn.Linear(4, 1)).double_parameters == 0


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
    assert found.never_trained == found.untrained_parameters


@pytest.mark.parametrize("waits_in", ["optimizer", "hand"])
def test_parameters_that_may_be_trained_later_are_not_those_that_never_are(waits_in: str) -> None:
    body, head = nn.Linear(4, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    waiting = torch.optim.SGD(body.parameters(), lr=0.1) if waits_in == "optimizer" else None

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        model.zero_grad()
        model(batch).square().mean().backward()
        if waiting is None:
            for one in head.parameters():
                one.data.add_(one.grad, alpha=-0.1)  # type: ignore[arg-type]
        else:
            optimizer.step()

    if waiting is None:
        optimizer.param_groups.clear()
    found = _rows(3, step, nn.Sequential(body, head))
    assert (found.untrained_parameters, found.never_trained) == (4 * 8 + 8, 0)


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


@pytest.mark.parametrize(("sparse", "tied"), [(False, False), (True, False), (False, True)])
def test_a_large_embedding_of_which_few_rows_are_used_is_known_unless_all_of_it_is(sparse: bool, tied: bool) -> None:
    table, head = nn.Embedding(40_000, 32, sparse=sparse), nn.Linear(32, 1)

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        rows = table((batch[:, 0] * 40_000).long())
        loss = head(rows).sum() + ((rows @ table.weight.T).mean() if tied else 0.0)
        loss.backward()

    found = _rows(2, step, head).dense_embeddings
    if sparse or tied:
        assert found == ()
    else:
        assert [(call.what, call.per_step) for call in found] == [("40000 rows", 16)]


@pytest.mark.parametrize(
    ("calls", "name"),
    [
        (StepCalls(steps=3, repeated_layers=(StepCall(what="", line="m.py:3: h = cell(x)", per_step=40),)), "layer"),
        (StepCalls(steps=3, parameters=100, double_parameters=90), "computes-in-double"),
        (StepCalls(steps=3, parameters=100, untrained_parameters=60), "gradients-not-used"),
        (StepCalls(steps=3, padded=(StepCall(what="9 of 12 columns", line="m.py:3: e(x)", per_step=0.75),)), "padded"),
        (StepCalls(steps=3, backward_again=(StepCall(what="", line="m.py:3: l.backward(", per_step=3),)), "backward"),
        (StepCalls(steps=3, dense_embeddings=(StepCall(what="9 rows", line="m.py:3: e(x)", per_step=1),)), "dense"),
    ],
)
def test_what_a_step_does_with_its_layers_is_a_finding(calls: StepCalls, name: str) -> None:
    found = _timed(step_calls=calls)
    (finding,) = diagnose(found).findings
    assert finding.name.startswith(name)
    assert (
        diagnose(replace(found, step_calls=StepCalls(steps=3, parameters=100, untrained_parameters=20))).findings == ()
    )


@pytest.mark.parametrize("never", [60, 0])
def test_in_few_steps_only_what_no_optimizer_has_is_known_to_be_untrained(never: int) -> None:
    calls = StepCalls(steps=3, parameters=100, untrained_parameters=60, never_trained=never)
    found = _timed(step_calls=calls)
    few = tuple(
        replace(trial, windows=tuple(replace(one, batches=2) for one in trial.windows[:1])) for trial in found.trials
    )
    names = [finding.name for finding in diagnose(replace(found, trials=few)).findings]
    assert ("gradients-not-used" in names) is bool(never)


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


def test_a_lookup_of_what_a_loop_has_written_into_a_tensor_contributes_to_gradients() -> None:
    def step(model: nn.Module, batch: torch.Tensor) -> None:
        small = torch.empty(16, 4)
        for row in range(16):
            small[row] = batch[row].sqrt()
        model(small).sum().backward()

    found = _rows(1, step, nn.Linear(4, 1))
    assert any("batch[row].sqrt()" in line for line in found.training_lines)
    assert max(found.operations.values()) == pytest.approx(48)


def test_lines_without_torch_may_contribute_where_numpy_gives_a_step_its_values() -> None:
    def by_numpy(model: nn.Module, batch: torch.Tensor) -> None:
        target = torch.from_numpy(np.sort(batch.numpy(), axis=0)[:, :1].copy())
        nn.functional.mse_loss(model(batch), target).backward()

    assert _rows(3, by_numpy, nn.Linear(4, 1)).observed_lines is not None

    def by_torch(model: nn.Module, batch: torch.Tensor) -> None:
        np.percentile(next(model.parameters()).detach().numpy(), 50)
        model(batch).sum().backward()

    assert _rows(3, by_torch, nn.Linear(4, 1)).observed_lines is None


def test_padding_beyond_the_longest_sequence_of_every_batch_is_known() -> None:
    table, head = nn.Embedding(50, 4), nn.Linear(4, 1)

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        rows = torch.randint(1, 50, (16, 64))
        rows[:, int(batch[0, 0] * 8) + 8 :] = 0
        head(table(rows)).sum().backward()

    (call,) = _rows(3, step, head).padded
    shared, _, rest = call.what.partition(" ")
    assert (48 <= int(shared) <= 56, rest) == (True, "of 64 columns")

    def whole(model: nn.Module, batch: torch.Tensor) -> None:
        head(table(torch.randint(1, 50, (16, 64)))).sum().backward()

    assert _rows(3, whole, head).padded == ()


@pytest.mark.parametrize(("longest", "padding", "is_found"), [(64, 0, True), (64, 1, False), (8, 0, True)])
def test_a_batch_that_has_one_long_sequence_does_not_hide_how_far_the_others_are_padded(
    longest: int, padding: int, is_found: bool
) -> None:
    lengths, numbers = itertools.cycle([16, longest, 24]), itertools.cycle([0, 1, padding])
    table, head = nn.Embedding(50, 4), nn.Linear(4, 1)

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        rows = torch.randint(2, 50, (16, 64))
        rows[1:, 12:] = rows[0, next(lengths) :] = next(numbers) if padding else 0
        head(table(rows)).sum().backward()

    found = diagnose(_timed(step_calls=_rows(3, step, head))).findings
    assert any(one.name == "padded-too-far" for one in found) is is_found


def test_several_backward_calls_over_one_graph_are_known_and_rows_of_a_jacobian_are_none() -> None:
    def by_task(model: nn.Module, batch: torch.Tensor) -> None:
        shared = model(batch)
        for task in range(3):
            (shared * task).mean().backward(retain_graph=True)

    (call,) = _rows(2, by_task, nn.Linear(4, 1)).backward_again
    assert (call.per_step, "retain_graph=True" in call.line) == (3, True)

    def jacobian(model: nn.Module, batch: torch.Tensor) -> None:
        inputs = batch.clone().requires_grad_()
        for one in model(inputs)[:, 0]:
            torch.autograd.grad(one, inputs, retain_graph=True)

    assert _rows(2, jacobian, nn.Linear(4, 1)).backward_again == ()


class _Unfriendly:
    """Raises for everything that it is asked for."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(name)


def test_a_batch_that_answers_no_questions_does_not_fail_the_step() -> None:
    recorder, model = StepCallRecorder(), nn.Linear(4, 1)
    for _ in range(2):
        batch = {"x": torch.randn(8, 4), "extra": _Unfriendly()}
        recorder.enter(batch)
        loss = model(batch["x"]).square().mean()
        loss.backward()
        loss.item()
        recorder.leave()
    assert [call.what for call in recorder.result().synchronizing] == [".item()"]


def test_distances_that_are_made_of_all_differences_are_known_with_their_lines() -> None:
    centres = nn.Parameter(torch.randn(128, 32))

    def made_of_differences(model: nn.Module, x: torch.Tensor) -> None:
        points = torch.randn(256, 32)
        difference = points[:, None, :] - centres
        difference.pow(2).sum(-1).exp().mean().backward()

    def by_product(model: nn.Module, x: torch.Tensor) -> None:
        torch.cdist(torch.randn(256, 32), centres).mean().backward()
        (torch.randn(256, 1, 32) - centres[:1]).square().sum(-1).mean().backward()  # of pairs with one
        (torch.randn(256, 1, 32) - centres).tanh().sum(-1).mean().backward()  # no distances
        (torch.randn(256, 1, 32) - centres).mul(torch.rand(256, 128, 1)).sum(1).mean().backward()  # forces
        ((torch.randn(256, 1, 32) - centres).square() * torch.rand(256, 128, 32)).sum(-1).mean().backward()
        (torch.randn(128, 1, 128) - centres[..., None]).abs().mean(-1).mean().backward()  # quantiles
        between = torch.randn(256, 1, 32) - centres
        (between / between.norm(dim=-1, keepdim=True)).sum(1).mean().backward()
        squares = between.square().sum(-1)
        (between * squares[..., None]).sum().backward()  # which needs them otherwise

    found = observed(made_of_differences).pair_differences
    assert [line.partition(": ")[2] for line in found[0].lines] == [
        "difference = points[:, None, :] - centres",
        "difference.pow(2).sum(-1).exp().mean().backward()",
    ]
    assert found[0].shapes == "[256, 128, 32] of [256, 1, 32] and [128, 32]"
    assert not observed(by_product).pair_differences
    slow = [HotLine(line=found[0].lines[1], fraction=0.2), HotLine(line="x.py:3: loss.backward()", fraction=0.7)]
    measured = Measurements(
        name="",
        machine=Machine(),
        settings=Settings(dataset="D"),
        has_step=True,
        step_lines=tuple(slow),
        step_calls=StepCalls(steps=3, pair_differences=found),
    )
    assert [one.name for one in diagnose(measured).findings] == ["differences-of-all-pairs"]


def test_a_manager_that_every_step_asks_is_named() -> None:
    line = HotLine(
        line="train.py:9: hard[i] = 0.7 * hard[i]",
        calls="multiprocessing.managers.BaseProxy._callmethod",
        fraction=0.25,
    )
    assert [one.name for one in examined(line).findings] == ["another-process-every-step"]


def test_what_a_step_deletes_is_freed_while_it_is_observed() -> None:
    are_alive: list[bool] = []

    def deletes(model: nn.Module, x: torch.Tensor) -> None:
        hidden = model(x)
        before, loss = weakref.ref(hidden), hidden.square().mean()
        loss.backward()
        loss.item()
        del hidden, loss
        are_alive.append(before() is not None)
        reached_by(sys._getframe(), deletes.__code__.co_firstlineno + 3)

    observed(deletes)
    assert are_alive
    assert not any(are_alive)
