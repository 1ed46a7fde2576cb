"""Tensors of a batch that steps never touch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probe_results import SampleCosts
from penstock.observe.doctor.probes.steps.step_calls import StepCallRecorder
from penstock.observe.doctor.step_results import StepCalls, UnusedField
from penstock.observe.doctor.trial import AS_IS, FREE, TimingWindow, Trial

_kept: list[torch.Tensor] = []
_model = torch.nn.Linear(3, 1)
_compiled = torch.compile(lambda images: images.sum(), backend="eager")


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> None:
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters.clear()


def _observe(step: Callable[[Any], Any], steps: int = 3) -> StepCalls:
    recorder = StepCallRecorder()
    for _ in range(steps):
        batch = {"images": torch.rand(4, 3), "whole": torch.rand(4, 1000), "mask": torch.ones(4, dtype=torch.bool)}
        recorder.enter(batch)
        step(batch)
        recorder.leave()
        del batch
    return recorder.result()


def _uses_one(batch: dict[str, torch.Tensor]) -> None:
    _model(batch["images"]).sum().backward()


def _keeps_another(batch: dict[str, torch.Tensor]) -> None:
    _kept.append(batch["whole"])
    _uses_one(batch)


def _moves_all(batch: dict[str, torch.Tensor]) -> None:
    moved = {name: one.to(torch.float64) for name, one in batch.items()}
    moved["images"].sum()


def _takes_part(batch: dict[str, torch.Tensor]) -> None:
    view = batch["whole"].numpy()
    assert view.sum() > 0
    _uses_one(batch)


def _compiles(batch: dict[str, torch.Tensor]) -> None:
    _compiled(batch["images"])


def test_tensors_that_no_step_touches_are_told() -> None:
    found = _observe(_uses_one).unused_fields
    assert [one.what for one in found] == ["['mask'] (bool, (4,))", "['whole'] (float32, (4, 1000))"]
    assert [one.nbytes for one in found] == [4, 16_000]


@pytest.mark.parametrize(("step", "left"), [(_keeps_another, 1), (_moves_all, 0), (_takes_part, 1), (_compiles, 0)])
def test_what_is_kept_or_moved_or_may_be_compiled_is_not_called_unused(step: Callable[[Any], Any], left: int) -> None:
    found = _observe(step).unused_fields
    _kept.clear()
    assert len(found) == left
    assert not any("whole" in one.what for one in found)


def test_unused_fields_are_a_finding_where_they_are_much_of_what_is_sent() -> None:
    windows = {
        AS_IS: TimingWindow(batches=10, wall_s=0.4, wait_s=0.2, step_s=0.2),
        FREE: TimingWindow(batches=10, wall_s=0.2, wait_s=0.0, step_s=0.2),
    }
    measured = Measurements(
        name="x",
        machine=Machine(cores=4),
        settings=Settings(dataset="D", num_workers=2, start_method="fork"),
        has_step=True,
        trials=tuple(Trial(name=name, windows=(one,) * 3) for name, one in windows.items()),
        samples=SampleCosts(samples=64, batch_samples=16, sample_s=1e-4, median_s=1e-4, batch_nbytes=32 << 20),
        transport_s=0.02,
        step_calls=StepCalls(steps=3, trains=True, unused_fields=(UnusedField(what="[2]", nbytes=30 << 20),)),
    )
    assert diagnose(measured).findings[0].name == "unused-fields"
    assert "[2]" in diagnose(measured).findings[0].evidence
    for few in (replace(measured, transport_s=1e-5), replace(measured, step_calls=StepCalls(steps=3, trains=True))):
        assert "unused-fields" not in [one.name for one in diagnose(few).findings]
