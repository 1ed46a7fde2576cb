"""`penstock.mix`: exact parts, the same samples with any workers and ranks, and a rule for each end."""

from __future__ import annotations

import copy
import hashlib
import math
import pickle
import random
import sys
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data.distributed import DistributedSampler

import penstock
from penstock.core.errors import OptionError, StateError
from penstock.data import mixture_order
from penstock.data.mixture_order import MixtureOrder
from penstock.loader.scheduling.purity import why_impure
from penstock.loader.workers.worker_spec import WorkerSpec

STOPS = ["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]


class Numbers(penstock.Source):
    def __init__(self, first: int, count: int) -> None:
        self.numbers = np.arange(first, first + count)

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, index: int) -> int:
        return int(self.numbers[index])


def mixture(**options: Any) -> penstock.Mixture:
    sources = [(Numbers(0, 300), 0.7), (Numbers(1000, 200), 0.2), (Numbers(2000, 50), 0.1)]
    return penstock.mix(sources, **{"seed": 5, "shuffle": True, **options})


def order(weights: list[float], sizes: list[int], **options: Any) -> MixtureOrder:
    how = {"seed": 1, "stop": "first_exhausted", "length": None, "shuffle": True, **options}
    return MixtureOrder(weights, sizes, **how)


# ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_source_has_its_part_after_every_block_and_no_place_tells_which_comes() -> None:
    weights = np.array([0.5, 0.3, 0.15, 0.05])
    one = order([*weights], [10**6] * 4, stop="never", length=20_480)
    sources = np.array([one.locate(place, 0)[0] for place in range(len(one))])
    given_so_far = np.cumsum(sources[:, None] == np.arange(4), axis=0)[1023::1024]
    wanted = np.arange(1024, 20_481, 1024)[:, None] * weights
    assert np.abs(given_so_far - wanted).max() < 4
    pairs = np.bincount(sources[:-1] * 4 + sources[1:], minlength=16)
    expected = np.outer(weights, weights).reshape(-1) * len(sources)
    assert ((pairs - expected) ** 2 / expected).sum() < 30.6  # χ² with 15 degrees of freedom, at 1 %


def test_every_order_of_a_small_source_is_as_likely() -> None:
    one = order([1], [4], stop="never", length=4)
    orders = Counter(tuple(one.locate(place, epoch)[1] for place in range(4)) for epoch in range(720))
    assert len(orders) == 24
    assert sum((count - 30) ** 2 / 30 for count in orders.values()) < 41.6  # 23 degrees of freedom, at 1 %


def test_a_large_source_is_permuted_evenly() -> None:
    one = order([1], [2000], stop="first_exhausted")
    places = np.array([[one.locate(place, epoch)[1] for place in range(2000)] for epoch in range(10)])
    assert all(np.array_equal(np.sort(row), np.arange(2000)) for row in places)
    cells = np.histogram2d(np.tile(np.arange(2000), 10), places.reshape(-1), bins=10)[0]
    assert ((cells - 200) ** 2 / 200).sum() < 113.5  # 81 degrees of freedom, at 1 %


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
    sizes=st.lists(st.integers(1, 400), min_size=5, max_size=5),
    seed=st.integers(0, 2**64),
    stop=st.sampled_from(STOPS),
    epoch=st.integers(0, 3),
)
def test_an_epoch_ends_where_its_rule_says(
    weights: list[float], sizes: list[int], seed: int, stop: str, epoch: int
) -> None:
    sizes = sizes[: len(weights)]
    one = order(weights, sizes, seed=seed, stop=stop)
    if len(one) > 5000:
        return
    found = [one.locate(place, epoch) for place in range(len(one))]
    counts = Counter(source for source, _ in found)
    assert tuple(counts[source] for source in range(len(sizes))) == one.counts
    passes = [count / size for count, size in zip(one.counts, sizes, strict=True)]
    assert {"first_exhausted": max(passes), "all_exhausted": min(passes)}.get(stop, 1) == 1
    if stop == "all_exhausted_without_replacement":
        assert len(set(found)) == sum(sizes) == len(found)
    if stop != "all_exhausted_without_replacement":  # no sample comes more often than another, but for one pass
        times = Counter(found)
        for source, size in enumerate(sizes):
            each = [times[source, number] for number in range(size)]
            assert max(each) - min(each) <= 1 + (epoch > 0)


