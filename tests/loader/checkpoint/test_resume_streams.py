"""Streams of shards go on from a state of a loader with any number of workers and ranks."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from one_rank import be_rank
from torch.utils.data import IterableDataset

import penstock
from penstock import DataLoader, StateError
from penstock.loader.checkpoint.rank_states import states_for_rank
from penstock.loader.checkpoint.state import packed, unpacked

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("shards")
    number = 0
    for shard, count in enumerate((13, 7, 0, 21, 9)):
        lines = [json.dumps({"x": number + k}) for k in range(count)]
        (folder / f"{shard}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        number += count
    return sorted(map(str, folder.glob("*.jsonl")))


def numbers(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["x"].tolist()]


@settings(
    max_examples=examples(36),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    worlds=st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.integers(0, 2)), min_size=2, max_size=3),
    shuffle=st.sampled_from(["no", "seed", "drawn"]),
    every=st.sampled_from([1, 3]),
    data=st.data(),
)
def test_every_record_comes_once_over_changing_ranks_and_workers(
    monkeypatch: pytest.MonkeyPatch,
    shards: list[str],
    worlds: list[tuple[int, int]],
    shuffle: str,
    every: int,
    data: st.DataObject,
) -> None:
    warnings.filterwarnings("ignore", "nothing was left of epoch")  # on a rank, while others have some left
    seen: list[int] = []
    states: list[dict[str, Any]] = []
    for last, (world, workers) in enumerate(worlds, 1 - len(worlds)):
        taken: list[dict[str, Any]] = []
        for rank in range(world):
            stream = penstock.open(shards)
            if shuffle != "no":
                stream = stream.shuffle(seed=4 if shuffle == "seed" else None, shuffle_block=5, interleave=2)
            be_rank(monkeypatch, rank, world)
            torch.manual_seed(6)
            loader = DataLoader(stream, 2, num_workers=workers, snapshot_every_n_steps=every)
            if states:
                loader.load_state_dict(states)
            iterator = iter(loader)
            batches = 1000 if last == 0 else data.draw(st.integers(1, 6))
            seen += numbers(batch for _, batch in zip(range(batches), iterator, strict=False))
            taken.append(loader.state_dict())
            del iterator
        states = taken
        if len(seen) == 50 or all(state["finished"] for state in states):
            break
    assert sorted(seen) == list(range(50)) or any(state["finished"] for state in states)
    assert len(set(seen)) == len(seen)


def test_a_rank_whose_epoch_has_ended_does_not_go_ahead_of_the_others_when_it_resumes(
    monkeypatch: pytest.MonkeyPatch, shards: list[str]
) -> None:
    def loader(rank: int) -> DataLoader[Any]:
        be_rank(monkeypatch, rank, 2)
        return DataLoader(penstock.open(shards[:1]).shuffle(seed=1), 1)

    rest, states, epoch = [], [], []
    for rank in range(2):
        one = loader(rank)
        iterator = iter(one)
        taken = [*itertools.islice(iterator, 7)]
        assert len(taken) == 7 - rank
        states.append(unpacked(one.state_dict())[0] | {"is_loaded": False})
        rest.append(numbers(iterator))
    assert [state["finished"] for state in states] == [False, True]
    for rank in range(2):  # as torch.distributed.checkpoint has loaded them
        other = loader(rank)
        (own,) = states_for_rank(states, is_iterable=True, share=(rank, 2), is_shared=False)
        other.load_state_dict(packed(own))
        with pytest.warns(UserWarning, match="nothing was left of epoch 0"):
            assert numbers(other) == rest[rank] == []
        epoch += numbers(other)
        assert other.state_dict()["epoch"] == 1
    assert sorted(epoch) == list(range(13))


class Evens(IterableDataset[int]):
    """Keeps no state."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 10, 2))


