"""Which loop of a program is examined, and what its epochs cost at their start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from sample_sets import Numbered
from torch.utils.data import DataLoader

from penstock.core.errors import PenstockError
from penstock.observe.doctor.examine import examine
from penstock.observe.doctor.trials import trial_scheduler

pytestmark = [
    pytest.mark.usefixtures("preloaded_python"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop before any optimizer is what the program is about after a moment."""
    monkeypatch.setattr(trial_scheduler, "_NO_GRADIENT_LOOP_S", 0.3)


class Held(Numbered):
    """What is not trained on."""


def _train(before: Callable[[DataLoader], object]) -> Callable[[], None]:
    def train() -> None:
        before(DataLoader(Held(64, (3,)), batch_size=2))
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        while True:
            for images, _ in DataLoader(Numbered(64, (3,)), batch_size=4):
                model(images).sum().backward()
                optimizer.step()

    return train


def _statistics(loader: DataLoader) -> None:
    total = torch.zeros(3)
    for images, _ in loader:
        total += images.sum(0)
    assert total[0] == sum(range(64))


def _look_until_break(loader: DataLoader, most: int = 4) -> None:
    for at, (images, _) in enumerate(_as_given(loader)):
        assert len(images) == 2
        if at == most - 1:
            break


def _as_given(loader: DataLoader) -> Iterator[list[torch.Tensor]]:
    yield from loader  # as a progress bar does


def _look_and_break(loader: DataLoader) -> None:
    for images, _ in loader:
        assert len(images) == 2
        break


@pytest.mark.parametrize("look", [_look_and_break, _look_until_break, lambda loader: _look_until_break(loader, 1)])
def test_a_look_at_a_few_batches_after_the_optimizer_was_made_is_not_the_loop_to_examine(
    look: Callable[[DataLoader], None],
) -> None:
    def train() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        look(DataLoader(Held(64, (3,)), batch_size=2))
        while True:
            for images, _ in DataLoader(Numbered(64, (3,)), batch_size=4):
                model(images).sum().backward()
                optimizer.step()

    found = examine(train, seconds=0.6)
    assert (found.error, found.settings.dataset) == ("", "Numbered")


def _take_by_map(loader: DataLoader) -> None:
    batches = iter(loader)

    def take(_: int) -> list[torch.Tensor]:
        return next(batches)

    for _ in map(take, range(1_000_000)):
        pass


def _take_in_a_test(loader: DataLoader) -> None:
    batches = iter(loader)
    while next(batches, None) is not None:
        pass


def _take_on_one_line(loader: DataLoader) -> None:
    batches = iter(loader)
    while True: next(batches)  # fmt: skip  # noqa: E701


@pytest.mark.parametrize("take", [_take_by_map, _take_in_a_test, _take_on_one_line])
def test_a_loop_that_takes_each_batch_by_next_is_examined_however_it_is_written(
    take: Callable[[DataLoader], None],
) -> None:
    found = examine(lambda: take(DataLoader(Held(1 << 20, (3,)), batch_size=2)), seconds=0.6)
    assert (found.error, found.settings.dataset) == ("", "Held")


@pytest.mark.parametrize("before", [lambda loader: next(iter(loader)), _statistics], ids=["a look", "statistics"])
def test_what_a_program_takes_from_a_loader_before_it_trains_is_not_the_loop_to_examine(
    before: Callable[[DataLoader], object],
) -> None:
    found = examine(_train(before), seconds=0.6)
    assert (found.error, found.settings.dataset) == ("", "Numbered")
    assert found.step_calls is not None
    assert found.step_calls.trains


def test_a_loop_whose_optimizer_was_made_before_the_doctor_came_is_examined_at_once() -> None:
    model = torch.nn.Linear(3, 1)
    made_before = torch.optim.SGD(model.parameters(), lr=1e-9)

    def program() -> None:
        for images, _ in DataLoader(Held(400, (3,)), batch_size=2):
            model(images).sum().backward()
            made_before.step()
        raise AssertionError("the loop was not ended")

    found = examine(program, seconds=0.6)
    assert (found.error, found.settings.dataset, found.batches_requested > 3) == ("", "Held", True)


def test_an_iterator_that_a_look_leaves_behind_is_not_the_loop_to_examine() -> None:
    def train() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        batches = iter(DataLoader(Held(64, (3,)), batch_size=2))
        assert len(next(batches)) == 2
        while True:
            for images, _ in DataLoader(Numbered(64, (3,)), batch_size=4):
                model(images).sum().backward()
                optimizer.step()

    found = examine(train, seconds=0.6)
    assert (found.error, found.settings.dataset) == ("", "Numbered")


def test_a_program_that_makes_a_list_of_an_epoch_gets_it_whole_and_is_told_why_nothing_is_examined() -> None:
    kept: list[int] = []

    def train() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        batches = list(DataLoader(Held(64, (3,)), batch_size=2))
        kept.append(len(batches))
        while True:
            for images, _ in batches:
                model(images).sum().backward()
                optimizer.step()

    with pytest.raises(PenstockError, match=r"batches that it has collected before"):
        examine(train, seconds=3.0)
    assert kept == [32]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_program_that_trains_in_a_thread_is_told_that_it_is_not_examined_and_the_thread_ends() -> None:
    thread = threading.Thread(target=_train(lambda loader: None))

    def program() -> None:
        thread.start()
        thread.join()

    with pytest.raises(PenstockError, match="in another thread"):
        examine(program, seconds=0.6)
    while thread.is_alive():
        thread.join(0.1)


def test_a_program_that_takes_every_batch_from_a_new_iterator_in_a_loop_is_examined() -> None:
    found = examine(_train(lambda loader: [next(iter(loader)) for _ in range(100_000)]), seconds=0.6)
    assert (found.error, found.settings.dataset) == ("", "Held")


def test_a_loop_before_any_optimizer_is_examined_where_no_training_comes() -> None:
    def measure() -> None:
        while True:
            _statistics(DataLoader(Held(64, (3,)), batch_size=2))

    assert (found := examine(measure, seconds=0.6)).settings.dataset == "Held"
    assert found.error == ""


def test_a_loop_in_each_step_of_another_in_which_the_optimizer_makes_its_steps_is_the_one_that_trains() -> None:
    """Each loop gets its own loader's batches, also after the doctor has turned to the inner one."""

    def train() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        inner = iter(DataLoader(Numbered(1 << 20, (3,)), batch_size=4))
        for rows, _ in DataLoader(Held(1 << 20, (5,)), batch_size=2):
            assert rows.shape == (2, 5)
            for _ in range(5):
                images, _ = next(inner)
                assert images.shape == (4, 3)
                model(images).sum().backward()
                optimizer.step()

    found = examine(train, seconds=0.6)
    assert (found.error, found.settings.dataset) == ("", "Numbered")
