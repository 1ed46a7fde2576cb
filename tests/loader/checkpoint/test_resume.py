"""A loop that goes on from a state hands out just what had not been handed out, whatever else is another now."""

from __future__ import annotations

import copy
import io
import itertools
import json
import os
import pickle
import random
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from effort import examples
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from one_rank import be_rank
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.utils._pytree import tree_map_only
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from penstock import DataLoader
from penstock.core.errors import OptionError, StateError
from penstock.data.source import Source
from penstock.loader.dataloader import runtime_of


class Numbers(Dataset[int]):
    """Its index is the sample."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Every(IterableDataset[int]):
    """Shares out its numbers over workers, and keeps no state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        yield from range(first, self.count, step)


class Counting(Every):
    """Shares out its numbers over workers, and keeps a state."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.done = 0

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        for number in range(first + self.done * step, self.count, step):
            self.done += 1
            yield number
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def numbers(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.tolist()]


def cut(loader: DataLoader[Any], batches: int) -> tuple[list[int], dict[str, Any], list[int]]:
    """Return what came first, the state after it, and what came then."""
    iterator = iter(loader)
    first = numbers(next(iterator) for _ in range(batches))
    state = loader.state_dict()
    return first, pickle.loads(pickle.dumps(state)), numbers(iterator)


ORDERS = {
    "in turn": lambda data, seed: {},
    "shuffled": lambda data, seed: {"shuffle": True},
    "generator": lambda data, seed: {"shuffle": True, "generator": torch.Generator().manual_seed(seed)},
    "seed": lambda data, seed: {"shuffle": True, "seed": seed},
    "weighted": lambda data, seed: {"sampler": WeightedRandomSampler(torch.ones(len(data)).tolist(), len(data), False)},
    "of ranks": lambda data, seed: {"sampler": DistributedSampler(data, 3, 1, seed=seed)},
    "list": lambda data, seed: {"sampler": [*range(len(data))][::-1]},
}
WAYS = [(0, "process"), (1, "process"), (2, "process"), (3, "process"), (2, "thread")]


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    count=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    drop_last=st.booleans(),
    kind=st.sampled_from([*ORDERS]),
    saved=st.sampled_from(WAYS),
    resumed=st.sampled_from(WAYS),
    device=st.sampled_from([None, "sim"]),
    data=st.data(),
)
def test_what_had_not_been_handed_out_comes_in_the_same_order(
    count: int,
    batch_size: int,
    drop_last: bool,
    kind: str,
    saved: tuple[int, str],
    resumed: tuple[int, str],
    device: str | None,
    data: st.DataObject,
) -> None:
    dataset = Numbers(count)

    def loader(way: tuple[int, str], seed: int) -> DataLoader[Any]:
        torch.manual_seed(seed)
        order = ORDERS[kind](dataset, 5)
        how = {"batch_size": batch_size, "drop_last": drop_last, "device": device, **order}
        return DataLoader(dataset, num_workers=way[0], worker_type=way[1], **how)  # type: ignore[arg-type]

    one = loader(saved, 1)
    first, state, rest = cut(one, data.draw(st.integers(0, len(one))))
    following = numbers(one) if kind in ("generator", "seed") else None
    other = loader(resumed, 2)
    other.load_state_dict(state)
    if first and rest and not state["finished"]:  # after the last batch comes the next epoch
        assert numbers(other) == rest
        if following is not None:  # the next epoch is what it would have been, too
            assert numbers(other) == following


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    count=st.integers(1, 80),
    batch_size=st.integers(1, 5),
    saved=st.integers(2, 4),
    resumed=st.sampled_from(WAYS),
    data=st.data(),
)
def test_out_of_order_nothing_is_lost_and_nothing_comes_twice(
    count: int, batch_size: int, saved: int, resumed: tuple[int, str], data: st.DataObject
) -> None:
    dataset = Numbers(count)
    one = DataLoader(dataset, batch_size, shuffle=True, num_workers=saved, in_order=False)
    first, state, left = cut(one, data.draw(st.integers(1, len(one))))
    assume(left)  # after the last batch comes the next epoch
    other = DataLoader(
        dataset,
        batch_size,
        shuffle=True,
        num_workers=resumed[0],
        worker_type=resumed[1],
        in_order=False,  # type: ignore[arg-type]
    )
    other.load_state_dict(state)
    again, late, rest = cut(other, data.draw(st.integers(0, -(-(count - len(first)) // batch_size))))
    assert sorted(first + again + rest) == list(range(count))
    third = DataLoader(dataset, batch_size, shuffle=True, in_order=False)
    third.load_state_dict(late)
    if not late["finished"] and rest:
        assert sorted(first + again + numbers(third)) == list(range(count))


class Gated(Counting):
    """The first worker waits in its third sample until the second has made all of its own."""

    others_are_made: Any = None

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        for made, number in enumerate(super().__iter__()):
            if self.others_are_made is not None and info is not None and info.id == 0 and made == 2:
                self.others_are_made.wait()
            yield number
        if self.others_are_made is not None and info is not None and info.id == 1:
            self.others_are_made.set()


@pytest.mark.parametrize("every", [1, 3])
def test_a_shard_that_has_ended_still_has_the_batches_that_wait_to_be_handed_out(every: int) -> None:
    dataset = Gated(24)
    dataset.others_are_made = torch.multiprocessing.Event()
    loader = DataLoader(dataset, 2, num_workers=2, in_order=False, prefetch_factor=8, snapshot_every_n_steps=every)
    first: list[int] = []
    for batch in loader:
        first += batch.tolist()
        other = DataLoader(Gated(24), 2, in_order=False)
        other.load_state_dict(loader.state_dict())
        assert sorted(first + numbers(other) if len(first) < 24 else first) == list(range(24))


@settings(max_examples=examples(45), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    count=st.integers(0, 60),
    batch_size=st.integers(1, 5),
    kind=st.sampled_from([Every, Counting]),
    saved=st.integers(0, 3),
    resumed=st.integers(0, 2),
    every=st.sampled_from([1, 2, 5]),
    data=st.data(),
)
def test_an_iterable_dataset_goes_on_with_any_number_of_workers(
    count: int, batch_size: int, kind: type[Every], saved: int, resumed: int, every: int, data: st.DataObject
) -> None:
    def loader(workers: int) -> DataLoader[Any]:
        return DataLoader(kind(count), batch_size, num_workers=workers, snapshot_every_n_steps=every)

    whole = [batch.tolist() for batch in loader(saved)]
    first, state, rest = cut(loader(saved), data.draw(st.integers(0, len(whole))))
    other = loader(resumed)
    shards = state["rest"][0]["shards"] or ()
    is_run_through = any(shard.get("since") and shard["state"] is None for shard in shards)
    keeps_no_state = kind is Every and is_run_through
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        other.load_state_dict(state)
    assert ["made again" in str(warning.message) for warning in warned] == [True] * keeps_no_state
    if first and len(first) < count:
        assert numbers(other) == rest
        assert sorted(numbers(other)) == list(range(count))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from([Numbers, Every, Counting]),
    batch_size=st.integers(1, 5),
    saved=st.integers(1, 3),
    resumed=st.integers(1, 3),
    in_order=st.booleans(),
    kills=st.sets(st.integers(0, 12), max_size=2),
    position=st.integers(1, 8),
)
def test_workers_that_are_killed_before_and_after_a_state_lose_nothing(
    kind: type[Any], batch_size: int, saved: int, resumed: int, in_order: bool, kills: set[int], position: int
) -> None:
    """A worker is shot after some of the batches; three in a row that had nothing to do would be an error."""

    def loader(workers: int) -> DataLoader[Any]:
        how = {"shuffle": True, "seed": 2} if kind is Numbers else {}
        return DataLoader(kind(60), batch_size, num_workers=workers, in_order=in_order, max_worker_crashes=9, **how)

    def shot_at(one: DataLoader[Any], begun: int, batches: int) -> list[int]:
        iterator = iter(one)
        seen: list[int] = []
        for number, batch in enumerate(itertools.islice(iterator, batches), begun):
            seen += batch.tolist()
            if number in kills:
                victim = iterator._workers[number % len(iterator._workers)]
                os.kill(victim.pid, signal.SIGKILL)
        return seen

    one, other = loader(saved), loader(resumed)
    first = shot_at(one, 0, position)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*made again")
        other.load_state_dict(one.state_dict())
    rest = shot_at(other, position, 1000)
    assert sorted(first + rest) == list(range(60))
    if in_order:
        assert first + rest == numbers(loader(saved))


# ── over ranks ──────────────────────────────────────────────────────────────────────────────────────────────


def of_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world: int, *args: Any, **kwargs: Any) -> DataLoader[Any]:
    be_rank(monkeypatch, rank, world)
    return DataLoader(*args, distributed=True, **kwargs)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("count", "world", "batch_size"), [(40, 4, 3), (41, 4, 3), (3, 4, 2), (1, 2, 1), (64, 2, 8)])
def test_ranks_get_what_torchs_distributed_sampler_gives_them(
    monkeypatch: pytest.MonkeyPatch, shuffle: bool, count: int, world: int, batch_size: int
) -> None:
    for uneven, drops in (("pad", False), ("drop", True)):
        for rank in range(world):
            sampler = DistributedSampler(Numbers(count), world, rank, shuffle, seed=3, drop_last=drops)
            theirs = torch.utils.data.DataLoader(Numbers(count), batch_size, sampler=sampler)
            how = {"shuffle": shuffle, "seed": 3, "uneven": uneven}
            ours = of_rank(monkeypatch, rank, world, Numbers(count), batch_size, **how)
            for epoch in range(2):
                sampler.set_epoch(epoch)
                assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in theirs]
            assert len(ours) == len(theirs)


def test_joined_ranks_have_every_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [numbers(of_rank(monkeypatch, rank, 3, Numbers(20), 4, shuffle=True, uneven="join")) for rank in range(3)]
    assert sorted(itertools.chain(*parts)) == list(range(20))
    assert [len(part) for part in parts] == [7, 7, 6]


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    count=st.integers(1, 90),
    worlds=st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=2, max_size=4),
    global_batch=st.sampled_from([24, 48]),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_any_number_of_ranks_goes_on_in_the_same_global_order(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    worlds: list[int],
    global_batch: int,
    shuffle: bool,
    data: st.DataObject,
) -> None:
    def loaders(world: int) -> list[DataLoader[Any]]:
        how = {"shuffle": shuffle, "seed": 1, "uneven": "join"}
        size = global_batch // world
        return [of_rank(monkeypatch, rank, world, Numbers(count), size, **how) for rank in range(world)]

    warnings.filterwarnings("ignore", "nothing was left of epoch")  # on a rank, while others have some left
    steps = [sorted(batch.tolist()) for batch in loaders(1)[0]]
    seen: list[list[int]] = []
    state: dict[str, Any] | None = None
    for world in worlds:
        ranks = loaders(world)
        if state is not None:
            for loader in ranks:
                loader.load_state_dict(state)
        iterators = [iter(loader) for loader in ranks]
        for _ in range(data.draw(st.integers(1, 3))):
            if len(seen) == len(steps):
                return
            seen.append(sorted(number for one in iterators for number in next(one, torch.empty(0)).tolist()))
            assert seen[-1] == steps[len(seen) - 1]
        state = ranks[0].state_dict()


def test_out_of_order_the_states_of_all_ranks_are_needed_and_say_all(monkeypatch: pytest.MonkeyPatch) -> None:
    how = {"shuffle": True, "num_workers": 2, "in_order": False}
    ranks = [of_rank(monkeypatch, rank, 2, Numbers(101), 3, **how) for rank in range(2)]
    first, states = [], []
    for loader, batches in zip(ranks, (5, 8), strict=True):
        iterator = iter(loader)
        first += numbers(next(iterator) for _ in range(batches))
        states.append(loader.state_dict())
        del iterator
    other = of_rank(monkeypatch, 0, 3, Numbers(101), 4, shuffle=True, uneven="join")
    with pytest.raises(StateError, match="states of all"):
        other.load_state_dict(states[0])
    with pytest.raises(StateError, match="states of all"):
        other.load_state_dict([states[1], states[1]])
    rest = []
    for rank in range(3):
        other = of_rank(monkeypatch, rank, 3, Numbers(101), 4, shuffle=True, uneven="join")
        other.load_state_dict([state for state in states for _ in range(2)])  # two ranks had the same share each
        rest += numbers(other)
    assert sorted(first + rest) == list(range(101))


def test_of_a_list_of_states_a_rank_with_an_order_of_its_own_takes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def loader(rank: int) -> DataLoader[Any]:
        be_rank(monkeypatch, rank, 2)
        return DataLoader(Numbers(20), 3, shuffle=True, generator=torch.Generator().manual_seed(rank))

    states, rests = [], []
    for rank in range(2):
        one = loader(rank)
        iterator = iter(one)
        next(iterator)
        states.append(one.state_dict())
        rests.append(numbers(iterator))
    assert rests[0] != rests[1]
    for rank in range(2):
        other = loader(rank)
        other.load_state_dict(states)
        assert numbers(other) == rests[rank]


# ── samplers of one's own ───────────────────────────────────────────────────────────────────────────────────


class Strides(Sampler[int]):
    """Keeps a state, as torchdata's samplers do."""

    def __init__(self, count: int) -> None:
        self.count, self.position, self.asked = count, 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.position < self.count:
            self.asked += 1
            self.position += 1
            yield (self.position - 1) * 7 % self.count
        self.position = 0

    def __len__(self) -> int:
        return self.count

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_keeps_a_state_is_asked_for_it(every: int, workers: int) -> None:
    one = DataLoader(Numbers(50), 4, sampler=Strides(50), num_workers=workers, snapshot_every_n_steps=every)
    first, state, rest = cut(one, 5)
    sampler = Strides(50)
    other = DataLoader(Numbers(50), 4, sampler=sampler)
    other.load_state_dict(state)
    assert numbers(other) == rest
    assert first + rest == [number * 7 % 50 for number in range(50)]
    assert sampler.asked <= 30 + 4 * (every - 1)


