"""Programs that train without a DataLoader: their steps are examined, from one `optimizer.step()` to the next."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from sample_sets import Numbered
from torch.utils.data import DataLoader

from penstock.core.errors import OptionError
from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.examine import examine
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.rendering import render

pytestmark = [
    pytest.mark.usefixtures("preloaded_python"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]


def _train(each: Callable[[int], object], steps: int = 10_000_000, pause_s: float = 0.002) -> Callable[[], None]:
    def train() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        for number in range(steps):
            model(torch.rand(4, 3)).sum().backward()
            time.sleep(pause_s)
            each(number)
            optimizer.step()
            optimizer.zero_grad()

    return train


def _compute(milliseconds: float) -> None:
    until = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < until:
        sum(range(100))


def _names(found: Measurements) -> list[str]:
    return [one.name for one in diagnose(found).findings]


def test_a_program_without_a_loader_is_examined_by_its_steps_and_ended() -> None:
    found = examine(_train(lambda number: None), seconds=2.0)
    assert (found.error, found.settings.kind, found.has_step) == ("", "", True)
    assert found.as_is is not None
    assert len(found.as_is.windows) == 5
    assert 0.002 < (found.as_is.batch_s or 0.0) < 0.1
    assert found.step_calls is not None
    assert found.step_calls.trains
    text = render(found, diagnose(found))
    assert "no DataLoader: a step is from one optimizer.step() to the next" in text
    assert "What if" not in text


def test_what_such_a_program_computes_in_every_step_is_named_with_its_line() -> None:
    found = examine(_train(lambda number: _compute(6)), seconds=4.0)
    (finding, *_) = diagnose(found).findings
    assert finding.name in ("costly-step-line", "computes-outside-torch")
    assert "test_without_loader.py" in finding.evidence


def test_what_it_computes_in_a_few_of_its_steps_is_named_where_it_takes_much_of_the_time() -> None:
    found = examine(_train(lambda number: _compute(60) if number % 10 == 0 else None), seconds=6.0)
    assert "costly-now-and-then" in _names(found)
    rare = examine(_train(lambda number: _compute(10) if number % 50 == 0 else None), seconds=4.0)
    assert "costly-now-and-then" not in _names(rare)


def test_what_it_keeps_of_every_step_is_named() -> None:
    history = []
    found = examine(_train(lambda number: history.append(torch.rand(300_000))), seconds=3.0)
    assert found.memory_growth is not None
    assert found.memory_growth.name == "history"


def test_a_loop_over_a_loader_that_comes_after_some_steps_is_the_one_to_examine() -> None:
    def train() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        for _ in range(30):
            model(torch.rand(4, 3)).sum().backward()
            optimizer.step()
        while True:
            for images, _ in DataLoader(Numbered(64, (3,)), batch_size=4):
                model(images).sum().backward()
                optimizer.step()

    found = examine(train, seconds=3.0)
    assert (found.error, found.settings.dataset) == ("", "Numbered")


def test_a_program_that_ends_after_a_few_steps_is_told_how_many_it_made() -> None:
    with pytest.raises(OptionError, match="its optimizer made only 7 steps"):
        examine(_train(lambda number: None, steps=7), seconds=2.0)


def test_an_error_of_such_a_program_is_reported() -> None:
    def fail(number: int) -> None:
        if number == 400:
            raise KeyError("field")

    found = examine(_train(fail), seconds=4.0)
    assert "KeyError" in found.error
    assert diagnose(found).verdict.name == "fails"
