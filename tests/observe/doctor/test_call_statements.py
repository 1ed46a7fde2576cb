"""Statements of a step that call something for nothing, however many lines their time is spread over."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from penstock.observe.doctor.causes import Diagnosis, diagnose
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probe_results import HotLine
from penstock.observe.doctor.probes.line_sampler import LineSampler
from penstock.observe.doctor.probes.steps.call_statements import Reached, call_statement, reach, reached_by_loader
from penstock.observe.doctor.probes.steps.step_calls import StepCallRecorder
from penstock.observe.doctor.step_results import CallStatement, StepCalls
from penstock.observe.doctor.trial import AS_IS, TimingWindow, Trial


def observed(*statements: Callable[[nn.Module, torch.Tensor], object], factor: Callable[[], Any] = lambda: 2.0) -> Any:
    """Return what a recorder sees of steps that do these things between their backward pass and their update."""
    torch.manual_seed(0)
    recorder, model = StepCallRecorder(), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        batch = torch.rand(2, 4)
        recorder.enter(batch)
        optimizer.zero_grad()
        loss = model(batch * factor()).square().mean()
        loss.backward()
        for statement in statements:
            statement(model, batch)
        optimizer.step()
        recorder.leave()
    return recorder.result()


def logs(model: nn.Module, batch: torch.Tensor) -> None:
    rows = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        rows[name] = np.histogram(parameter.grad.numpy())
        rows[name + "/w"] = np.histogram(parameter.detach().numpy())


def clips(model: nn.Module, batch: torch.Tensor) -> None:
    def shrink(gradient: torch.Tensor, most: torch.Tensor) -> None:
        gradient.mul_(most)

    for parameter in model.parameters():
        assert parameter.grad is not None
        shrink(parameter.grad, 1 / parameter.grad.norm())


QUEUE = torch.ones(4)


def enqueues(model: nn.Module, batch: torch.Tensor) -> None:
    QUEUE[:] = batch[0]


def clips_by_numpy(model: nn.Module, batch: torch.Tensor) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        np.multiply(parameter.grad.numpy(), 0.5, out=parameter.grad.numpy())


def clamps_by_numpy(model: nn.Module, batch: torch.Tensor) -> None:
    for parameter in model.parameters():
        values = parameter.detach().numpy()
        values *= 0.5


AVERAGE = torch.ones(1, 4)


def averages(model: nn.Module, batch: torch.Tensor) -> None:
    with torch.no_grad():
        AVERAGE.lerp_(next(model.parameters()), 0.1)


def updates(model: nn.Module, batch: torch.Tensor) -> None:
    directions = [torch.sign(one.detach()) for one in model.parameters()]
    for parameter, direction in zip(model.parameters(), directions, strict=True):
        parameter.data = parameter.data - 0.1 * direction


def logs_data(model: nn.Module, batch: torch.Tensor) -> None:
    for parameter in model.parameters():
        np.histogram(parameter.data.cpu().numpy())


@pytest.mark.parametrize("logs", [logs, logs_data])
def test_a_function_that_only_logs_trains_nothing_with_all_its_lines(logs: Any) -> None:
    found = observed(logs)
    assert not any("histogram" in line or "named_parameters" in line for line in found.training_lines)
    assert (found.observed_lines, found.updates) == (None, True)
    assert any("= observed(logs)" in line for line in found.training_lines)  # beneath which the loss is computed


@pytest.mark.parametrize(
    ("statement", "line"),
    [
        (clips, "shrink(parameter.grad, 1 / parameter.grad.norm())"),
        (clips_by_numpy, "np.multiply("),
        (clamps_by_numpy, "values = parameter.detach().numpy()"),
        (updates, "directions = "),
        (updates, "parameter.data = "),
    ],
)
def test_lines_that_call_what_changes_gradients_or_parameters_are_training(statement: Any, line: str) -> None:
    assert any(line in one for one in observed(logs, statement).training_lines)


def test_a_batch_that_numpy_changes_before_the_loss_is_computed_of_it_trains() -> None:
    def augments(batch: torch.Tensor) -> None:
        batch.numpy()[:] = np.sort(batch.numpy(), axis=1)

    recorder, model = StepCallRecorder(), nn.Linear(4, 1)
    for _ in range(2):
        batch = torch.rand(2, 4)
        recorder.enter(batch)
        augments(batch)
        model(batch).sum().backward()
        recorder.leave()
    found = recorder.result()
    assert any("augments(batch)" in line for line in found.training_lines)
    assert (found.observed_lines is not None, found.takes_values) == (True, False)


def test_a_learning_rate_that_differs_by_step_may_be_what_numpy_computes() -> None:
    recorder, model = StepCallRecorder(), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        batch = torch.rand(2, 4)
        recorder.enter(batch)
        model(batch).sum().backward()
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()
        recorder.leave()
    assert (recorder.result().observed_lines is not None, recorder.result().takes_values) == (True, False)


def test_what_is_kept_in_a_tensor_trains_if_a_loss_is_computed_of_it_and_is_kept_anyway() -> None:
    used = observed(enqueues, factor=lambda: QUEUE.clone())
    assert any("QUEUE[:]" in line for line in used.training_lines)
    averaged = observed(averages)
    assert not any("AVERAGE" in line for line in averaged.training_lines)
    assert any("AVERAGE" in line for line in averaged.keeping_lines)


@pytest.mark.parametrize("factor", [random.random, lambda: torch.from_numpy(np.ones(4, np.float32))])
def test_numbers_that_differ_by_step_and_arrays_may_be_what_a_statement_computes(factor: Any) -> None:
    assert observed(logs, factor=factor).takes_values


def test_lines_out_of_which_numpy_gets_its_values_are_no_longer_known_where_a_loss_needs_numpy() -> None:
    def factor() -> torch.Tensor:
        scores = torch.ones(4).cumsum(0)
        return torch.from_numpy(np.sort(scores.numpy()))

    lines = observed(factor=factor).observed_lines
    assert lines is not None
    assert not any("cumsum" in line for line in lines)


class Log:
    def __init__(self, rows: list[float]) -> None:
        self.rows = rows

    def add(self, seconds: float) -> None:
        self._wait(seconds)
        self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        time.sleep(seconds)


class Hardness(TensorDataset):
    def __init__(self, rows: list[float]) -> None:
        super().__init__(torch.ones(4, 1))
        self.rows = rows


def sampled(log: Log, loading: Reached) -> tuple[CallStatement, ...]:
    lines = LineSampler()
    with lines:
        for lines.turn in range(12):
            log.add(0.005)
            time.sleep(0.004)
    return lines.call_statements(loading)


def test_a_call_has_the_time_of_all_lines_beneath_it() -> None:
    (longest, *_) = sampled(Log([]), reached_by_loader(DataLoader(Hardness([]))))
    assert "log.add(0.005)" in longest.hot.line
    assert longest.hot.fraction > 0.5


def test_a_call_that_may_change_what_samples_are_made_of_is_left_out() -> None:
    rows: list[float] = []
    shown = sampled(Log(rows), reached_by_loader(DataLoader(Hardness(rows))))
    assert not any("log.add" in one.hot.line for one in shown)


def test_optimizers_are_reached_through_attributes_closures_and_globals_and_generators_are_unknown() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)

    class Trainer:
        __slots__ = ("parts",)

        def __init__(self) -> None:
            self.parts = {"optimizer": [optimizer]}

    assert reach([Trainer()]).trains
    assert reach([lambda: optimizer]).trains
    assert reach([Trainer().__str__, functools.partial(print, Trainer())]).trains
    assert not reach([Log([]), print, sys, nn.Linear(2, 2)]).trains
    assert reach([(one for one in "ab")]).is_unknown
    assert not Reached(is_unknown=True).is_apart_from(Reached())


def test_only_a_call_whose_result_is_dropped_is_a_call_statement(tmp_path: Any) -> None:
    file = tmp_path / "train.py"
    file.write_text("log(\n    1,\n)\nx = log(1)\nlog(1); y = 1\nfor x in log(1):\n    pass\n")
    found = [call_statement(str(file), number) for number in range(1, 8)]
    assert found == [range(1, 4), range(1, 4), range(1, 4), None, None, None, None]


def examined(
    fraction: float = 0.5, calls: tuple[str, ...] = (), lines: tuple[HotLine, ...] = (), **changes: Any
) -> Diagnosis:
    window = TimingWindow(batches=1, wall_s=1.0, wait_s=0.0, step_s=1.0)
    hot = HotLine(line="train.py:9: log.add(model)", fraction=fraction)
    known = StepCalls(steps=3, trains=True, updates=True, training_lines=("train.py:5: loss.backward()",))
    measured = Measurements(
        name="train.py",
        machine=Machine(cores=4),
        settings=Settings(dataset="Images", num_workers=2, start_method="fork", batch_size=8),
        has_step=True,
        trials=(Trial(name=AS_IS, windows=(window,) * 2),),
        step_lines=lines or (HotLine(line="train.py:5: loss.backward()", fraction=0.6),),
        step_statements=(CallStatement(hot=hot, lines=(hot.line,), calls=calls),),
        step_calls=replace(known, **changes),
    )
    return diagnose(measured)


def test_a_call_for_nothing_is_named_with_its_gain_though_the_backward_pass_takes_longer() -> None:
    (finding,) = examined().findings
    assert (finding.name, finding.gain) == ("costly-step-line", pytest.approx(2.0))
    assert "train.py:9" in finding.evidence


@pytest.mark.parametrize(
    "changes",
    [
        {"fraction": 0.15},
        {"fraction": 0.25, "keeping_lines": ("train.py:9: log.add(model)",)},
        {"training_lines": ("train.py:9: log.add(model)", "train.py:5: loss.backward()")},
        {"calls": ("torch.distributed.distributed_c10d.all_reduce",)},
        {"calls": ("torch.optim.swa_utils.AveragedModel.update_parameters",)},
        {"takes_values": True},
        {"updates": False},
    ],
)
def test_a_call_that_may_train_or_takes_little_is_not_named(changes: dict[str, Any]) -> None:
    assert examined(**changes).findings == ()


RATE, SHARED = 1.0, torch.ones(8, 4)


class Schedule:
    """What a sampler or a dataset may look at."""

    rate = 1.0

    def __init__(self, options: Any = None) -> None:
        self.options, self.rate = options, 2.0

    def sets_option(self) -> None:
        self.options.rate = 0.5

    @classmethod
    def sets_class(cls) -> None:
        cls.rate = 0.5

    def sets_own(self) -> None:
        self.rate = 0.5


def sets_global() -> None:
    global RATE
    RATE = 0.5


class Rated(TensorDataset):
    """A dataset that looks at a rate."""

    def __getitem__(self, index: int) -> Any:
        return self.options.rate if self.is_own else Schedule.rate * RATE  # type: ignore[attr-defined]


def test_what_assigns_a_name_that_samples_are_made_of_is_not_apart_from_them() -> None:
    dataset = Rated(torch.ones(4, 1))
    dataset.options, dataset.is_own = argparse.Namespace(rate=1.0), True  # type: ignore[attr-defined]
    loading = reached_by_loader(DataLoader(dataset))
    for assigns in (Schedule(dataset.options).sets_option, Schedule.sets_class, sets_global):  # type: ignore[attr-defined]
        assert not reach([assigns]).is_apart_from(loading)


def test_an_attribute_of_an_object_of_its_own_is_apart_from_those_of_the_same_name() -> None:
    class Meter:
        def __init__(self) -> None:
            self.rate = 0.0

        def add(self, value: float) -> None:
            self.rate += value

    dataset = Rated(torch.ones(4, 1))
    dataset.is_own = False  # type: ignore[attr-defined]
    assert reach([Meter().add]).is_apart_from(reached_by_loader(DataLoader(dataset)))


def test_functions_of_a_module_of_the_program_are_looked_at(tmp_path: Any) -> None:
    (tmp_path / "rates.py").write_text("RATE = 1.0\ndef refresh():\n    global RATE\n    RATE = 0.5\nrows = [1.0]\n")
    spec = importlib.util.spec_from_file_location("rates", tmp_path / "rates.py")
    assert spec is not None
    assert spec.loader is not None
    rates: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rates)

    def refreshes() -> None:
        rates.refresh()

    def collates(samples: Any) -> Any:
        return rates.RATE

    assert reach([refreshes]).assigned == {"RATE"}
    assert not reach([refreshes]).is_apart_from(reach([collates]))
    assert id(rates.rows) not in reach([refreshes]).ids


@pytest.mark.parametrize("view", [lambda one: one[:2], lambda one: one.numpy(), lambda one: one.view(-1)])
def test_views_of_what_samples_are_made_of_are_not_apart_from_it(view: Any) -> None:
    loading = reached_by_loader(DataLoader(TensorDataset(SHARED)))
    assert not reach([view(SHARED)]).is_apart_from(loading)
    assert reach([view(SHARED.clone())]).is_apart_from(loading)


KEPT = {"weight": torch.ones(1, 4)}


def averages_anew(model: nn.Module, batch: torch.Tensor) -> None:
    with torch.no_grad():
        KEPT["weight"] = KEPT["weight"] * 0.9 + next(model.parameters()) * 0.1


@pytest.mark.parametrize("statement", [averages, averages_anew])
def test_an_average_of_the_weights_is_not_to_be_made_less_often(statement: Any) -> None:
    found = observed(statement).averaging_lines
    assert any(word in line for line in found for word in ("AVERAGE.lerp_", 'KEPT["weight"] = '))
    assert not observed(logs, logs_data).averaging_lines
    assert examined(0.9, averaging_lines=("train.py:9: log.add(model)",)).findings == ()


def test_samples_of_a_list_that_grows_may_be_what_a_statement_makes() -> None:
    kept = [torch.ones(4) for _ in range(4)]
    assert observed(logs, factor=lambda: kept[len(kept) - 1 - int(bool(kept.append(torch.ones(4))))]).takes_values


class Mined(TensorDataset):
    """A dataset that weighs its samples anew."""

    def __init__(self, options: argparse.Namespace | None = None) -> None:
        super().__init__(torch.ones(4, 1))
        self.scale, self.options = 1.0, options

    def __getitem__(self, index: int) -> Any:
        return self.scale, self.options.rate if self.options else 0.0

    def reweigh(self) -> None:
        self._sort()

    def _sort(self) -> None:
        time.sleep(0.005)
        self.scale *= 0.5


def changes_rate(options: argparse.Namespace) -> None:
    time.sleep(0.005)
    options.rate = 0.5


def only_sleeps(options: argparse.Namespace) -> None:
    time.sleep(0.005)


@pytest.mark.parametrize(
    ("method", "feeds"),
    [
        (lambda dataset: dataset.reweigh, True),
        (lambda dataset: functools.partial(changes_rate, dataset.options), True),
        (lambda dataset: functools.partial(only_sleeps, dataset.options), False),
    ],
)
def test_lines_of_functions_that_may_change_what_samples_are_made_of_feed_the_loader(method: Any, feeds: bool) -> None:
    dataset, lines = Mined(argparse.Namespace(rate=1.0)), LineSampler()
    does = method(dataset)
    with lines:
        for lines.turn in range(12):
            does()
            time.sleep(0.002)
    seen = lines.lines_of_program(reached_by_loader(DataLoader(dataset)))
    assert [line.feeds_loader for line in seen if "time.sleep(0.005)" in line.line] == [feeds]


@pytest.mark.parametrize("feeds", [True, False])
def test_a_costly_line_that_may_feed_the_loader_is_not_named(feeds: bool) -> None:
    line = HotLine(line="data.py:4: order = np.sort(losses)", fraction=0.8, feeds_loader=feeds)
    assert bool(examined(0.1, lines=(line,)).findings) is not feeds