class Turns(Sampler[list[int]]):
    """Counts its batches and its epochs, and is in the next one as soon as it is asked for more than it has."""

    def __init__(self, *, has_length: bool) -> None:
        self.at = self.epoch = 0
        self.has_length = has_length

    def __len__(self) -> int:
        if not self.has_length:
            raise TypeError
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        while self.at < 5:
            self.at += 1
            yield [self.at + 10 * self.epoch, self.at]
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


@pytest.mark.parametrize("has_length", [False, True])
@pytest.mark.parametrize(("workers", "every"), [(0, 1), (1, 1), (1, 4)])
def test_a_batch_sampler_with_a_state_gives_each_batch_once(workers: int, has_length: bool, every: int) -> None:
    def loader() -> DataLoader[Any]:
        sampler = Turns(has_length=has_length)
        return DataLoader(Numbers(100), batch_sampler=sampler, num_workers=workers, snapshot_every_n_steps=every)

    one = loader()
    list(one)
    iterator = iter(one)
    for batches in range(1, 6):
        next(iterator)
        other = loader()
        other.load_state_dict(copy.deepcopy(one.state_dict()))
        left = [number + 10 for number in range(batches + 1, 6)] or [21, 22, 23, 24, 25]
        assert numbers(other)[::2] == left
        assert other.state_dict()["epoch"] == (2 if batches == 5 else 1)
        assert numbers(other)[0] == (31 if batches == 5 else 21)