def test_the_last_sample_of_an_epoch_is_the_one_that_exhausts() -> None:
    one = order([1, 1], [100, 900])
    last = one.locate(len(one) - 1, 0)[0]
    assert one.counts[0] == 100
    assert last == 0


def test_epochs_continue_each_source_where_the_last_one_has_left_it() -> None:
    for shuffle in (False, True):
        one = order([1, 4], [60, 100], shuffle=shuffle)
        seen: list[list[int]] = [[], []]
        for epoch in range(20):
            for place in range(len(one)):
                source, number = one.locate(place, epoch)
                seen[source].append(number)
            counts = Counter(seen[0])
            assert max(counts.values()) - min(counts[number] for number in range(60)) <= 1
        if not shuffle:
            assert sorted(seen[0][: one.counts[0]]) == [*range(one.counts[0])]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("sizes", [[60, 100], [9000, 5000, 700]])
def test_a_position_has_the_same_sample_in_whatever_order_positions_are_asked_for(sizes, shuffle) -> None:
    places = [*range(len(order([1, 4, 2][: len(sizes)], sizes, shuffle=shuffle)))]

    def asked_for(places: list[int]) -> dict[int, tuple[int, int]]:
        one = order([1, 4, 2][: len(sizes)], sizes, shuffle=shuffle)
        return {place: one.locate(place, 1) for place in places}

    in_sequence = asked_for(places)
    shuffled = [*places]
    random.Random(0).shuffle(shuffled)
    assert asked_for(shuffled) == in_sequence
    for few in (shuffled[:3], shuffled[3:6]):  # each computed alone
        assert asked_for(few).items() <= in_sequence.items()


@given(
    sizes=st.lists(st.integers(1, 3000), min_size=2, max_size=4),
    changes=st.dictionaries(st.integers(1, 6000), st.lists(st.integers(0, 5), min_size=4, max_size=4), max_size=3),
    stop=st.sampled_from(STOPS),
    epoch=st.integers(0, 1),
)
def test_with_a_schedule_each_part_has_its_weights_and_each_end_its_rule(sizes, changes, stop, epoch) -> None:
    changes = {position: weights[: len(sizes)] for position, weights in changes.items() if any(weights[: len(sizes)])}
    first = [1 + source for source in range(len(sizes))]
    try:
        one = order(first, sizes, stop=stop, schedule=changes)
    except OptionError as error:
        assert "end" in str(error)  # noqa: PT017  some have none
        return
    places = [one.locate(place, epoch) for place in range(len(one))]
    given = np.bincount([source for source, _ in places], minlength=len(sizes))
    assert tuple(given) == one.counts
    if stop == "all_exhausted_without_replacement":
        assert tuple(given) == tuple(sizes)
        assert len({*places}) == sum(sizes)
        return
    ended = [count >= size for count, size in zip(given, sizes, strict=True)]
    assert any(ended) if stop == "first_exhausted" else all(ended)
    bounds = [0, *(position for position in sorted(changes) if position < len(one)), len(one)]
    for begin, end in pairwise(bounds):
        weights = np.array(changes.get(begin, first), float)
        part = np.bincount([source for source, _ in places[begin:end]], minlength=len(sizes))
        inside = np.abs(part - (end - begin) * weights / weights.sum()).max()
        assert inside <= 1024  # the last block of a part is cut anywhere; what its weight forbids never comes
        assert not part[weights == 0].any()


def test_a_schedule_holds_after_every_block() -> None:
    one = order([1, 1], [10**5] * 2, stop="never", length=80_000, schedule={30_000: [1, 3], 60_000: [0, 2]})
    sources = np.array([one.locate(place, 0)[0] for place in range(80_000)])
    for begin, end, part in ((0, 30_000, 0.5), (30_000, 60_000, 0.75), (60_000, 80_000, 1.0)):
        assert abs(sources[begin:end].mean() - part) <= 2 / (end - begin) + 0.5 * (part < 1) * 1024 / (end - begin)


