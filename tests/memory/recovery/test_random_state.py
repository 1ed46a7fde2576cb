"""Random states are put back to the number, whoever has drawn meanwhile, and however."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from penstock.memory.recovery import random_state
from penstock.memory.recovery.random_state import RandomState

DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(3).tolist(),
    "Python": random.random,
    "Python, one of two normal": lambda: random.gauss(0, 1),
    "NumPy": np.random.rand,
    "NumPy, one of two normal": np.random.randn,
    "NumPy, one of two normal, as legacy": lambda: np.random.normal(size=3).tolist(),
}


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("case", [*DRAWS])
def test_a_restored_state_draws_the_same_numbers(case: str, before: int) -> None:
    draw = DRAWS[case]
    for _ in range(before):
        draw()
    state = RandomState.now(())
    drawn = [draw() for _ in range(3)]
    state.restore()
    assert [draw() for _ in range(3)] == drawn


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("case", [*DRAWS])
def test_two_states_are_equal_until_something_is_drawn(case: str, before: int) -> None:
    for _ in range(before):
        DRAWS[case]()
    state = RandomState.now(())
    assert RandomState.now(()) == state
    DRAWS[case]()
    assert RandomState.now(()) != state


def test_the_state_of_an_unused_generator_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(0)
    np.random.seed(0)
    RandomState.now(())
    asked: list[str] = []
    monkeypatch.setattr(random_state._python_twister, "_get_state", lambda: asked.append("Python"))
    monkeypatch.setattr(random_state._numpy_twister, "_get_state", lambda: asked.append("NumPy"))
    RandomState.now(())
    assert asked == []


@pytest.mark.parametrize("reseed", [lambda: random.seed(7), lambda: np.random.seed(7)])
def test_a_new_seed_changes_the_state(reseed: Callable[[], None]) -> None:
    state = RandomState.now(())
    reseed()
    assert RandomState.now(()) != state


def test_states_are_read_where_the_words_cannot_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_state, "_can_peek_python", lambda: False)
    state = RandomState.now(())
    drawn = random.random()
    assert RandomState.now(()) != state
    state.restore()
    assert random.random() == drawn


def test_a_backend_that_shows_no_generators_is_restored_by_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator()
    module = SimpleNamespace(get_rng_state=generator.get_state, set_rng_state=generator.set_state)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    state = RandomState.now([torch.device("mps")])
    drawn = torch.rand(3, generator=generator)
    assert RandomState.now([torch.device("mps")]) != state
    state.restore()
    assert torch.equal(torch.rand(3, generator=generator), drawn)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_state_whose_position_has_come_around_is_another_one(draw: Callable[[], object]) -> None:
    draw()
    state = RandomState.now(())
    for _ in range(312):  # of two words each
        draw()
    assert RandomState.now(()) != state
    state.restore()
    assert RandomState.now(()) == state
