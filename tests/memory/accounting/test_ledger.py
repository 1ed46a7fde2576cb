"""The ledger counts who holds which bytes."""

from __future__ import annotations

import torch
from torch import nn

from penstock import DataLoader, Sim, TrainStep, ledger


def test_the_ledger_counts_by_role_and_module() -> None:
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.BatchNorm1d(256))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    kept = torch.zeros(1 << 20)
    found = ledger(model, optimizer)
    host = found.on("cpu")
    weights = 256 * 256 * 4
    assert host.weights == weights + 4 * 256 * 4 + 8
    assert host.gradients == weights + 2 * 256 * 4
    assert host.optimizer >= 2 * host.gradients
    assert host.others >= kept.nbytes
    assert found.modules["0"].weights == found.modules["0"].gradients == weights
    assert found.modules["0"].optimizer == 2 * weights + 4
    assert sum(one.weights for one in found.modules.values()) == host.weights
    assert host.allocated > host.weights + host.gradients + host.optimizer + host.others
    assert "by module" in found.render()


def test_tied_weights_are_counted_once() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    assert ledger(model).on("cpu").weights == 64 * 64 * 4


def test_sparse_gradients_and_parameters_of_other_classes_are_in_the_ledger() -> None:
    class Marked(nn.Parameter):
        pass

    model = nn.ModuleList([nn.Embedding(100, 8, sparse=True), nn.Linear(8, 8, bias=False)])
    model[1].weight = Marked(torch.zeros(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model[1](model[0](torch.arange(5))).sum().backward()
    optimizer.step()
    found = ledger(model, optimizer)
    assert found.on("cpu").weights == 4 * (100 * 8 + 8 * 8)
    assert found.on("cpu").gradients == found.on("cpu").optimizer == 5 * (8 + 4 * 8) + 4 * 8 * 8
    assert found.modules["0"].gradients == 5 * (8 + 4 * 8)


def test_the_ledger_counts_by_role_at_the_peak_of_a_step() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Sequential(nn.ReLU(), nn.Linear(256, 1)))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.zeros(32, 64)
    step = TrainStep(model, optimizer, lambda module, batch: (module(batch).sum(), len(batch)))
    step(x)
    found = ledger(model, optimizer, during=lambda: step(x))
    weights = sum(p.nbytes for p in model.parameters())
    assert found.at_peak["weights"] == weights
    assert 2 * weights <= found.at_peak["optimizer"] < 2 * weights + 100
    assert found.at_peak["activations"] + found.at_peak["temporaries"] >= 32 * 256 * 4
    assert "at the peak of the step" in found.render()
    assert "activations" in found.to_json()["modules"]["1"]
    assert step.statistics().steps == 2
    model[0].register_forward_hook(lambda *_: None)
    assert len(model[0]._forward_hooks) == 1, "its own hooks are gone"
    assert ledger(model).at_peak == {}


def test_activations_are_counted_by_module_at_the_peak() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 512), nn.Tanh()), nn.Linear(512, 1))
    x = torch.zeros(64, 8)
    found = ledger(model, during=lambda: model(x).sum().backward())
    assert found.modules["0"].activations == 64 * 512 * 4  # of Tanh, which the last layer saves too
    assert found.at_peak["activations"] >= 64 * 512 * 4


def test_the_loaders_slots_are_in_the_ledger() -> None:
    loader = DataLoader(torch.zeros(64, 1 << 14), batch_size=8, device=Sim())  # type: ignore[arg-type]
    for _ in loader:
        found = ledger(nn.Linear(2, 2), loader=loader)
        break
    assert found.on("cpu").loader >= 8 << 16
    assert loader.statistics().uploading_nbytes >= 0