@pytest.mark.parametrize("stop", STOPS)
def test_a_source_of_weight_0_begins_when_the_schedule_gives_it_a_weight(stop: Any) -> None:
    schedule = {np.int64(40): [1, torch.tensor(1.0)]}
    one = penstock.mix([(Numbers(0, 100), 1), (Numbers(1000, 30), 0.0)], stop=stop, schedule=schedule, shuffle=True)
    for epoch in range(2):
        one.set_epoch(epoch)
        found = [*one]
        assert max(found[:40]) < 1000
        assert sum(number >= 1000 for number in found) == one.counts[1] >= 30
    assert len({*found}) == 130 or stop == "first_exhausted"


def test_epochs_of_a_scheduled_mixture_continue_each_source() -> None:
    one = order([1, 4], [60, 100], stop="never", length=150, schedule={70: [3, 0]})
    seen: list[list[int]] = [[], []]
    for epoch in range(20):
        for place in range(len(one)):
            source, number = one.locate(place, epoch)
            seen[source].append(number)
    for source, size in enumerate((60, 100)):
        passes = [seen[source][at : at + size] for at in range(0, len(seen[source]), size)]
        assert all(len({*one}) == len(one) for one in passes)


@pytest.mark.parametrize(
    ("schedule", "stop", "says"),
    [
        ({0: [1, 1]}, "first_exhausted", "a position of an epoch"),
        ({1.5: [1, 1]}, "first_exhausted", "a position of an epoch"),
        ({5: [1]}, "first_exhausted", "each of the 2 sources"),
        ({5: [0, 0]}, "first_exhausted", "one of them more than 0"),
        ({5: [1, -1]}, "first_exhausted", "0 or more"),
        ({5: [1, 0]}, "all_exhausted", "no end"),
        ({5: [1, 0]}, "all_exhausted_without_replacement", "never end"),
    ],
)
def test_a_schedule_that_is_none_or_has_no_end_is_refused(schedule, stop, says) -> None:
    with pytest.raises(OptionError, match=says):
        penstock.mix([(Numbers(0, 100), 1), (Numbers(0, 100), 1)], stop=stop, schedule=schedule)


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    passes=st.lists(st.floats(0.2, 3.5), min_size=4, max_size=4),
    weights=st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    stop=st.sampled_from(STOPS),
    shuffle=st.booleans(),
)
def test_a_source_has_ended_after_as_many_passes_as_its_epochs_say(sizes, passes, weights, stop, shuffle) -> None:
    count = len(sizes)
    sources = [Numbers(1000 * place, size) for place, size in enumerate(sizes)]
    one = penstock.mix([*zip(sources, weights, strict=False)], stop=stop, shuffle=shuffle, epochs=passes[:count])
    limits = [max(1, round(Fraction(some) * size)) for some, size in zip(passes, sizes, strict=False)]
    if len(one) > 2000:
        return
    found = Counter(one.locate(place) for place in range(len(one)))
    given_all = [given >= limit for given, limit in zip(one.counts, limits, strict=True)]
    if stop == "all_exhausted_without_replacement":
        assert one.counts == tuple(limits)
    elif stop == "first_exhausted":
        assert any(given == limit for given, limit in zip(one.counts, limits, strict=True))
        assert all(given <= limit for given, limit in zip(one.counts, limits, strict=True))
    else:
        assert all(given_all)
        assert any(given == limit for given, limit in zip(one.counts, limits, strict=True))
    for source, size in enumerate(sizes):
        times = [found[source, number] for number in range(size)]
        assert max(times) - min(times) <= 1
        assert sum(times) == one.counts[source]


