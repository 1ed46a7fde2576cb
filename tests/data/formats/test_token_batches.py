"""Batches by tokens: within the budget, near it, every sample once, the same ones again after a resume."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.core.errors import OptionError, SourceError
from penstock.data.formats.tokens.token_batches import TokenBatches
from penstock.loader.padding import PadCollate

LENGTHS = st.lists(st.integers(0, 30), max_size=60)


@given(
    lengths=LENGTHS,
    max_tokens=st.integers(32, 100),
    shuffle=st.booleans(),
    bucket=st.one_of(st.none(), st.integers(1, 40)),
    multiple_of=st.sampled_from([1, 8]),
    max_samples=st.one_of(st.none(), st.integers(1, 5)),
)
def test_every_sample_comes_once_within_the_budget(
    lengths: list[int], max_tokens: int, shuffle: bool, bucket: Any, multiple_of: int, max_samples: Any
) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "bucket": bucket, "multiple_of": multiple_of}
    batches = TokenBatches(lengths, max_tokens, seed=3, max_samples=max_samples, **options)
    for _ in range(2):
        expected = len(batches)
        found = list(batches)
        assert len(found) == expected
        assert sorted(itertools.chain.from_iterable(found)) == list(range(len(lengths)))
        for batch in found:
            longest = -(-max(lengths[number] for number in batch) // multiple_of) * multiple_of
            assert longest * len(batch) <= max_tokens
            assert len(batch) <= (max_samples or len(batch))


@given(lengths=LENGTHS, epoch=st.integers(0, 3), data=st.data())
def test_a_pass_goes_on_where_its_state_was_taken(lengths: list[int], epoch: int, data: st.DataObject) -> None:
    batches = TokenBatches(lengths, 40, seed=5, bucket=20)
    batches.set_epoch(epoch)
    at = data.draw(st.integers(0, len(batches)))
    drawing = iter(batches)
    list(itertools.islice(drawing, at))
    state = batches.state_dict()
    rest, following = list(drawing), list(batches)
    other = TokenBatches(lengths, 40, seed=99, bucket=20)
    other.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert list(other) == rest
    assert list(other) == following


def test_passes_differ_and_seeds_repeat_them() -> None:
    lengths = np.arange(1, 200)
    batches, again = (TokenBatches(lengths, 1000, seed=4) for _ in range(2))
    first, second = list(batches), list(batches)
    assert first != second
    again.set_epoch(1)
    assert list(again) == second
    in_order = TokenBatches(lengths, 1000, shuffle=False)
    assert list(in_order) == list(in_order)


def test_without_a_seed_torchs_decides() -> None:
    def drawn() -> list[list[int]]:
        torch.manual_seed(7)
        return list(TokenBatches(range(100), 300))

    assert drawn() == drawn()


def test_a_pass_that_is_left_counts() -> None:
    batches = TokenBatches(range(100), 300, seed=1)
    left = next(iter(batches))
    again = TokenBatches(range(100), 300, seed=1)
    passes = [list(again) for _ in range(2)]
    assert left == passes[0][0]
    assert list(batches) == passes[1]


@given(lengths=LENGTHS, ranks=st.integers(1, 4))
def test_ranks_share_out_the_batches(lengths: list[int], ranks: int) -> None:
    everyone = [list(TokenBatches(lengths, 40, seed=2, rank=rank, ranks=ranks)) for rank in range(ranks)]
    assert len({len(own) for own in everyone}) == 1
    found = list(itertools.chain.from_iterable(itertools.chain.from_iterable(everyone)))
    assert len(set(found)) == len(found)
    assert len(list(TokenBatches(lengths, 40, seed=2))) - len(everyone[0]) * ranks in range(ranks)


def test_a_last_batch_that_is_not_full_can_be_left_out() -> None:
    assert len(list(TokenBatches([5] * 7, 15, drop_last=True))) == 2
    assert len(list(TokenBatches([5] * 6, 15, drop_last=True))) == 2
    assert list(TokenBatches([], 15, drop_last=True)) == []
    assert list(TokenBatches([5], 15, drop_last=True)) == []


def test_batches_are_nearly_full_and_hardly_padded() -> None:
    """Of what a GPU computes, 3 % is padding; batches of 85 samples each, shuffled, would have 81 %."""
    lengths = np.random.default_rng(0).lognormal(5, 0.8, 50_000).astype(np.int64).clip(1, 2048)
    batches = TokenBatches(lengths, 16_384, seed=0)
    assert batches.padding() < 0.04
    found = list(batches)
    sizes = np.array([lengths[batch].max() * len(batch) for batch in found])
    assert (sizes / 16_384).mean() > 0.95
    shuffled = np.random.default_rng(0).permutation(lengths)[: 50_000 // 85 * 85].reshape(-1, 85)
    assert 1 - shuffled.sum() / (shuffled.max(1) * 85).sum() > 0.75
    longest = np.array([lengths[batch].max() for batch in found])
    assert abs(np.corrcoef(longest[:-1], longest[1:])[0, 1]) < 0.1  # in no order


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(OptionError, match="sample 1 has 50 tokens, and max_tokens=40"):
        TokenBatches([1, 50], 40)
    for wrong in ({"bucket": 0}, {"multiple_of": 0}, {"max_samples": 0}, {"rank": 2, "ranks": 2}):
        with pytest.raises(OptionError):
            TokenBatches([1], 40, **wrong)
    with pytest.raises(OptionError, match="lengths"):
        TokenBatches([-1], 40)


@pytest.mark.parametrize("state", [{}, {"version": 2, "seed": 0, "epoch": 0, "position": 0}, {"version": 1}, None])
def test_a_state_of_something_else_is_refused(state: Any) -> None:
    with pytest.raises(SourceError, match="no state"):
        TokenBatches([1], 4).load_state_dict(state or {"version": 1, "seed": 0, "epoch": 0, "position": 9})


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "worker_type": "thread"}])
def test_a_loader_takes_them(options: Any) -> None:
    lengths = [(number * 37) % 90 + 1 for number in range(200)]
    dataset = [{"tokens": np.full(length, number)} for number, length in enumerate(lengths)]
    batches = TokenBatches(lengths, 512, seed=1)
    loader = penstock.DataLoader(dataset, batch_sampler=batches, collate_fn=PadCollate({"tokens": -1}), **options)
    expected = len(loader)
    found = [batch["tokens"] for batch in loader]
    assert len(found) == expected
    assert all(tokens.numel() <= 512 for tokens in found)
    counted = np.concatenate([tokens[tokens >= 0].numpy() for tokens in found])
    assert np.bincount(counted).tolist() == lengths
