"""A state or an epoch that comes after `iter` is taken while nothing was handed out, and refused after that."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import DataLoader, StateError

pytestmark = pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}]
)


def loader_of(options: dict[str, Any]) -> DataLoader[Any]:
    return DataLoader(range(20), 2, seed=1, shuffle=True, **options)  # type: ignore[arg-type]


def numbers(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_a_state_that_is_loaded_before_the_first_batch_is_where_the_loop_begins(options: dict[str, Any]) -> None:
    first, again = loader_of(options), loader_of(options)
    batches = iter(first)
    for _ in range(5):
        next(batches)
    state = first.state_dict()
    resumed = iter(again)
    again.load_state_dict(state)
    rest = numbers(resumed)
    assert rest == numbers(batches)
    assert again.state_dict() != state
    assert numbers(again) == numbers(first)


def test_a_state_that_is_loaded_after_the_first_batch_ends_the_loop_with_an_error(options: dict[str, Any]) -> None:
    loader = loader_of(options)
    state = loader.state_dict()
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(state)
    with pytest.raises(StateError, match="after this loop had handed out 1 batches"):
        next(batches)
    assert len(numbers(loader)) == 10


def test_an_epoch_that_is_set_before_the_first_batch_is_this_loops(options: dict[str, Any]) -> None:
    loader, whole = loader_of(options), loader_of(options)
    epochs = [numbers(whole) for _ in range(4)]
    batches = iter(loader)
    loader.set_epoch(2)
    assert numbers(batches) == epochs[2]
    batches = iter(loader)
    assert next(batches).tolist() == epochs[3][0]
    loader.set_epoch(1)
    assert numbers(batches) == epochs[3][1:]
    assert numbers(loader) == epochs[1]


def test_a_state_at_the_last_batch_goes_on_with_the_next_epoch(options: dict[str, Any]) -> None:
    first, again = loader_of(options), loader_of(options)
    batches = iter(first)
    for _ in range(10):
        next(batches)
    state = first.state_dict()
    assert list(batches) == []
    again.load_state_dict(state)
    assert [numbers(again) for _ in range(2)] == [numbers(first) for _ in range(2)]


def test_a_resumed_epoch_of_which_nothing_is_left_is_empty_if_it_was_asked_for(options: dict[str, Any]) -> None:
    first, again = loader_of(options), loader_of(options)
    batches = iter(first)
    for _ in range(10):
        next(batches)
    again.load_state_dict(first.state_dict())
    again.set_epoch(0)
    with pytest.warns(UserWarning, match="nothing was left of epoch 0"):
        assert numbers(again) == []
    list(batches)
    assert numbers(again) == numbers(first)