def test_workers_that_persist_begin_the_epoch_after_one_of_which_nothing_was_left(shards: list[str]) -> None:
    for dataset, whole in ((Evens(), [0, 2, 4, 6, 8]), (penstock.open(shards[1]), list(range(13, 20)))):
        one = DataLoader(dataset, 2)
        iterator = iter(one)
        for _ in range(-(-len(whole) // 2)):
            next(iterator)
        other = DataLoader(dataset, 2, num_workers=1, persistent_workers=True)
        other.load_state_dict(one.state_dict())
        passes = [[batch["x"] if isinstance(batch, dict) else batch for batch in other] for _ in range(3)]
        assert [torch.cat([torch.empty(0), *batches]).tolist() for batches in passes] == [whole] * 3


def test_the_same_consumers_go_on_in_the_same_order(shards: list[str]) -> None:
    def loader() -> DataLoader[Any]:
        torch.manual_seed(3)
        return DataLoader(penstock.open(shards).shuffle(shuffle_block=6), 3, num_workers=2)

    one = loader()
    iterator = iter(one)
    first = numbers(next(iterator) for _ in range(4))
    state = one.state_dict()
    rest = numbers(iterator)
    other = loader()
    other.load_state_dict(state)
    torch.manual_seed(9)
    assert numbers(other) == rest
    assert sorted(first + rest) == list(range(50))


@pytest.mark.parametrize("shuffle", [False, True])
def test_as_many_workers_go_on_with_the_same_batches_whichever_of_them_have_ended(
    shards: list[str], shuffle: bool
) -> None:
    def loader() -> DataLoader[Any]:
        stream = penstock.open(shards)
        return DataLoader(stream.shuffle(seed=2, shuffle_block=6) if shuffle else stream, 3, num_workers=3)

    batches = [batch["x"].tolist() for batch in loader()]
    assert any(len(batch) < 3 for batch in batches[:-2])  # a worker's last one: it ends before the others
    for count in range(1, len(batches), 2):
        one = loader()
        iterator = iter(one)
        assert [next(iterator)["x"].tolist() for _ in range(count)] == batches[:count]
        other = loader()
        other.load_state_dict(one.state_dict())
        del iterator
        assert [batch["x"].tolist() for batch in other] == batches[count:], count


def test_as_many_ranks_go_on_with_the_same_batches_given_the_states_of_all(
    monkeypatch: pytest.MonkeyPatch, shards: list[str]
) -> None:
    def loader(rank: int) -> DataLoader[Any]:
        be_rank(monkeypatch, rank, 2)
        return DataLoader(penstock.open(shards), 2, num_workers=2)

    states, rest = [], []
    for rank in range(2):
        one = loader(rank)
        iterator = iter(one)
        numbers(itertools.islice(iterator, 7))
        states.append(one.state_dict())
        rest.append([batch["x"].tolist() for batch in iterator])
    for rank in range(2):
        other = loader(rank)
        other.load_state_dict(states)
        assert [batch["x"].tolist() for batch in other] == rest[rank]


def test_epochs_of_a_stream_are_counted_on(shards: list[str]) -> None:
    def loader(workers: int) -> DataLoader[Any]:
        return DataLoader(penstock.open(shards).shuffle(seed=1), 5, num_workers=workers)

    one = loader(2)
    numbers(one)
    iterator = iter(one)
    next(iterator)
    middle = one.state_dict()
    numbers(iterator)
    after = one.state_dict()
    third = numbers(one)
    for state in (middle, after):
        other = loader(2)
        other.load_state_dict(state)
        if state is middle:
            numbers(other)
        assert numbers(other) == third


def test_states_of_other_ranks_are_asked_for(monkeypatch: pytest.MonkeyPatch, shards: list[str]) -> None:
    def loader(rank: int, world: int) -> DataLoader[Any]:
        be_rank(monkeypatch, rank, world)
        return DataLoader(penstock.open(shards), 2)

    one = loader(0, 2)
    next(iter(one))
    state = one.state_dict()
    with pytest.raises(StateError, match="this is rank 1; load its own"):
        loader(1, 2).load_state_dict(state)
    with pytest.raises(StateError, match="2 ranks had shares of this stream, and now there are 3"):
        loader(1, 3).load_state_dict(state)


def on_three_ranks(monkeypatch: pytest.MonkeyPatch, shards: list[str], state: dict[str, Any]) -> list[list[int]]:
    """Return what each of three ranks gets after the state of one."""
    rest = []
    for rank in range(3):
        be_rank(monkeypatch, rank, 3)
        other = DataLoader(penstock.open(shards), 2, num_workers=2)
        other.load_state_dict([state])
        rest.append(numbers(other))
    return rest


@pytest.mark.parametrize("every", [1, 9, None])
def test_a_shard_is_shared_out_anew_however_seldom_states_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, shards: list[str], every: int | None
) -> None:
    one = DataLoader(penstock.open(shards), 2, num_workers=1, snapshot_every_n_steps=every)
    iterator = iter(one)
    first = numbers([next(iterator), next(iterator)])
    rest = on_three_ranks(monkeypatch, shards, one.state_dict())
    assert min(map(len, rest)) >= 10
    assert sorted([*first, *rest[0], *rest[1], *rest[2]]) == list(range(50))


def test_a_rank_for_which_nothing_is_left_ends_at_once(monkeypatch: pytest.MonkeyPatch, shards: list[str]) -> None:
    one = DataLoader(penstock.open(shards), 2, num_workers=1)
    iterator = iter(one)
    first = numbers([next(iterator) for _ in range(24)])
    with pytest.warns(UserWarning, match="nothing was left of epoch 0"):
        rest = on_three_ranks(monkeypatch, shards, one.state_dict())
    assert sorted(map(len, rest)) == [0, 1, 1]
    assert sorted([*first, *rest[0], *rest[1], *rest[2]]) == list(range(50))
