"""Random states are put back to the number, whoever has drawn meanwhile, and however."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock.memory import random_state
from penstock.memory.random_state import RandomState

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
def test_what_is_put_back_draws_the_same_again(case: str, before: int) -> None:
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


def test_a_generator_that_stands_still_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(0)
    np.random.seed(0)
    RandomState.now(())
    asked: list[str] = []
    monkeypatch.setattr(random_state._pythons, "_ask", lambda: asked.append("Python"))
    monkeypatch.setattr(random_state._numpys, "_ask", lambda: asked.append("NumPy"))
    RandomState.now(())
    assert asked == []


@pytest.mark.parametrize("reseed", [lambda: random.seed(7), lambda: np.random.seed(7)])
def test_a_new_seed_is_seen(reseed: Callable[[], None]) -> None:
    state = RandomState.now(())
    reseed()
    assert RandomState.now(()) != state


def test_where_words_cannot_be_looked_at_states_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_state, "_pythons_words_lie_open", lambda: False)
    state = RandomState.now(())
    drawn = random.random()
    assert RandomState.now(()) != state
    state.restore()
    assert random.random() == drawn