def test_whole_passes_over_sources_have_exactly_their_parts_of_the_tokens() -> None:
    rng = np.random.default_rng(4)
    lengths = [rng.integers(1, 2000, 300), rng.integers(100, 200, 500)]
    totals = [int(one.sum()) for one in lengths]
    sources = [Numbers(0, 300), Numbers(1000, 500)]
    one = penstock.mix(
        [(sources[0], 2 * totals[0]), (sources[1], 3 * totals[1])],
        lengths=lengths,
        epochs=[2, 3],
        stop="all_exhausted_without_replacement",
        shuffle=True,
    )
    tokens = np.zeros((len(one), 2))
    for place in range(len(one)):
        source, number = one.locate(place)
        tokens[place, source] = lengths[source][number]
    assert tokens.sum(axis=0).tolist() == [2 * totals[0], 3 * totals[1]]
    parts = tokens.cumsum(axis=0) / tokens.sum(axis=0)
    # Each is a sum of n lengths drawn without replacement: within 4 standard deviations of the same part of the whole.
    deviations = [float(np.std(one)) / total for one, total in zip(lengths, totals, strict=True)]
    bounds = 4 * np.sqrt(np.array([300, 500]) / 4) * np.array(deviations) + 0.02
    middle = len(one) // 2
    assert (np.abs(parts[middle] - 0.5) < bounds).all(), (parts[middle], bounds)


def test_lengths_that_are_equal_give_each_source_its_part_of_the_tokens_after_every_block() -> None:
    sources, weights, means = [range(50_000)] * 3, np.array([0.6, 0.3, 0.1]), np.array([100, 10, 1000])
    for lengths in (means, [np.full(50_000, mean) for mean in means]):
        one = penstock.mix([*zip(sources, weights, strict=True)], lengths=lengths, stop="never", length=20_480)
        given_so_far = np.cumsum([np.eye(3)[one.locate(place)[0]] for place in range(len(one))], axis=0)[1023::1024]
        parts = weights / means / sum(weights / means)
        assert np.abs(given_so_far - np.arange(1024, 20_481, 1024)[:, None] * parts).max() < 4


def test_lengths_may_be_fractions_such_as_seconds() -> None:
    lengths = [[0.5] * 100, [1.5] * 100]
    one = penstock.mix([(Numbers(0, 100), 1), (Numbers(0, 100), 1)], lengths=lengths, stop="never", length=400)
    assert one.counts == (300, 100)


def test_weights_of_a_schedule_are_parts_of_the_tokens_too() -> None:
    one = penstock.mix(
        [(Numbers(0, 5000), 1), (Numbers(0, 5000), 1)],
        lengths=[10, 30],
        stop="never",
        length=8000,
        schedule={4000: np.array([3, 1])},
    )
    sources = np.array([one.locate(place)[0] for place in range(8000)])
    assert abs((sources[:4000] == 0).sum() - 3000) < 4
    assert abs((sources[4000:] == 0).sum() - 3600) < 4


