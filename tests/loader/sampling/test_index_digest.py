"""A sampler that cannot draw an epoch's indices again is noticed, and no other is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Sampler

from penstock import DataLoader
from penstock.core.errors import StateError
from penstock.loader.sampling.index_digest import digest_after


class Drawn(Sampler[Any]):
    """Forty indices, drawn anew for each epoch."""

    def __init__(self, draw: Callable[[], Iterable[Any]]) -> None:
        self._draw = draw

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[Any]:
        return iter(self._draw())


class Named:
    """Tells which index it was asked for."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: Any) -> str:
        return repr(index)


def python_numbers() -> list[int]:
    return random.sample(range(40), 40)


def numpy_numbers() -> Iterable[Any]:
    return np.random.permutation(40)


def numpy_names() -> Iterable[str]:
    return map(str, np.random.permutation(40))


def torch_numbers_in_the_loop() -> Iterator[int]:
    for start in range(0, 40, 8):
        yield from (start + torch.randperm(8)).tolist()


@pytest.mark.parametrize(
    ("draw", "workers"),
    [(python_numbers, 0), (python_numbers, 2), (numpy_numbers, 0), (numpy_names, 0), (torch_numbers_in_the_loop, 0)],
)
def test_indices_that_cannot_be_drawn_again_are_an_error(draw: Callable[[], Iterable[Any]], workers: int) -> None:
    loader, again = (DataLoader(Named(), 4, sampler=Drawn(draw), num_workers=workers) for _ in "ab")  # type: ignore[arg-type]
    batches = iter(loader)
    for _ in range(5):
        next(batches)
        torch.rand(7)  # as a step does
    again.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="Drawn does not give the 20 indices again"):
        next(iter(again))


@pytest.mark.parametrize("kind", [int, np.int64, str, lambda index: (index, [str(index)]), lambda index: {index}])
@pytest.mark.parametrize("batch_size", [4, None])
def test_indices_of_any_kind_that_are_drawn_again_go_on(kind: Callable[[int], Any], batch_size: int | None) -> None:
    draw = lambda: map(kind, torch.randperm(40).tolist())  # noqa: E731
    loader, again = (DataLoader(Named(), batch_size, sampler=Drawn(draw)) for _ in "ab")  # type: ignore[arg-type]
    batches = iter(loader)
    for _ in range(7):
        next(batches)
    again.load_state_dict(loader.state_dict())
    torch.rand(3)
    resumed = iter(again)
    third = [next(resumed) for _ in range(2)]
    once_more = DataLoader(Named(), batch_size, sampler=Drawn(draw))  # type: ignore[arg-type]
    once_more.load_state_dict(again.state_dict())
    assert [*third, *once_more] == list(batches)


indices = st.recursive(
    st.integers() | st.text(max_size=3) | st.binary(max_size=3) | st.none() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=4,
)


@given(st.lists(indices, max_size=12), st.data())
def test_the_digest_is_of_the_indices_and_not_of_how_they_are_cut(drawn: list[Any], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(drawn)))
    whole = digest_after(0, drawn)
    assert digest_after(digest_after(0, drawn[:at]), drawn[at:]) == whole
    if drawn:
        assert digest_after(0, drawn[:-1]) != whole


def test_of_objects_that_look_alike_nothing_is_told() -> None:
    assert digest_after(0, [1, object()]) is None
    assert digest_after(None, [1]) is None


@pytest.mark.parametrize("keys", [list("abcdefgh"), [(number, 2 * number) for number in range(8)]])
def test_keys_of_text_and_numbers_are_not_hashed_one_by_one(keys: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.loader.sampling.index_digest.bytes_of", lambda value: pytest.fail(f"hashed {value}"))
    rows = {key: number for number, key in enumerate(keys)}
    orders = [(2, keys), (2, keys), (4, keys), (2, keys[::-1])]
    loaders = [DataLoader(rows, size, sampler=order) for size, order in orders]  # type: ignore[arg-type]
    batches = [len(list(loader)) for loader in loaders]
    first, same, larger, turned = ([mark.digest for mark in one.statistics().index_digests] for one in loaders)
    assert batches == [4, 4, 2, 4]
    assert first == same
    assert first[-1] == larger[-1] != turned[-1]
