"""Random states are put back to the number, whoever has drawn meanwhile, and however."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from penstock.memory.recovery.random_state import HostDraws, RandomState

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


@pytest.mark.parametrize("reseed", [lambda: random.seed(7), lambda: np.random.seed(7), lambda: torch.manual_seed(7)])
def test_a_new_seed_changes_the_state(reseed: Callable[[], None]) -> None:
    state = RandomState.now(())
    reseed()
    assert RandomState.now(()) != state


def test_the_hosts_generators_are_read_ever_more_rarely_and_always_where_something_draws_from_them() -> None:
    draws, drawing = HostDraws(), HostDraws()
    read = []
    for window in range(9):
        read.append(draws.are_read)
        draws.look(RandomState.now((), reads_host=draws.are_read), ())
        before = RandomState.now((), reads_host=drawing.are_read)
        if window == 1:
            random.random()
        drawing.look(before, ())
        assert drawing.are_read or window == 0
    assert [window for window, is_read in enumerate(read) if is_read] == [0, 1, 2, 4, 8]


def test_a_state_of_torchs_with_another_normal_number_left_is_another_one() -> None:
    torch.manual_seed(0)
    torch.randn((), dtype=torch.float64)
    has_one_left = torch.get_rng_state()
    torch.randn((), dtype=torch.float64)
    state = RandomState.now(())
    torch.set_rng_state(has_one_left)
    assert RandomState.now(()) != state


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