def test_weights_of_numpy_are_those_of_python() -> None:
    one = penstock.mix([(Numbers(0, 500), np.int64(100_003)), (Numbers(0, 500), np.int64(300_007))])
    other = penstock.mix([(Numbers(0, 500), 100_003), (Numbers(0, 500), 300_007)])
    assert [*map(one.locate, range(len(one)))] == [*map(other.locate, range(len(other)))]
    assert one.where == other.where


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"epochs": [1]}, "epochs: each of the 3 sources needs one, and there are 1"),
        ({"epochs": [1, 0, 1]}, "epochs of source 1 must be a positive number, not 0"),
        ({"epochs": [1, 1, 1], "stop": "never", "length": 5}, "does not ask"),
        ({"lengths": [1, 2]}, "lengths: each of the 3 sources needs one, and there are 2"),
        ({"lengths": [1, 2, 0]}, "mean length of source 2 must be a positive number, not 0"),
        ({"lengths": [1, [1, 2], 1]}, "source 1 needs one of 0 or more for each of its 200 samples"),
        ({"lengths": [1, np.zeros(200, int), 1]}, "tokens of source 1 must be a positive number"),
    ],
)
def test_epochs_and_lengths_are_checked(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        mixture(**options)


@pytest.mark.parametrize("kind", [torch.int64, torch.float32, torch.bfloat16])
def test_lengths_may_be_tensors_as_they_may_be_arrays(kind: torch.dtype) -> None:
    lengths = [torch.arange(1, 5, dtype=kind), torch.tensor(2.5)]
    sources: list[Any] = [(range(4), 1), (range(4), 1)]
    one, other = penstock.mix(sources, lengths=lengths), penstock.mix(sources, lengths=[[1, 2, 3, 4], 2.5])  # type: ignore[arg-type]
    assert one.where == other.where


def test_lengths_whose_sum_is_larger_than_an_int64_are_summed_all_the_same() -> None:
    for lengths in (np.full(4, 1 << 62), np.full(4, 1 << 63, np.uint64), [1 << 62] * 4):
        sources: list[Any] = [(range(4), 1), (range(4), 1)]
        one = penstock.mix(sources, lengths=[lengths, float(max(lengths))], stop="never", length=8)
        assert one.counts == (4, 4)


class Many:
    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> int:
        return index


def test_an_epoch_may_have_as_many_samples_as_a_length_can_say() -> None:
    for shuffle in (False, True):
        one = penstock.mix([(Many(), 1)], shuffle=shuffle)
        assert len(one) == sys.maxsize
        assert shuffle or sorted(one[place] for place in range(-3, 0)) == [sys.maxsize - gap for gap in (3, 2, 1)]
        assert 0 <= one[sys.maxsize // 2] < sys.maxsize


def test_an_epoch_longer_than_a_length_can_say_is_refused() -> None:
    for sources, options in (
        ([(Many(), 1), ([1], 1)], {"stop": "all_exhausted"}),
        ([(Many(), 1), ([1], 1)], {"stop": "all_exhausted_without_replacement"}),
        ([([1, 2, 3], 1)], {"epochs": [10**30]}),
        ([([1, 2, 3], 1)], {"epochs": [1e308]}),
        ([([1], 1)], {"stop": "never", "length": 1 << 63}),
    ):
        with pytest.raises(OptionError, match="a length is at most 9223372036854775807; lower length= or epochs="):
            penstock.mix(sources, **options)  # type: ignore[arg-type]


def test_a_state_is_refused_by_a_mixture_with_other_lengths_or_epochs() -> None:
    state = penstock.DataLoader(mixture(lengths=[1, 2, 3]), batch_size=8).state_dict()
    for other in ({"lengths": [1, 2, 4]}, {"lengths": [1, 2, 3], "epochs": [1, 1, 2]}):
        with pytest.raises(StateError):
            penstock.DataLoader(mixture(**other), batch_size=8).load_state_dict(state)


def test_an_order_is_the_same_on_every_machine_and_with_every_version() -> None:
    found = [order([3, 1], [5000, 70]).locate(place, 2) for place in (0, 1, 2, 100)]
    assert found == [(0, 1805), (0, 2415), (0, 3892), (0, 2568)]


def leaving_out(count: int) -> MixtureOrder:
    sizes = [20 + 7 * source % 90 for source in range(count)]
    schedule = {900: [1 + source % 3 for source in range(count)]}
    how: dict[str, Any] = {"stop": "all_exhausted_without_replacement", "schedule": schedule}
    return order([1 + source % 5 for source in range(count)], sizes, **how)


def test_leaving_out_many_sources_gives_the_same_order_with_every_version() -> None:
    one = leaving_out(60)
    places = [one.locate(place, 2) for place in range(len(one))]
    assert hashlib.sha256(repr(places).encode()).hexdigest()[:16] == "59b5c2f8268e2a1e"


def test_leaving_out_a_source_orders_as_many_blocks_however_many_others_there_are(monkeypatch: Any) -> None:
    ordered = []
    shuffled = mixture_order._shuffled
    monkeypatch.setattr(mixture_order, "_shuffled", lambda *given: ordered.append(given) or shuffled(*given))
    for count in (20, 200):
        ordered.clear()
        leaving_out(count)
        assert len(ordered) <= 2 * count


def test_ten_billion_samples_take_neither_time_nor_memory() -> None:
    one = order([5, 1], [10**10, 10**9], stop="all_exhausted")
    assert len(one) > 10**10
    assert one.locate(9 * 10**9, 3)[1] < 10**10
    assert len(pickle.dumps(one)) < 1500


# ── loaders ─────────────────────────────────────────────────────────────────────────────────────────────────


def numbers(loader: Any) -> list[int]:
    return [number for batch in loader for number in batch.tolist()]


def test_a_mixture_is_bitwise_the_same_with_any_number_of_workers_in_torchs_loader_and_penstocks() -> None:
    one = mixture()
    alone = [one[place] for place in range(len(one))]
    assert [*one] == alone
    for loader in (TorchLoader, penstock.DataLoader):
        for workers in (0, 1, 2):
            assert numbers(loader(one, batch_size=7, num_workers=workers)) == alone


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_ranks_together_have_the_mixture(ranks: int) -> None:
    one = mixture(stop="never", length=600)
    for epoch in range(2):
        one.set_epoch(epoch)
        found = [
            numbers(TorchLoader(one, 4, sampler=DistributedSampler(one, ranks, rank, shuffle=False)))
            for rank in range(ranks)
        ]
        assert [number for together in zip(*found, strict=True) for number in together] == [*one]


def test_penstocks_loader_counts_epochs_and_each_has_another_order_of_as_many_samples() -> None:
    one = mixture()
    loader = penstock.DataLoader(one.map(float), batch_size=16)
    passes = [numbers(loader) for _ in range(3)]
    for epoch, found in enumerate(passes):
        one.set_epoch(epoch)
        assert found == [*one]
    assert passes[0] != passes[1]
    one.set_epoch(7)
    seventh = [*one]
    assert numbers(loader) == seventh
    loader.set_epoch(1)
    assert numbers(loader) == passes[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2, "persistent_workers": True},
        {"shuffle": True, "seed": 3, "num_workers": 1},
    ],
)
def test_penstocks_loader_counts_on_from_the_epoch_that_its_mixture_is_set_to(options: dict[str, Any]) -> None:
    def loader() -> tuple[penstock.Mixture, penstock.DataLoader[Any]]:
        one = mixture(stop="never", length=40)
        return one, penstock.DataLoader(one.map(int), batch_size=8, **options)

    (one, set_by_mixture), (_, set_by_loader) = loader(), loader()
    for epoch in (2, 0, 5):
        one.set_epoch(epoch)
        set_by_loader.set_epoch(epoch)
        for number in range(epoch, epoch + 2):
            assert numbers(set_by_mixture) == numbers(set_by_loader)
            assert one.epoch == number


