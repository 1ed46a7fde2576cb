"""Randomness that belongs to a sample: the same whatever makes it, and another for each epoch, index and seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import penstock
from penstock import DataLoader

WAYS = [(0, "process"), (1, "process"), (3, "process"), (2, "thread")]


class Asked(Dataset[Any]):
    """Asks for its randomness by name, twice."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float, float, int]:
        once, again = penstock.sample_rng().random(), penstock.sample_rng().random()
        return index, once, again, penstock.sample_seed()


class Unasked(Dataset[Any]):
    """Draws from whatever random state there is, as programs do."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float, float, torch.Tensor]:
        return index, random.random(), np.random.rand(), torch.rand(3)


class Bulk(Unasked):
    """Makes a batch in one call."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Drawing(IterableDataset[Any]):
    """Draws while it is iterated."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for number in range(info.id if info else 0, 12, info.num_workers if info else 1):
            yield number, penstock.sample_rng().random()


def samples(loader: DataLoader[Any]) -> dict[int, list[Any]]:
    """Return what was drawn for each sample."""
    return {
        int(index): [value.tolist() for value in values]
        for batch in loader
        for index, *values in zip(*batch, strict=True)
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_sample_that_asks_gets_the_same_wherever_it_is_made(way: tuple[int, Any]) -> None:
    expected = DataLoader(Asked(), 5, seed=3)
    other = DataLoader(Asked(), 4, num_workers=way[0], worker_type=way[1], seed=3, shuffle=True)
    epochs = [samples(expected), samples(expected)]
    assert epochs == [samples(other), samples(other)]
    values = [value for epoch in epochs for drawn in epoch.values() for value in drawn]
    assert len(set(values)) == len(values) == 2 * 12 * 3
    assert samples(DataLoader(Asked(), 5, seed=4)) != epochs[0]


@pytest.mark.parametrize("kind", [Unasked, Bulk])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_sample_that_draws_from_random_states_does_too(kind: type[Unasked], workers: int) -> None:
    loader = DataLoader(kind(), 4, num_workers=workers, seed=3)
    epochs = [samples(loader), samples(loader)]
    expected = DataLoader(kind(), 4, seed=3)
    assert epochs == [samples(expected), samples(expected)]
    assert len({str(drawn) for epoch in epochs for drawn in epoch.values()}) == 24


def test_the_training_loops_random_states_stay_as_they_are() -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    loader = DataLoader(Unasked(), 4, seed=3, generator=torch.Generator())
    for _ in loader:
        pass
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # type: ignore[index]


def test_without_a_seed_it_hangs_on_torchs() -> None:
    def drawn(seed: int, workers: int) -> dict[int, list[Any]]:
        torch.manual_seed(seed)
        return samples(DataLoader(Asked(), 4, num_workers=workers))

    assert drawn(1, 0) == drawn(1, 2) != drawn(2, 0)


def test_a_loop_that_goes_on_draws_what_it_would_have_drawn() -> None:
    for kind, seed in ((Asked, None), (Unasked, 5), (Drawing, None), (Drawing, 5)):
        one = DataLoader(kind(), 2, num_workers=2, seed=seed)
        iterator = iter(one)
        next(iterator)
        state = one.state_dict()
        other = DataLoader(kind(), 2, num_workers=1 if kind is Drawing else 0, seed=seed)
        if kind is Drawing:
            with pytest.warns(UserWarning, match="made again"):
                other.load_state_dict(state)
        else:
            other.load_state_dict(state)
        assert samples(other) == {
            int(index): [value.tolist() for value in values]
            for batch in iterator
            for index, *values in zip(*batch, strict=True)
        }


def test_a_collate_function_has_randomness_of_its_batch() -> None:
    def mix(batch: list[Any]) -> tuple[int, float]:
        return batch[0][0], penstock.sample_rng().random()

    one, two = ([*DataLoader(Asked(), 4, num_workers=n, collate_fn=mix, seed=1)] for n in (0, 2))
    assert one == two
    assert len({drawn for _, drawn in one}) == 3


def test_outside_of_a_loader_it_hangs_on_torchs_random_state() -> None:
    torch.manual_seed(1)
    once = Asked()[0]
    torch.manual_seed(1)
    assert Asked()[0] == once != Asked()[0]


def test_a_pass_whose_epoch_was_set_has_the_randomness_of_that_epoch() -> None:
    counted, set_by_hand = (DataLoader(Asked(), 4, shuffle=True, seed=5) for _ in range(2))
    passes = [samples(counted) for _ in range(3)]
    set_by_hand.sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert samples(set_by_hand) == passes[1]
    assert samples(set_by_hand) == passes[2]