class Pairs(Sampler[list[int]]):
    """Draws its batches from torch's random state when it is first asked for one."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.count).tolist()
        yield from (order[at : at + 2] for at in range(0, self.count, 2))


class Eager(Pairs):
    """Draws its batches when its iterator is made."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([*super().__iter__()])


@pytest.mark.parametrize("kind", [Pairs, Eager])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_batch_sampler_come_again_from_torchs_random_state(kind: type[Pairs], workers: int) -> None:
    _, state, rest = cut(DataLoader(Numbers(20), batch_sampler=kind(20), num_workers=workers), 3)
    torch.rand(3)
    before = torch.get_rng_state()
    other = DataLoader(Numbers(20), batch_sampler=kind(20), num_workers=2 - workers)
    other.load_state_dict(state)
    assert numbers(other) == rest
    assert torch.equal(torch.get_rng_state(), before)


# ── what a state is ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_state_does_not_grow_with_the_position() -> None:
    loader = DataLoader(Numbers(5000), 2, shuffle=True, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    sizes = [len(pickle.dumps(loader.state_dict()))]
    for _ in range(2000):
        next(iterator)
    sizes.append(len(pickle.dumps(loader.state_dict())))
    assert sizes[1] <= sizes[0] + 8


@pytest.mark.parametrize(("how", "most"), [({}, 2100), ({"seed": 3}, 2100), ({"generator": torch.Generator()}, 13_000)])
def test_a_saved_state_is_as_small_as_the_readme_says(how: dict[str, Any], most: int) -> None:
    loader = DataLoader(Numbers(5000), 2, shuffle=True, num_workers=2, **how)
    next(iter(loader))
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    assert file.tell() <= most


def test_a_state_of_something_else_is_refused() -> None:
    _, state, _ = cut(DataLoader(Numbers(10), 2, shuffle=True), 2)
    with pytest.raises(StateError, match=r"Numbers with 10 samples .*, and this loader has Numbers with 9"):
        DataLoader(Numbers(9), 2, shuffle=True).load_state_dict(state)
    with pytest.raises(StateError, match="by SequentialSampler"):
        DataLoader(Numbers(10), 2).load_state_dict(state)
    with pytest.raises(StateError, match="no state of a penstock"):
        DataLoader(Numbers(10), 2).load_state_dict({"_num_yielded": 3})
    with pytest.raises(StateError, match="version 99"):
        DataLoader(Numbers(10), 2, shuffle=True).load_state_dict({**state, "version": 99})


def test_before_a_loop_and_after_it_a_state_is_of_the_next_epoch() -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Numbers(10), 3, shuffle=True, seed=1, num_workers=2)

    one = loader()
    before = one.state_dict()
    epochs = [numbers(one), numbers(one)]
    after = one.state_dict()
    third = numbers(one)
    for state, expected in ((before, epochs[0]), (after, third)):
        other = loader()
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert numbers(other) == expected


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", [{"seed": 0}, {"seed": 0, "distributed": True}, {}, {"seed": 0, "drop_last": True}])
def test_an_epoch_that_is_set_after_a_state_at_the_end_of_another_begins(how: dict[str, Any], workers: int) -> None:
    def made() -> DataLoader[Any]:
        return DataLoader(Numbers(10), 3, shuffle=True, num_workers=workers, **how)

    torch.manual_seed(1)
    one = made()
    iterator = iter(one)
    for _ in range(len(one)):
        next(iterator)
    state, drawn_from = one.state_dict(), torch.get_rng_state()  # as Hugging Face's Trainer saves after an epoch
    assert list(iterator) == []
    second = numbers(one)
    other = made()
    other.set_epoch(5)  # before the state was loaded, which counts
    other.load_state_dict(state)
    torch.set_rng_state(drawn_from)
    other.set_epoch(1)
    assert numbers(other) == second
    other = made()
    other.load_state_dict(state)
    other.set_epoch(0)
    with pytest.warns(UserWarning, match="nothing was left of epoch 0"):
        assert list(other) == []


