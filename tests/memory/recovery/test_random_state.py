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
    "torch, one of two normal": lambda: torch.randn((), dtype=torch.float64).item(),
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
    host = random_state._host
    monkeypatch.setattr(host._torch, "_get_state", lambda: asked.append("torch"))
    monkeypatch.setattr(host._python, "_get_state", lambda: asked.append("Python"))
    monkeypatch.setattr(host._numpy, "_get_state", lambda: asked.append("NumPy"))
    RandomState.now(())
    assert asked == []
    monkeypatch.undo()
    monkeypatch.setattr(host._python, "_get_state", lambda: asked.append("Python"))
    torch.rand(1)
    np.random.rand()
    RandomState.now(())
    assert asked == []


@pytest.mark.parametrize("reseed", [lambda: random.seed(7), lambda: np.random.seed(7), lambda: torch.manual_seed(7)])
def test_a_new_seed_changes_the_state(reseed: Callable[[], None]) -> None:
    state = RandomState.now(())
    reseed()
    assert RandomState.now(()) != state


def test_states_are_read_where_the_words_cannot_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_state, "_can_peek_python", lambda: False)
    monkeypatch.setattr(random_state, "_find_words", lambda generator: None)
    monkeypatch.setattr(random_state, "_host", random_state._Host())
    for draw in (random.random, lambda: torch.rand(()).item()):
        state = RandomState.now(())
        drawn = draw()
        assert RandomState.now(()) != state
        state.restore()
        assert draw() == drawn


def test_a_state_of_torchs_with_another_normal_number_left_is_another_one() -> None:
    torch.manual_seed(0)
    torch.randn((), dtype=torch.float64)
    has_one_left = torch.get_rng_state()
    torch.randn((), dtype=torch.float64)
    state = RandomState.now(())
    torch.set_rng_state(has_one_left)
    assert RandomState.now(()) != state


def test_torchs_generator_is_not_compared_where_its_words_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert random_state._find_torch(torch.default_generator).nbytes
    monkeypatch.setattr(random_state, "_find_words", lambda generator: 24)  # of the head of the object: never changes
    assert not random_state._find_torch(torch.default_generator).nbytes


def test_another_generator_of_numpys_is_read_each_time() -> None:
    own = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
        state = RandomState.now(())
        drawn = np.random.rand()
        assert RandomState.now(()) != state
        state.restore()
        assert np.random.rand() == drawn
    finally:
        np.random.set_bit_generator(own)  # type: ignore[attr-defined]


def test_a_backend_that_shows_no_generators_is_restored_by_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator()
    module = SimpleNamespace(get_rng_state=generator.get_state, set_rng_state=generator.set_state)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    state = RandomState.now([torch.device("mps")])
    drawn = torch.rand(3, generator=generator)
    assert RandomState.now([torch.device("mps")]) != state
    state.restore()
    assert torch.equal(torch.rand(3, generator=generator), drawn)


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand((), dtype=torch.float64)])
def test_a_state_whose_position_has_come_around_is_another_one(draw: Callable[[], object]) -> None:
    draw()
    state = RandomState.now(())
    for _ in range(312):  # of two words each
        draw()
    assert RandomState.now(()) != state
    state.restore()
    assert RandomState.now(()) == state
