"""Evaluations with gradients on that keep the graphs of all their batches."""

from __future__ import annotations

import pytest
import torch
from sample_sets import Numbered
from torch.utils.data import DataLoader

from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.examine import examine
from penstock.observe.doctor.trials.epochs import later_epochs

pytestmark = [
    pytest.mark.usefixtures("preloaded_python"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]


class Held(Numbered):
    """What is not trained on."""


def _wide() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 100_000), torch.nn.Tanh(), torch.nn.Linear(100_000, 1))


def _found(*, evaluates: bool = True, adds_graphs: bool = True, trains: bool = False, every: int = 10**9) -> list[str]:
    """Return the findings about a program that evaluates after each epoch, or after so many steps."""

    def evaluate(model: torch.nn.Module, loader: DataLoader) -> float:
        model.train(not evaluates)
        total: torch.Tensor | float = 0.0
        for images, _ in loader:
            loss = model(images).square().sum()
            if trains:
                loss.backward()
            total = total + (loss if adds_graphs else loss.item())
        model.train()
        return float(total)

    def train() -> None:
        model = _wide()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        loader, held = DataLoader(Numbered(64, (3,)), batch_size=4), DataLoader(Held(24, (3,)), batch_size=4)
        for epoch in range(1000):
            for number, (images, _) in enumerate(loader):
                model(images).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if (epoch * len(loader) + number) % every == every - 1:
                    evaluate(model, held)
            evaluate(model, held)

    return [one.name for one in diagnose(examine(train, seconds=2.0)).findings]


@pytest.fixture(autouse=True)
def _enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a busy machine reach the evaluation between two epochs."""
    monkeypatch.setattr(later_epochs, "_LEAST_S", 30.0)


@pytest.mark.parametrize("every", [10**9, 5])
def test_an_evaluation_that_keeps_its_graphs_is_named(every: int) -> None:
    assert "evaluation-keeps-graphs" in _found(every=every)


def test_an_evaluation_that_keeps_numbers_or_trains_is_not() -> None:
    assert "evaluation-keeps-graphs" not in _found(adds_graphs=False)
    assert "evaluation-keeps-graphs" not in _found(trains=True)
    assert "evaluation-keeps-graphs" not in _found(evaluates=False)