def test_an_epoch_that_is_set_after_a_state_in_the_middle_of_another_is_not_begun_silently() -> None:
    first, state, rest = cut(DataLoader(Numbers(10), 3, shuffle=True, seed=0), 1)
    other = DataLoader(Numbers(10), 3, shuffle=True, seed=0)
    other.load_state_dict(state)
    other.set_epoch(1)
    with pytest.warns(
        UserWarning, match=r"in the middle of epoch 0, which this pass continues, although set_epoch\(1\)"
    ):
        assert numbers(other) == rest
    assert sorted(first + rest) == list(range(10))


@pytest.mark.parametrize("passes", [0, 1])
def test_an_epoch_that_is_set_after_a_state_between_two_passes_begins(passes: int) -> None:
    def made() -> DataLoader[Any]:
        return DataLoader(Numbers(10), 3, shuffle=True, seed=0)

    one, other = made(), made()
    for _ in range(passes):
        numbers(one)
    other.load_state_dict(one.state_dict())
    for loader in (one, other):
        loader.set_epoch(4)
    assert numbers(other) == numbers(one)
    assert numbers(other) == numbers(one)


def test_a_batch_that_raised_is_not_handed_out_until_a_later_one_is() -> None:
    class Bad(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise ValueError("three")
            return index

    loader = DataLoader(Bad(8), 2, num_workers=2)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(ValueError, match="three"):
        next(iterator)
    failed = loader.state_dict()
    assert next(iterator).tolist() == [4, 5]
    gone_on = loader.state_dict()
    for state, expected in ((failed, [2, 3, 4, 5, 6, 7]), (gone_on, [6, 7])):
        other = DataLoader(Numbers(8), 2)
        [rest] = state["rest"]
        other.load_state_dict({**state, "rest": ({**rest, "owner": {**rest["owner"], "dataset": "Numbers"}},)})
        assert numbers(other) == expected


def test_skipped_samples_count_as_handed_out() -> None:
    class Odd(Numbers):
        def __getitem__(self, index: int) -> int:
            if index % 4 < 2:
                raise ValueError
            return index

    loader = DataLoader(Odd(16), 2, num_workers=2, errors="skip")
    _, state, rest = cut(loader, 2)
    assert rest == [10, 11, 14, 15]
    other = DataLoader(Odd(16), 2, errors="skip")
    other.load_state_dict(state)
    assert numbers(other) == rest


def test_persistent_workers_go_on_from_a_state() -> None:
    for make in (Numbers, Counting):
        shuffle = {"shuffle": True, "seed": 5} if make is Numbers else {}
        loader = DataLoader(make(30), 4, num_workers=2, persistent_workers=True, **shuffle)
        _, state, rest = cut(loader, 3)
        numbers(loader)
        loader.load_state_dict(state)
        assert numbers(loader) == rest
        assert len(numbers(loader)) == 30


def test_other_arguments_that_make_the_order_are_refused() -> None:
    def random(**how: Any) -> DataLoader[Any]:
        return DataLoader(Numbers(10), 2, **how)

    _, seeded, _ = cut(random(shuffle=True, seed=0), 2)
    with pytest.raises(StateError, match=r"seed=0.*seed=1"):
        random(shuffle=True, seed=1).load_state_dict(seeded)
    _, own, _ = cut(random(shuffle=True, generator=torch.Generator()), 2)
    with pytest.raises(StateError, match=r"generator=True.*generator=False"):
        random(shuffle=True).load_state_dict(own)
    with pytest.raises(StateError, match="a list of the dicts of all ranks"):
        random().load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="seed must be a whole number"):
        random(seed="a")