@pytest.mark.parametrize("taken", [0, 2, 5])
def test_a_loop_that_resumes_counts_on_from_the_epoch_that_its_mixture_was_set_to(taken: int) -> None:
    def loader() -> tuple[penstock.Mixture, penstock.DataLoader[Any]]:
        one = mixture(stop="never", length=40)
        return one, penstock.DataLoader(one, batch_size=8, shuffle=True, seed=3)

    (one, first), (other, resumed) = loader(), loader()
    one.set_epoch(4)
    batches = iter(first)
    for _ in range(taken):
        next(batches)
    other.set_epoch(1)  # the state says which
    resumed.load_state_dict(first.state_dict())
    rest = numbers(batches)
    if rest:  # after the last batch comes the next epoch
        assert numbers(resumed) == rest
        assert other.epoch == 4
    for epoch in (5, 6):
        assert numbers(resumed) == numbers(first)
        assert (one.epoch, other.epoch) == (epoch, epoch)


def test_an_epoch_that_a_mixture_is_set_to_after_a_state_is_begun_or_a_warning_says_that_it_is_not() -> None:
    (one, first), (other, resumed) = (
        (each, penstock.DataLoader(each, batch_size=8)) for each in (mixture(stop="never", length=40) for _ in range(2))
    )
    batches = iter(first)
    next(batches)
    resumed.load_state_dict(first.state_dict())
    other.set_epoch(4)
    with pytest.warns(UserWarning, match=r"in the middle of epoch 0, which .* although set_epoch\(4\) was called"):
        assert numbers(resumed) == numbers(batches)
    resumed.load_state_dict(first.state_dict())
    for each in (one, other):
        each.set_epoch(4)
    assert numbers(resumed) == numbers(first) == [*other]
    assert (one.epoch, other.epoch) == (4, 4)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_ends_when_another_has_begun_another_epoch_of_its_mixture(workers: int) -> None:
    one = mixture()
    training = penstock.DataLoader(one, batch_size=16, num_workers=workers)
    numbers(training)
    second = iter(training)
    next(second)
    penstock.DataLoader(one, batch_size=16).set_epoch(1)  # nothing is read yet
    next(second)
    validation = iter(penstock.DataLoader(one, batch_size=16))
    next(validation)
    with pytest.raises(OptionError, match=r"reads epoch 1 .* set it to epoch 0,.*deepcopy"):
        next(second)
    own = penstock.DataLoader(copy.deepcopy(one), batch_size=16)
    assert len(numbers(own)) == len(one)
    assert len([*validation]) == len(training) - 1


