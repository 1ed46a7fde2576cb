"""The digest of what a loop was handed is the same where the indices are, and a sampler that cannot draw them again
is noticed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler, TensorDataset

from penstock import DataLoader
from penstock.core.errors import StateError
from penstock.core.stats import IndexDigest
from penstock.loader.sampling.index_digest import DigestLog, digest_after, index_words


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


@given(st.lists(st.integers() | st.text(max_size=3) | st.tuples(st.integers(), st.text()), max_size=12), st.data())
def test_the_digest_is_of_the_indices_and_not_of_how_they_are_cut(drawn: list[Any], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(drawn)))
    whole = digest_of(drawn)
    assert digest_of(drawn[:at], drawn[at:]) == whole == digest_of(*([index] for index in drawn))
    if drawn:
        assert digest_of(drawn[:-1]) != whole


def digest_of(*batches: Any) -> int:
    digest = 0
    for batch in batches:
        words = index_words(batch)
        assert words is not None
        digest = digest_after(digest, words)
    return digest


@pytest.mark.parametrize("index", [object(), 1.5, [1], ("a", [1]), None])
def test_of_objects_that_look_alike_nothing_is_told(index: Any) -> None:
    assert index_words([1, index]) is None


COUNT = 101


class Own(Dataset[int]):
    """Is asked for lists of indices, where torch's datasets are for tensors."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return index


class Reused(list[int]):
    """A batch sampler that gives the same list each time."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return -(-COUNT // self._size)

    def __iter__(self) -> Iterator[Any]:
        batch: list[int] = []
        for index in range(COUNT):
            batch.append(index)
            if len(batch) == self._size or index == COUNT - 1:
                yield batch
                batch.clear()


def polynomial(indices: list[int]) -> int:
    found = 0
    for index in indices:
        found = (found * 6364136223846793005 + index + 1) % 2**64
    return found


def handed(dataset: Any = None, *, epochs: int = 1, **options: Any) -> tuple[IndexDigest, ...]:
    torch.manual_seed(7)
    loader = DataLoader(Own() if dataset is None else dataset, **{"batch_size": 4, "shuffle": True, **options})
    for _ in range(epochs):
        for _ in loader:
            pass
    return loader.statistics().index_digests


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_the_digest_is_the_documented_polynomial_however_it_is_cut(kind: Any) -> None:
    indices = [*range(5000), -(2**63), 2**63 - 1]
    assert digest_of(kind(indices[:4500]), kind(indices[4500:])) == polynomial(indices)


def test_workers_and_kinds_of_datasets_change_nothing() -> None:
    expected = handed(epochs=2)
    assert [(one.epoch, one.batches, one.is_end) for one in expected[:7]] == [
        *((0, batches, False) for batches in (1, 2, 4, 8, 16)),
        (0, 26, True),
        (1, 1, False),
    ]
    assert len({one.digest for one in expected}) == len(expected)
    assert handed(TensorDataset(torch.arange(COUNT)), epochs=2) == expected
    assert handed(epochs=2, num_workers=2) == expected
    assert handed(epochs=2, num_workers=2, worker_type="thread") == expected
    # Another size of batches: what the whole pass was handed is the same.
    assert handed(epochs=2, batch_size=9)[-1].digest == expected[-1].digest


def test_a_pass_that_is_left_and_samplers_of_the_programs_own_count() -> None:
    loader = DataLoader(Own(), batch_sampler=Reused(10))  # type: ignore[arg-type]
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    assert loader.statistics().index_digests[-1].digest == f"{polynomial([*range(30)]):016x}"
    assert [batch.tolist() for batch in loader][-1] == [100]
    left, *_, last = loader.statistics().index_digests[2:]
    assert (left.batches, left.is_end, last.batches, last.is_end) == (3, False, 11, True)
    assert last.digest == f"{polynomial([*range(COUNT)]):016x}"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seed": 3},
        {"sampler": RandomSampler(Own(), generator=torch.Generator()), "shuffle": None},
        {"shuffle": False},
    ],
)
def test_a_resumed_pass_ends_with_the_digest_of_an_uninterrupted_one(options: dict[str, Any]) -> None:
    torch.manual_seed(7)
    loader, other = (DataLoader(Own(), **{"batch_size": 4, "shuffle": True, **options}) for _ in "ab")
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    list(batches)
    other.load_state_dict(state)
    list(other)
    assert other.statistics().index_digests[-1] == loader.statistics().index_digests[-1]


def test_the_digest_of_another_ranks_state_is_not_carried_on() -> None:
    loaders = [
        DataLoader(Own(), 4, sampler=DistributedSampler(Own(), 2, rank, seed=1))  # type: ignore[var-annotated]
        for rank in (0, 1, 1)
    ]
    for loader in loaders[:2]:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
    own = loaders[1].state_dict()
    loaders[2].load_state_dict(loaders[0].state_dict())
    list(loaders[2])
    assert loaders[2].statistics().index_digests[-1].start == 40
    loaders[2].load_state_dict(own)
    list(loaders[2])
    assert loaders[2].statistics().index_digests[-1].start == 0
    assert loaders[2].statistics().index_digests[-1].batches == 13


def test_a_stream_has_no_digest_and_the_reason_is_told() -> None:
    class Plain(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(9))

    loader = DataLoader(Plain(), 2)
    list(loader)
    statistics = loader.statistics()
    assert (statistics.index_digests, statistics.index_digest_reason) == ((), "a stream has no indices")


def test_objects_that_cannot_be_compared_have_no_digest() -> None:
    loader = DataLoader(Named(), 2, sampler=[object(), object()])  # type: ignore[list-item]
    list(loader)
    assert "cannot be compared" in loader.statistics().index_digest_reason
    assert loader.statistics().index_digests == ()


def test_a_log_of_many_passes_keeps_ends_longest_and_is_bounded() -> None:
    log = DigestLog()
    for epoch in range(300):
        digest = log.begin(epoch)
        for batch in range(40):
            digest.add([epoch, batch])
        digest.leave(is_end=True)
    kept = log.digests()
    assert len(kept) == 128
    assert [one.batches for one in kept[-7:]] == [1, 2, 4, 8, 16, 32, 40]
    assert [one.epoch for one in kept[:-6]] == [*range(178, 300)]
