"""An order that is computed by index is a permutation, is as even as a drawn one, and takes no memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from penstock import DataLoader
from penstock.loader.sampling import own_sampler
from penstock.loader.sampling.seeded_permutation import SeededPermutation

LARGEST_Z = 4.5
"""Of a normal variable. The seeds are fixed, so that a test that passes, passes always."""


def order(length: int, seed: int, epoch: int = 0) -> np.ndarray:
    return SeededPermutation(length, seed=seed, epoch=epoch).at(np.arange(length))


def z_of(counts: np.ndarray) -> float:
    """Return how far counts of equally likely cases are from even, in standard deviations of chi-square."""
    expected = counts.sum() / counts.size
    degrees = counts.size - 1
    return float((((counts - expected) ** 2).sum() / expected - degrees) / np.sqrt(2 * degrees))


def test_every_index_comes_once() -> None:
    for length in range(1, 301):
        for seed in range(3):
            assert np.array_equal(np.sort(order(length, seed)), np.arange(length)), (length, seed)
    for length in (1 << 16, (1 << 16) + 1, 99_991):
        assert np.array_equal(np.sort(order(length, 1)), np.arange(length))


@pytest.mark.parametrize("length", [10, *(pytest.param(length, marks=pytest.mark.slow) for length in (40, 300))])
def test_each_index_is_at_each_place_and_beside_each_other_one_as_often(length: int) -> None:
    orders = np.stack([order(length, seed) for seed in range(3000 if length == 10 else 1000)])
    places = np.stack([np.bincount(orders[:, place], minlength=length) for place in range(length)])
    assert abs(z_of(places)) < LARGEST_Z
    steps = (orders[:, 1:] - orders[:, :-1]) % length
    assert abs(z_of(np.bincount(steps.ravel(), minlength=length)[1:])) < LARGEST_Z
    for world in (2, 5):  # which indices a rank gets does not depend on their size or on the rank
        means = [(2 * orders[:, rank::world] / (length - 1) - 1).mean() for rank in range(world)]
        deviation = np.sqrt(1 / 3 / (orders.size // world))
        assert max(map(abs, means)) < LARGEST_Z * deviation


@pytest.mark.parametrize("length", [(1 << 21) + 1, 10**9, 10**12, 1 << 62])
@pytest.mark.parametrize("begin", [0, 1 / 3])
def test_neighbours_of_a_large_order_have_nothing_to_do_with_each_other(length: int, begin: float) -> None:
    count = 200_000
    places = int(begin * length) + np.arange(count)
    drawn = SeededPermutation(length, seed=5, epoch=0).at(places)
    assert len(np.unique(drawn)) == count
    even = drawn / length
    if length > 100 * count:  # else a part of a permutation is more even than chance
        assert abs(z_of(np.bincount((even * 500).astype(int), minlength=500))) < LARGEST_Z
        assert abs(z_of(np.bincount(drawn % 509, minlength=509))) < LARGEST_Z
    steps = ((drawn[1:] - drawn[:-1]) % length) / length
    assert abs(z_of(np.bincount((steps * 500).astype(int), minlength=500))) < LARGEST_Z
    pairs = (even[:-1] * 20).astype(int) * 20 + (even[1:] * 20).astype(int)
    assert abs(z_of(np.bincount(pairs, minlength=400))) < LARGEST_Z
    for lag in (1, 2, 3, 32, 1024):
        assert abs(np.corrcoef(even[:-lag], even[lag:])[0, 1]) * np.sqrt(count) < LARGEST_Z
    assert abs(np.corrcoef(places, drawn)[0, 1]) * np.sqrt(count) < LARGEST_Z


def test_orders_of_other_seeds_and_epochs_are_others() -> None:
    orders = [order(1000, seed, epoch) for seed in range(4) for epoch in range(4)]
    for number, one in enumerate(orders):
        for other in orders[:number]:
            assert (one == other).sum() < 10


def test_the_order_of_a_seed_is_the_same_in_all_versions() -> None:
    assert SeededPermutation(10**12, seed=0, epoch=1).at(np.arange(3)).tolist() == [
        948641912200,
        490842149873,
        726794329933,
    ]


@pytest.mark.parametrize("length", [10**9, 10**12])
def test_a_loader_of_many_samples_begins_and_resumes_in_little_memory(length: int) -> None:
    tracemalloc.start()
    try:
        loader = DataLoader(range(length), 64, shuffle=True, seed=2, distributed=True)  # type: ignore[arg-type]
        expected = SeededPermutation(length, seed=2, epoch=0)
        batches = iter(loader)
        assert next(batches).tolist() == expected.at(np.arange(64)).tolist()
        state = loader.state_dict()
        middle = length // 2
        rest = state["rest"][0]["indices"]
        rest["taken"] = middle
        other = DataLoader(range(length), 64, shuffle=True, seed=2, distributed=True)  # type: ignore[arg-type]
        other.load_state_dict(state)
        assert next(iter(other)).tolist() == expected.at(middle + np.arange(64)).tolist()
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("seed", [None, 0, 5])
def test_orders_that_are_drawn_are_torchs(seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"shuffle": True, "seed": seed, "distributed": True}
    drawn = [index for batch in DataLoader(range(50), 8, **options) for index in batch.tolist()]  # type: ignore[arg-type]
    assert drawn == torch.randperm(50, generator=torch.Generator().manual_seed(seed or 0)).tolist()
    monkeypatch.setattr(own_sampler, "_MOST_DRAWN", 49)
    computed = [index for batch in DataLoader(range(50), 8, **options) for index in batch.tolist()]  # type: ignore[arg-type]
    assert (computed == drawn) == (seed is None)
    assert sorted(computed) == [*range(50)]