def test_workers_that_persist_see_the_epoch_of_a_mixture() -> None:
    one = mixture(stop="never", length=40)
    for kind in (TorchLoader, penstock.DataLoader):
        loader = kind(one, batch_size=8, num_workers=1, persistent_workers=True)
        for epoch in (2, 5):
            one.set_epoch(epoch)
            assert numbers(loader) == [*one]
        del loader


@pytest.mark.parametrize(("taken", "workers"), [(0, 0), (3, 2), (25, 0)])
def test_a_loop_resumes_anywhere_with_what_was_left(taken: int, workers: int) -> None:
    def loader(workers: int) -> penstock.DataLoader[Any]:
        one = mixture(stop="never", length=200)
        return penstock.DataLoader(one, batch_size=8, num_workers=workers, shuffle=True, seed=3)

    first, resumed = loader(workers), loader(2 - workers)
    before = numbers(first)
    batches = iter(first)
    for _ in range(taken):
        next(batches)
    resumed.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    rest = numbers(batches)
    assert len(rest) == 200 - 8 * taken
    assert rest != before[8 * taken :] or not rest
    if rest:  # after the last batch comes the next epoch
        assert numbers(resumed) == rest
    assert numbers(resumed) == numbers(first)


def test_a_state_is_refused_by_a_mixture_with_other_weights_or_data() -> None:
    def loader(weight: float, first: int) -> penstock.DataLoader[Any]:
        pairs = [([*range(first, first + 40)], weight), ([*range(90)], 1.0)]
        return penstock.DataLoader(penstock.mix(pairs), batch_size=4)

    one = loader(1, 100)
    batches = iter(one)
    next(batches)
    state = one.state_dict()
    loader(1, 100).load_state_dict(state)
    for other in (loader(2, 100), loader(1, 101)):
        with pytest.raises(StateError):
            other.load_state_dict(state)


def test_any_worker_may_make_a_batch_of_a_mixture_of_pure_sources() -> None:
    collate = torch.utils.data.default_collate
    made: dict[str, Any] = {"collate_fn": collate, "iterable": False, "auto_collation": True, "drop_last": False}
    assert why_impure(WorkerSpec(dataset=penstock.mix([([1, 2], 1)]), **made)) == ""
    assert why_impure(WorkerSpec(dataset=mixture(), **made)) == "Numbers may keep a state"


# ── the source itself ───────────────────────────────────────────────────────────────────────────────────────


def test_a_mixture_takes_sources_paths_and_datasets(tmp_path: Any) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(40, dtype=np.uint16))
    source = penstock.open(str(tmp_path / "tokens.npy"), length=8)
    one = penstock.mix({source: 1, Numbers(0, 9): 2}, stop="all_exhausted_without_replacement")
    assert one.counts == (len(source), 9)
    assert one.parts[0] is source
    with pytest.raises(penstock.SourceError):
        penstock.mix({str(tmp_path / "none.h5"): 1})


