"""What a program does between its epochs: evaluations of single samples, and checkpoints larger than what they hold."""

from __future__ import annotations

import contextlib
import copy
import time
from dataclasses import replace

import pytest
import torch
from examined import examine_until
from torch.utils.data import DataLoader, Dataset, TensorDataset

from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.contents.compare_loaders import Evaluation
from penstock.observe.doctor.contents.single_samples import find_single_samples
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.trials.epochs.later_epochs import LaterEpochs
from penstock.observe.doctor.trials.epochs.saved_storages import measure_storages
from penstock.observe.doctor.trials.time_budget import TrialsDoneError
from penstock.observe.record.finding import Finding


class Uneven(Dataset[torch.Tensor]):
    """Images of other sizes each."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(3, 8 + index % 7, 8)


class _Model(torch.nn.Module):
    """A model that is saved as a whole."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)


_TRAINING = DataLoader(TensorDataset(torch.zeros(640, 4)), batch_size=64)


def _single(loader: DataLoader[object]) -> int:
    found = find_single_samples(_TRAINING, [Evaluation(name="val_loader", loader=loader)])
    return 0 if found is None else found.samples


def test_an_evaluation_without_a_batch_size_is_known_if_its_samples_can_be_one_batch() -> None:
    data = TensorDataset(torch.zeros(400, 4))
    assert _single(DataLoader(data)) == 400
    assert _single(DataLoader(data, batch_size=2)) == 0
    assert _single(DataLoader(data, batch_size=None)) == 0
    assert _single(DataLoader(Uneven())) == 0
    assert _single(DataLoader(TensorDataset(torch.zeros(8, 4)))) == 0


def test_a_view_of_a_large_tensor_is_known_by_its_place_and_shared_and_whole_tensors_are_none() -> None:
    cube, weight = torch.zeros(8 << 20), torch.zeros(1 << 20)
    found = measure_storages({"epoch": 3, "model": {"w": weight}, "probe": [cube[:100]]})
    assert found is not None
    assert "probe" in found.name
    assert found.unused_nbytes == (32 << 20) - 400
    assert measure_storages({"probe": cube[:100].clone(), "all": cube, "tied": weight, "again": weight[None]}) is None
    assert measure_storages({"shown": cube[:10], "model": _Model(cube)}) is None  # which is saved anyway
    assert measure_storages({"halves": cube.chunk(2), "small": torch.zeros(100)[:1]}) is None


def test_a_program_that_saves_a_view_after_each_epoch_is_told_so() -> None:
    cube = torch.zeros(8 << 20)

    def train() -> None:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8, shuffle=True)
        for _ in range(1000):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            torch.save({"model": model.state_dict(), "probe": cube[:8]}, "/dev/null")

    found = examine_until(lambda seen: seen.saved_storages is not None, train, seconds=1.5)
    assert "saves-whole-storages" in [one.name for one in diagnose(found).findings], found.notes


class _Slow(torch.nn.Linear):
    """A model that takes some time for a call, and some for each sample."""

    def __init__(self, call_s: float, sample_s: float) -> None:
        super().__init__(4, 1)
        self.call_s, self.sample_s = call_s, sample_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.call_s + self.sample_s * len(x))
        return super().forward(x)


def _evaluated(model: torch.nn.Module, *, reads_one: bool = False, every: int = 1) -> Measurements:
    """Return what is measured of a program that evaluates single samples after every few epochs."""
    held_out = TensorDataset(torch.randn(400, 4))

    def train() -> None:
        loader = DataLoader(TensorDataset(torch.randn(640, 4)), batch_size=64, shuffle=True)
        val_loader = DataLoader(held_out)
        for epoch in range(1000):
            for (x,) in loader:
                model(x).square().mean().backward()
            if epoch % every == 0:
                with torch.no_grad():
                    print(sum(model(x).item() if reads_one else model(x).sum() for (x,) in val_loader))

    def is_enough(seen: Measurements) -> bool:
        is_tried = seen.single_samples is not None and seen.single_samples.costs is not None
        return is_tried or (bool(seen.module_hooks) and (reads_one or every > 1))

    found = examine_until(is_enough, train, seconds=2.5)
    return replace(found, machine=replace(found.machine, others_cores=0.0))


def _named(found: Measurements) -> Finding | None:
    return next((one for one in diagnose(found).findings if one.name == "evaluates-single-samples"), None)


def test_an_evaluation_that_gains_by_batches_as_they_were_tried_is_certain_with_its_gain() -> None:
    found = _named(_evaluated(_Slow(0.002, 0.0)))
    assert found is not None
    assert not found.is_uncertain
    assert found.gain is not None
    assert 8 < found.gain < 40, "0.82 s, of which 10 steps and 7 batches are left: 24 times"


def test_an_evaluation_whose_samples_take_as_long_in_a_batch_is_not_named() -> None:
    seen = _evaluated(_Slow(0.0, 0.002))
    assert seen.single_samples is not None
    assert seen.single_samples.costs is not None
    assert _named(seen) is None


@pytest.mark.parametrize(("reads_one", "every"), [(True, 1), (False, 2)])
def test_single_samples_may_be_meant_so(reads_one: bool, every: int) -> None:
    found = _named(_evaluated(_Slow(0.002, 0.0), reads_one=reads_one, every=every))
    assert found is not None
    assert found.is_uncertain
    assert found.gain is None


@pytest.mark.parametrize(
    ("registers", "is_found"), [("each epoch", True), ("once", False), ("and removes", False), ("and copies", False)]
)
def test_hooks_that_every_epoch_registers_again_are_found(registers: str, is_found: bool) -> None:
    model = torch.nn.Linear(4, 1)
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=16, shuffle=True)
    epochs, kept = LaterEpochs(loader, seconds=60.0), []
    with contextlib.suppress(TrialsDoneError):
        for epoch in range(3):
            if registers in ("each epoch", "and removes") or not epoch:
                handle = model.register_forward_hook(lambda *_: None)
            if not epoch:  # which the trials examine
                epochs.has_others = epochs.begin()
            else:
                epochs.add(loader)
            if registers == "and removes":
                handle.remove()
            elif registers == "and copies":
                kept.append(copy.deepcopy(model))
    epochs.guard.disarm()
    assert len(epochs.hooks) == 3
    found = Measurements(
        name="x", machine=Machine(), settings=Settings(dataset="D"), has_step=True, module_hooks=tuple(epochs.hooks)
    )
    findings = [finding for finding in diagnose(found).findings if finding.name == "hooks-grow"]
    assert bool(findings) is is_found
    assert not any(finding.is_uncertain for finding in findings)
