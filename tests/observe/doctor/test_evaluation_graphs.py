"""What evaluations leave: graphs of all their batches, and a model in evaluation mode."""

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


def _found(
    *, evaluates: bool = True, adds_graphs: bool = True, trains: bool = False, every: int = 10**9, batches: int = 6
) -> list[str]:
    """Return the findings about a program that evaluates after each epoch, or after so many steps."""

    def evaluate(model: torch.nn.Module, loader: DataLoader) -> torch.Tensor | float:
        model.train(not evaluates)
        total: torch.Tensor | float = 0.0
        for images, _ in loader:
            loss = model(images).square().sum()
            if trains:
                loss.backward()
            total = total + (loss if adds_graphs else loss.item())
        model.train()
        return total

    def train() -> None:
        model = _wide()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        loader, held = DataLoader(Numbered(64, (3,)), batch_size=4), DataLoader(Held(4 * batches, (3,)), batch_size=4)
        history = []
        for epoch in range(1000):
            for number, (images, _) in enumerate(loader):
                model(images).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if (epoch * len(loader) + number) % every == every - 1:
                    evaluate(model, held)
            history.append(evaluate(model, held))

    return [one.name for one in diagnose(examine(train, seconds=2.0)).findings]


@pytest.fixture(autouse=True)
def _enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a busy machine reach the evaluation between two epochs."""
    monkeypatch.setattr(later_epochs, "_LEAST_S", 30.0)


@pytest.mark.parametrize("every", [10**9, 5])
def test_an_evaluation_that_keeps_its_graphs_is_named(every: int) -> None:
    assert "evaluation-keeps-graphs" in _found(every=every)


@pytest.mark.parametrize("adds_graphs", [True, False])
def test_a_history_that_keeps_the_graph_of_every_epochs_evaluation_is_named(adds_graphs: bool) -> None:
    assert ("kept-by-the-program" in _found(adds_graphs=adds_graphs, batches=1)) is adds_graphs


def test_an_evaluation_that_keeps_numbers_or_trains_is_not() -> None:
    assert "evaluation-keeps-graphs" not in _found(adds_graphs=False)
    assert "evaluation-keeps-graphs" not in _found(trains=True)
    assert "evaluation-keeps-graphs" not in _found(evaluates=False)


@pytest.mark.parametrize(
    ("trained", "left", "is_named"),
    [
        pytest.param("once", "all", True, id="model.train() before the epochs only"),
        pytest.param("epoch", "all", False, id="before each epoch"),
        pytest.param("step", "all", False, id="in each step"),
        pytest.param("once", "norm", False, id="batch norm is frozen on purpose"),
    ],
)
def test_a_model_that_an_evaluation_leaves_in_evaluation_mode_is_named(trained: str, left: str, is_named: bool) -> None:
    def train() -> None:
        norm = torch.nn.BatchNorm1d(8)
        model = torch.nn.Sequential(torch.nn.Linear(3, 8), norm, torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader, held = (
            DataLoader(Numbered(512, (3,)), batch_size=4, shuffle=True),
            DataLoader(Held(8, (3,)), batch_size=4),
        )
        model.train()
        for _ in range(1000):
            if trained == "epoch":
                model.train()
            for images, _ in loader:
                if trained == "step":
                    model.train()
                model(images).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            (model if left == "all" else norm).eval()
            with torch.no_grad():
                for images, _ in held:
                    model(images)

    diagnosis = diagnose(examine(train, seconds=2.0))
    (found, *_) = [one for one in diagnosis.findings if one.name == "trains-in-evaluation-mode"] or [None]
    assert (found is not None) is is_named
    if found is not None:
        assert "after its first epoch" in found.cause
        assert not found.is_uncertain
        assert diagnosis.findings[0] is found


def test_a_model_that_is_finished_while_the_next_one_is_trained_is_not_trained_in_evaluation_mode() -> None:
    def train() -> None:
        loader, members = DataLoader(Numbered(512, (3,)), batch_size=4), []
        for _ in range(1000):
            model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for images, _ in loader:
                model(images).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            members.append(model.eval())

    names = [one.name for one in diagnose(examine(train, seconds=2.0)).findings]
    assert "trains-in-evaluation-mode" not in names