class Told(IterableDataset[int]):
    """Is told its share by worker_init_fn, as torch's documentation shows."""

    first, step = 0, 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, 40, self.step))


def tell(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    info.dataset.first, info.dataset.step = worker, info.num_workers


@pytest.mark.parametrize("workers", [2, 1, 3, 0])
@pytest.mark.parametrize("batches", [1, 3, 4])
def test_shards_are_set_up_by_the_loaders_worker_init_fn(workers: int, batches: int) -> None:
    _, state, rest = cut(DataLoader(Told(), 4, num_workers=2, worker_init_fn=tell), batches)
    other = DataLoader(Told(), 4, num_workers=workers, worker_init_fn=tell)
    with pytest.warns(UserWarning, match="made again"):
        other.load_state_dict(state)
    assert numbers(other) == rest


def refuse(worker: int) -> None:
    raise ValueError(worker)


def test_a_pass_that_cannot_begin_leaves_the_process_no_worker() -> None:
    _, state, _ = cut(DataLoader(Told(), 4, num_workers=2, worker_init_fn=tell), 2)
    other = DataLoader(Told(), 4, worker_init_fn=refuse)
    with pytest.warns(UserWarning, match="made again"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="0"):
        iter(other)
    assert torch.utils.data.get_worker_info() is None


def test_threads_do_not_go_on_with_shares_that_they_cannot_be_told_of() -> None:
    _, state, _ = cut(DataLoader(Every(40), 4, num_workers=2), 2)
    with pytest.raises(StateError, match="threads have none"):
        DataLoader(Every(40), 4, num_workers=1, worker_type="thread").load_state_dict(state)


def test_what_is_made_again_has_its_own_randomness_and_leaves_the_loops_alone() -> None:
    class Mixed(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            held = list(range(10))
            for number in range(10, 40):
                at = random.randrange(10)
                yield held[at]
                held[at] = number
            yield from held

    for workers in (0, 2):
        _, state, rest = cut(DataLoader(Mixed(), 4, num_workers=workers, seed=7), 3)
        other = DataLoader(Mixed(), 4, num_workers=workers, seed=7, generator=torch.Generator())
        before = torch.get_rng_state(), random.getstate()
        with pytest.warns(UserWarning, match="made again"):
            other.load_state_dict(state)
        assert numbers(other) == rest
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]


def test_a_loader_that_was_iterated_can_be_copied() -> None:
    loader = DataLoader(Numbers(6), 2, sampler=Strides(6))
    iterator = iter(loader)
    next(iterator)
    assert numbers(copy.deepcopy(loader)) == [2, 3, 4, 5]  # its sampler goes on where it is


def test_a_sampler_keeps_no_more_states_than_are_needed() -> None:
    loader = DataLoader(Numbers(4000), 2, sampler=Strides(4000))
    for _ in loader:
        pass
    assert len(runtime_of(loader).order._states) <= 65  # type: ignore[union-attr]


def test_a_pending_batch_is_in_pythons_own_numbers() -> None:
    order = np.random.default_rng(0).permutation(40)
    loader = DataLoader(Numbers(40), 4, sampler=order, num_workers=3, in_order=False)  # type: ignore[arg-type]
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert all(type(index) is int for index in state["rest"][0]["indices"]["pending"])


def test_a_sampler_that_shares_out_by_itself_goes_on_with_each_ranks_own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def loader(rank: int, world: int) -> DataLoader[Any]:
        be_rank(monkeypatch, rank, world)
        return DataLoader(Numbers(20), 2, sampler=range(rank, 20, 2))

    cuts = [cut(loader(rank, 2), 2) for rank in range(2)]
    for rank in range(2):
        other = loader(rank, 2)
        other.load_state_dict([state for _, state, _ in cuts])
        assert numbers(other) == cuts[rank][2]
    with pytest.raises(StateError, match="3 states were given, and there are 2 ranks"):
        loader(0, 2).load_state_dict([cuts[0][1]] * 3)
    with pytest.raises(StateError, match=r"ranks=2.*ranks=1"):
        loader(0, 1).load_state_dict(cuts[0][1])


def test_a_process_outside_of_the_group_is_told() -> None:
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(OptionError, match="a process group that this process is not in"):
        DataLoader(Numbers(4), distributed=outside)


class Turning(Sampler[int]):
    """Counts its epochs, each with an order of its own; its state says nothing else."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng(self.epoch).permutation(20).tolist()
        self.epoch += 1

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


class Held(Numbers):
    """Has its data where torchvision's datasets have them."""

    def __init__(self, first: int) -> None:
        super().__init__(12)
        self.data = torch.arange(first, first + 12)


class Files(Dataset[str]):
    """Lies in a folder, and fills a cache."""

    def __init__(self, folder: str, names: list[str], count: int = 0) -> None:
        self.count = count
        self.files = [f"{folder}/{name}" for name in names]
        self.cache: list[Any] = [None] * len(names)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> str:
        self.cache[index] = 1
        return str(self.files[index])


NAMES = [f"{number}.jpg" for number in range(12)]


@pytest.mark.parametrize(
    ("saved", "other", "said"),
    [
        (lambda: TensorDataset(torch.arange(12)), lambda: TensorDataset(torch.arange(1, 13)), r"dataset\.tensors\.0"),
        (lambda: np.arange(12), lambda: np.arange(1, 13), "dataset"),
        (lambda: Held(0), lambda: Held(1), r"dataset\.data"),
        (lambda: Files("/here", NAMES), lambda: Files("/here", NAMES[::-1]), r"dataset\.files"),
        (lambda: Subset(range(40), range(12)), lambda: Subset(range(40), range(5, 17)), r"dataset\.indices"),
        (
            lambda: ConcatDataset([TensorDataset(torch.zeros(6)), TensorDataset(torch.ones(6))]),
            lambda: ConcatDataset([TensorDataset(torch.ones(6)), TensorDataset(torch.ones(6))]),
            r"dataset\.datasets\.0\.tensors\.0",
        ),
    ],
)
def test_a_dataset_with_other_contents_is_refused_by_name(saved: Any, other: Any, said: str) -> None:
    one = DataLoader(saved(), 4)
    next(iter(one))
    state = one.state_dict()
    with pytest.raises(StateError, match=rf"other contents of {said}; resume with the data"):
        DataLoader(other(), 4).load_state_dict(state)
    state["fingerprint"] = None
    DataLoader(other(), 4).load_state_dict(state)


def test_another_samplers_weights_are_refused() -> None:
    weights = torch.rand(12).tolist()
    one = DataLoader(range(12), 4, sampler=WeightedRandomSampler(weights, 12))  # type: ignore[arg-type]
    other = DataLoader(range(12), 4, sampler=WeightedRandomSampler(weights[::-1], 12))  # type: ignore[arg-type]
    with pytest.raises(StateError, match=r"other contents of sampler\.weights"):
        other.load_state_dict(one.state_dict())


def test_a_folder_that_moved_a_filled_cache_and_another_ranks_part_are_gone_on_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = Files("/here", NAMES, 7)
    list(DataLoader(dataset, 4))
    one = DataLoader(dataset, 4)
    next(iter(one))
    state = one.state_dict()
    other = DataLoader(Files("/there/too", NAMES, 8), 4)
    other.load_state_dict(state)
    assert [name.rpartition("/")[2] for batch in other for name in batch] == NAMES[4:]
    be_rank(monkeypatch, 1, 2)
    DataLoader(Files("/here", NAMES[::-1]), 4).load_state_dict(state)


class Deck(IterableDataset[int]):
    """Shuffles with a generator that goes on from pass to pass, and shares out by position."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.begun = self.generator.get_state()
        self.done = 0

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        if not self.done:
            self.begun = self.generator.get_state()
        self.generator.set_state(self.begun)
        for number in torch.randperm(24, generator=self.generator).tolist()[first::step][self.done :]:
            self.done += 1
            yield number
        self.done, self.begun = 0, self.generator.get_state()

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self.begun, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begun, self.done = state["begun"], state["done"]
        self.generator.set_state(self.begun)


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 5, None])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("how", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_what_a_dataset_remembers_of_earlier_epochs_goes_on(how: dict[str, Any], every: int, steps: int | None) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Deck(), 5, snapshot_every_n_steps=every, **how)

    one = loader()
    list(one)
    iterator = iter(one)
    first = [*itertools.islice(iterator, steps)]
    state = copy.deepcopy(one.state_dict())
    rest = numbers(iterator) if steps is not None else []
    following = rest or numbers(one), numbers(one)  # where nothing is left, the next epoch comes
    for _ in range(2):  # the second goes on with the state of the first before it has handed out anything
        other = loader()
        other.load_state_dict(state)
        state = other.state_dict()
    assert (numbers(other), numbers(other)) == following
    assert steps is None or sorted([*numbers(first), *rest]) == list(range(24))


class Kept(IterableDataset[int]):
    """Forgets its last pass only when it is asked for a sample of the next."""

    at = first = 0

    def __iter__(self) -> Iterator[int]:
        first, self.first = self.first, 0
        for self.at in range(first + 1, 9):
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["at"]


@pytest.mark.parametrize("batches", [None, 3])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_has_given_nothing_yet_begins_its_pass(workers: int, batches: int | None) -> None:
    one, other = (DataLoader(Kept(), 2, num_workers=workers) for _ in range(2))
    numbers(itertools.islice(iter(one), batches))
    iterator = iter(one)
    other.load_state_dict(one.state_dict())
    assert numbers(other) == numbers(iterator) == list(range(1, 9))


@pytest.mark.parametrize("how", [{}, {"num_workers": 1, "worker_type": "thread"}, {"num_workers": 2}])
def test_a_dataset_that_cannot_tell_its_end_ends_well(how: dict[str, Any]) -> None:
    class Closed(Counting):
        def state_dict(self) -> dict[str, int]:
            if not self.done:
                raise ValueError("the file is closed")
            return super().state_dict()

    loader = DataLoader(Closed(20), 4, **how)
    assert sorted(numbers(loader)) == list(range(20))
    loader.state_dict()


def test_a_sampler_that_counts_its_epochs_and_is_told_of_one_obeys() -> None:
    class Turned(Sampler[int]):
        epoch = 0

        def __len__(self) -> int:
            return 20

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            yield from np.random.default_rng(self.epoch).permutation(20).tolist()
            self.epoch += 1

    one, other, told = (DataLoader(Numbers(20), 4, sampler=Turned()) for _ in range(3))
    list(one)
    state = one.state_dict()
    following = numbers(one), numbers(one)
    other.load_state_dict(state)
    assert (numbers(other), numbers(other)) == following
    told.load_state_dict(state)
    told.sampler.set_epoch(2)  # type: ignore[attr-defined]
    assert numbers(told) == following[1]


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_sampler_whose_state_is_only_its_epoch_goes_on_in_its_middle(steps: int) -> None:
    one, other = (DataLoader(Numbers(20), 4, sampler=Turning()) for _ in range(2))
    list(one)
    _, state, rest = cut(one, steps)
    other.load_state_dict(state)
    assert not rest or numbers(other) == rest
    assert numbers(other) == numbers(one)


@pytest.mark.parametrize("kind", [list, np.array, lambda names: [name.encode() for name in names]])
def test_files_are_known_by_the_last_part_of_their_paths(kind: Any) -> None:
    def loader(folder: str, names: list[str]) -> DataLoader[Any]:
        dataset = Files(folder, names)
        dataset.files = kind(dataset.files)
        return DataLoader(dataset, 4)

    state = loader("/scratch/job1", NAMES).state_dict()
    loader("/scratch/job22/data", NAMES).load_state_dict(state)
    with pytest.raises(StateError, match=r"dataset\.files"):
        loader("/scratch/job1", NAMES[::-1]).load_state_dict(state)


def test_looking_at_a_dataset_never_fails_and_never_makes_a_sample() -> None:
    class Raising(list[int]):
        def __getitem__(self, index: Any) -> int:
            raise AssertionError(f"sample {index} was made")

    odd = Numbers(3)
    odd.__dict__.update(
        scale=np.array(0.5),
        zero=torch.tensor(1),
        itself=odd,
        parent=ConcatDataset([odd, odd]),
        listed=Raising([1, 2, 3]),
        sparse=torch.eye(3).to_sparse(),
        meta=torch.empty(3, device="meta"),
    )
    for dataset in (odd, Raising([1, 2, 3]), np.array(5), [object()] * 3):
        DataLoader(dataset, 1).state_dict()  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
def test_after_the_last_batch_the_next_epoch_comes_once_though_the_sampler_is_in_it_already(workers: int) -> None:
    class Pairs(Sampler[list[int]]):
        """Moves on with its last batch."""

        def __init__(self) -> None:
            self.epoch = 0

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[list[int]]:
            order = np.random.default_rng(self.epoch).permutation(8).tolist()
            batches = [order[at : at + 2] for at in range(0, 8, 2)]
            yield from batches[:-1]
            self.epoch += 1
            yield batches[-1]

        def state_dict(self) -> dict[str, int]:
            return {"epoch": self.epoch}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.epoch = state["epoch"]

    one, other = (DataLoader(Numbers(8), batch_sampler=Pairs(), num_workers=workers) for _ in range(2))
    iterator = iter(one)
    for _ in range(4):
        next(iterator)
    other.load_state_dict(one.state_dict())
    assert numbers(iterator) == []
    for _ in range(2):
        assert numbers(other) == numbers(one)


def test_threads_go_on_where_threads_have_stopped() -> None:
    first, state, rest = cut(DataLoader(Counting(20), 4, num_workers=1, worker_type="thread"), 2)
    for how in ({"num_workers": 1, "worker_type": "thread"}, {}, {"num_workers": 1}):
        other = DataLoader(Counting(20), 4, **how)  # type: ignore[arg-type]
        other.load_state_dict(state)
        assert [*first, *numbers(other)] == [*first, *rest]


class _Squares(Source):
    def __len__(self) -> int:
        return 20

    def read(self, index: int) -> int:
        return index * index


@pytest.mark.parametrize("others", [0, 2])
def test_a_source_that_is_read_by_number_resumes_with_any_number_of_workers(others: int) -> None:
    one = DataLoader(_Squares().map(int), 3, shuffle=True, seed=0, num_workers=1, distributed=True)
    batches = iter(one)
    seen = next(batches).tolist()
    other = DataLoader(_Squares().map(int), 2, shuffle=True, seed=0, num_workers=others, distributed=True)
    other.load_state_dict(one.state_dict())
    del batches
    seen += [number for batch in other for number in batch.tolist()]
    assert seen == [number for batch in DataLoader(_Squares(), 3, shuffle=True, seed=0) for number in batch.tolist()]


class Rests(Sampler[int]):
    """A sampler that has no state to tell once it has given all of its indices."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.given: int | None = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        for index in range(self.given or 0, self.count):
            self.given = index + 1
            yield index
        self.given = None

    def state_dict(self) -> dict[str, int] | None:
        return None if self.given is None else {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_tells_no_state_at_its_end_resumes_there_again_and_again(workers: int) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Numbers(10), 4, sampler=Rests(10), num_workers=workers)

    one = loader()
    iterator = iter(one)
    for _ in range(3):
        next(iterator)
    state = one.state_dict()
    for _ in range(2):
        other = loader()
        other.load_state_dict(state)
        iterator = iter(other)
        state = other.state_dict()
        assert numbers(iterator) == list(range(10))


class Drawn(IterableDataset[float]):
    """Draws its samples with NumPy, and has a state of NumPy's values."""

    def __init__(self) -> None:
        self.made = np.int16(0)
        self.random = np.random.RandomState(3)

    def __iter__(self) -> Iterator[float]:
        while self.made < 6:
            self.made += np.int16(1)
            yield self.random.random_sample()

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made, "random": self.random.get_state(), "none": np.zeros((0, 2), np.float32)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert type(state["made"]) is np.int16
        assert (state["none"].dtype, state["none"].shape) == (np.float32, (0, 2))
        self.made = state["made"]
        self.random.set_state(state["random"])


@pytest.mark.parametrize("workers", [0, 1])
def test_numpy_values_of_a_datasets_state_are_read_with_weights_only(workers: int) -> None:
    one = DataLoader(Drawn(), 2, num_workers=workers)
    first, state, rest = cut(one, 1)
    saved = io.BytesIO()
    torch.save(state, saved)
    saved.seek(0)
    other = DataLoader(Drawn(), 2, num_workers=workers)
    other.load_state_dict(torch.load(saved, weights_only=True))
    again = io.BytesIO()
    torch.save(other.state_dict(), again)
    assert numbers(other) == rest
    assert len(first + rest) == 6
    again.seek(0)
    assert str(torch.load(again, weights_only=True)) == str(state)


class Late(IterableDataset[int]):
    """Looks at the state it was given only when it is asked for a sample, and tells its old one until then."""

    def __init__(self) -> None:
        self.first = self.made = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.first, 8):
            self.made = number + 1
            yield number

    def state_dict(self) -> dict[str, int]:
        return {"made": self.made}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["made"]