def test_a_copy_and_a_pickle_have_the_samples_but_a_copy_its_own_epoch() -> None:
    one = mixture()
    other, same = copy.deepcopy(one), pickle.loads(pickle.dumps(one))
    one.set_epoch(3)
    assert (other.epoch, same.epoch) == (0, 3)
    assert [*same] == [*one]
    pickled = pickle.dumps(one)
    expected = [*one]
    del one, same
    assert [*pickle.loads(pickled)] == expected


def test_a_mixture_of_mixtures_is_refused_with_how_to_write_it_flat() -> None:
    for inner in (mixture(), mixture().map(float), mixture().select(range(9))):
        with pytest.raises(OptionError, match=r"is a mixture itself, .* \(code, 0.15\)"):
            penstock.mix([(Numbers(0, 9), 1), (inner, 1)])


def test_index_and_options_are_checked() -> None:
    one = mixture()
    assert one[-1] == one[len(one) - 1]
    with pytest.raises(IndexError):
        one[len(one)]
    for sources, options, words in (
        ([], {}, "at least one source"),
        ([([1], 0)], {}, "weight of source 0 must be a positive number"),
        ([([1], math.nan)], {}, "must be a positive number"),
        ([([1], "2")], {}, "must be a positive number"),
        ([([1], 1), ([], 1)], {}, "source 1 of this mixture has no samples"),
        ([([1], 1)], {"stop": "sometimes"}, "stop must be one of 'first_exhausted'"),
        ([([1], 1)], {"stop": "never"}, "needs the length of an epoch"),
        ([([1], 1)], {"length": 3}, "do not go together"),
        ([([1], 1)], {"stop": "never", "length": 0}, "at least 1"),
        ([([1], 1)], {"stop": "never", "length": 2.5}, "length must be a whole number, not 2.5"),
        ([([1], 1)], {"seed": None}, "seed must be a whole number, not None"),
        ([([1], 1)], {"epochs": 2}, "needs one, and there are only 2"),
        ([([1], 1)], {"schedule": [(1, [2])]}, "schedule is {position: "),
        ([([1], 1)], {"schedule": {1: {"web": 2}}}, "weights by name"),
        ([([1], 1)], {"schedule": {1: "1"}}, "schedule: the weight of source 0 from position 1 .* not '1'"),
        ([([1], 1)], {"schedule": {1: [10**400]}}, "schedule: the weight of source 0 .* at most 1.8e[+]308"),
        ([([1], 10**400), ([1], 1)], {}, "weight of source 0 must be a number of at most 1.8e[+]308"),
        ([([1], torch.ones(2))], {}, "weight of source 0 must be a positive number"),
        ([([1], 1)], {"lengths": [["a"]]}, "lengths: source 0 needs one of 0 or more"),
        ([([1, 2], 1)], {"lengths": [[1, [2, 3]]]}, "lengths: source 0 needs one of 0 or more"),
        ([([1], 1)], {"lengths": ["1"]}, "lengths: source 0 needs one of 0 or more"),
        ([[1], [2]], {}, "is no pair"),
        ([([1], 0), ([1], 0)], {"stop": "never", "length": 4, "schedule": {2: [1, 1]}}, "no first sample"),
        ([(Numbers(0, 3).stream(), 1)], {}, "takes samples by number"),
    ):
        with pytest.raises(OptionError, match=words):
            penstock.mix(sources, **options)  # type: ignore[arg-type]
    for epoch in (-1, 1 << 63, 1.5, "1", None):
        for counted in (one, Numbers(0, 3).stream(), penstock.DataLoader(one)):
            with pytest.raises(OptionError, match=r"an epoch is a whole number of 0 or more, and at most 4611.*, not"):
                counted.set_epoch(epoch)  # type: ignore[attr-defined]
