"""The order of samples in runs."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import OptionError
from penstock.data.chunk_shuffle import ChunkShuffle
from penstock.loader.sampling.indexed_order import blocks_of_rank
from penstock.loader.sampling.sharding import Share

RUNS = st.lists(st.integers(0, 9), min_size=1, max_size=12).map(lambda sizes: np.cumsum([0, *sizes]))
SMALL = st.integers(1, 5)


@given(starts=RUNS, batch_size=SMALL, lanes=SMALL, window=SMALL, seed=st.integers(0, 9))
def test_every_sample_comes_once(starts: np.ndarray, batch_size: int, lanes: int, window: int, seed: int) -> None:
    order = ChunkShuffle(starts, batch_size=batch_size, lanes=lanes, window=window, seed=seed)
    assert sorted(order) == list(range(starts[-1]))
    assert len(order) == starts[-1]


def test_a_worker_that_gets_every_fourth_batch_is_the_only_one_to_read_its_runs() -> None:
    starts, lanes, batch_size = np.arange(0, 33 * 24, 24), 4, 8
    order = list(ChunkShuffle(starts, batch_size=batch_size, lanes=lanes, window=2, seed=3))
    readers: dict[int, set[int]] = {}
    for number in range(len(order) // batch_size):
        for index in order[number * batch_size : (number + 1) * batch_size]:
            readers.setdefault(index // 24, set()).add(number % lanes)
    assert all(len(who) == 1 for who in readers.values())


def test_no_more_runs_than_the_window_holds_are_under_way_in_a_lane() -> None:
    order = list(ChunkShuffle(np.arange(0, 101, 10), window=2, seed=0))
    for at in range(0, 100, 20):
        assert len({index // 10 for index in order[at : at + 20]}) == 2


def test_passes_differ_and_seeds_repeat_them() -> None:
    order, again = ChunkShuffle([0, 50, 100], seed=4), ChunkShuffle([0, 50, 100], seed=4)
    first, second = list(order), list(order)
    assert first != second
    again.set_epoch(1)
    assert list(again) == second


def test_without_a_seed_torchs_decides() -> None:
    def drawn() -> list[int]:
        torch.manual_seed(7)
        return list(ChunkShuffle([0, 50, 100]))

    assert drawn() == drawn()


def test_no_lanes_are_refused() -> None:
    with pytest.raises(OptionError, match="lanes=0"):
        ChunkShuffle([0, 4], lanes=0)


@given(starts=RUNS, batch_size=SMALL, lanes=SMALL, window=SMALL, data=st.data())
def test_any_places_of_an_order_have_the_indices_that_a_pass_has_there(
    starts: np.ndarray, batch_size: int, lanes: int, window: int, data: st.DataObject
) -> None:
    shuffle = ChunkShuffle(starts, batch_size=batch_size, lanes=lanes, window=window)
    drawn, order = list(shuffle.drawn(3, 1)), shuffle.order(3, 1)
    for _ in range(3):
        places = data.draw(st.lists(st.integers(0, len(drawn) - 1))) if drawn else []
        assert order.at(np.array(places, np.int64)).tolist() == [drawn[place] for place in places]


def test_each_order_of_a_block_comes_about_as_often() -> None:
    found = Counter(tuple(ChunkShuffle([0, 2, 4]).drawn(seed, 0)) for seed in range(960))
    assert len(found) == 24
    assert max(abs(count - 40) for count in found.values()) < 5 * 40**0.5


def test_a_rank_of_many_holds_nothing_for_each_of_a_billion_samples() -> None:
    starts, world = np.arange(0, 10**9 + 1, 10**4), 512
    tracemalloc.start()
    try:
        order = ChunkShuffle(starts, batch_size=32, lanes=2 * world).order(0, 0)
        for position in (0, 7 * 10**8):
            own = Share(rank=world // 2, world=world, block=32)
            block = next(blocks_of_rank(order, own, position=position, multiple_of=32))
            assert len({*block.tolist()}) == len(block) > 10**4
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
    finally:
        tracemalloc.stop()