class LateOfIndices(Numbers):
    """The same, map-style: the sample is how many have been made."""

    first: int | None = None
    made = 0

    def __getitem__(self, index: int) -> int:
        self.made, self.first = self.made + 1 if self.first is None else self.first + 1, None
        return self.made - 1

    def state_dict(self) -> dict[str, int]:
        return {"made": self.made}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["made"]


@pytest.mark.parametrize("make", [Late, lambda: LateOfIndices(8)], ids=["iterable", "map-style"])
def test_a_dataset_is_not_believed_before_its_first_sample_after_a_state(make: Any) -> None:
    one = DataLoader(make(), 2)
    _, state, rest = cut(one, 1)
    other = DataLoader(make(), 2)
    other.load_state_dict(state)
    _, state, _ = cut(other, 0)
    third = DataLoader(make(), 2)
    third.load_state_dict(state)
    assert numbers(third) == rest == [2, 3, 4, 5, 6, 7]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("batches", [0, 2, 3, 4])
def test_a_distributed_checkpoint_resumes_in_a_fresh_loader(tmp_path: Any, batches: int) -> None:
    def loader() -> DataLoader[Any]:
        torch.manual_seed(1)
        return DataLoader(Numbers(12), 4, shuffle=True)

    one = loader()
    iterator = iter(one)
    for _ in range(batches):
        next(iterator, None)
    dcp.save({"loader": one}, checkpoint_id=tmp_path, no_dist=True)
    expected = numbers(iterator) if batches < 4 else numbers(one)
    other = loader()
    torch.manual_seed(2)
    dcp.load({"loader": other}, checkpoint_id=tmp_path, no_dist=True)
    assert numbers(other) == expected or (batches == 3 and not expected)  # the next epoch, drawn by another seed


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_programs_that_move_every_tensor_of_a_checkpoint_leave_a_state_as_it_is(tmp_path: Any) -> None:
    def moved(value: Any) -> Any:
        """Return a checkpoint as Accelerate and Lightning move one."""
        if isinstance(value, dict):
            return {name: moved(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(moved(part) for part in value)
        return value.to("cpu") if isinstance(value, torch.Tensor) or hasattr(value, "to") else value

    one = DataLoader(Numbers(12), 4, shuffle=True)
    next(iter(one))
    state = one.state_dict()
    assert "all_ranks" in state  # torch.distributed.checkpoint is imported
    changes = [moved, lambda given: tree_map_only(torch.Tensor, lambda tensor: tensor.to("cpu"), given)]
    changes.append(StateDictStager().stage)  # what dcp.async_save does first
    for number, change in enumerate(changes):
        changed = change(state)
        assert type(changed["all_ranks"]) is type(state["all_ranks"])
        dcp.save({"loader": changed}, checkpoint_id=tmp_path / str(number), no_dist=True)
        other = DataLoader(Numbers(12), 4, shuffle=True)
        loaded = {"loader": other.state_dict()}
        dcp.load(loaded, checkpoint_id=tmp_path / str(number), no_dist=True)
        other.load_state_dict(loaded["loader"])
        assert len(numbers(other)) == 8


@pytest.mark.parametrize("name", ["rest", "finished", "fingerprint"])
def test_a_truncated_state_is_refused(name: str) -> None:
    one = DataLoader(Numbers(12), 4)
    state = one.state_dict()
    del state[name]
    with pytest.raises(StateError, match=f"this state is not whole: {name} is missing"):
        one.load_state_dict(state)


def test_states_have_the_same_names_at_every_place_and_pass_json_where_they_hold_no_tensors() -> None:
    one = DataLoader(Numbers(12), 4, shuffle=True, seed=3)
    iterator = iter(one)
    states = [DataLoader(Numbers(12), 4).state_dict(), one.state_dict()]
    next(iterator)
    states.append(one.state_dict())
    rest = numbers(iterator)
    states.append(one.state_dict())
    assert len({tuple(sorted(state)) for state in states}) == 1
    other = DataLoader(Numbers(12), 4, shuffle=True, seed=3)
    other.load_state_dict(json.loads(json.dumps(states[2])))
    assert numbers(other) == rest
