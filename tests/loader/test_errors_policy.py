"""Samples that raise: an error, left out, or replaced; and counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from one_rank import be_rank
from sample_sets import Raising
from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

import penstock
from penstock import DataLoader, OptionError, RankError, StateError

BAD = [index for index in range(40) if index % 10 == 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_by_default_the_error_is_the_datasets_own(workers: int) -> None:
    batches = iter(DataLoader(Raising(40), batch_size=4, num_workers=workers))
    with pytest.raises(OSError, match="sample 3 is corrupt"):
        next(batches)
    assert next(batches)[1].tolist() == [4, 5, 6, 7]


class RaisingInBulk(Raising):
    """Makes a whole batch in one call."""

    def __getitems__(self, indices: list[int]) -> list[object]:
        return [self[index] for index in indices]


class RaisingStream(IterableDataset):
    """Cannot read its third sample."""

    def __iter__(self) -> Iterator[int]:
        yield from (0, 1)
        raise OSError("the rest is missing")


@pytest.mark.parametrize(
    ("dataset", "origin"),
    [
        (Raising(40), "sample 3 of the dataset"),
        (Raising(40, (3, 200, 200)), "sample 3 of the dataset"),
        (RaisingInBulk(40), "one of the samples [0, 1, 2, 3] of the dataset"),
        (RaisingStream(), "sample 2 of its worker's stream"),
    ],
)
@pytest.mark.parametrize("options", [{"batch_size": 4}, {"batch_size": None}, {"batch_size": 4, "seed": 1}])
def test_an_error_of_a_sample_names_its_index_in_a_note(dataset: Any, origin: str, options: dict[str, Any]) -> None:
    if options["batch_size"] is None:
        origin = origin.replace("one of the samples [0, 1, 2, 3]", "sample 3")
    with pytest.raises(OSError) as raised:  # noqa: PT011  its text is compared, without the note
        list(DataLoader(dataset, **options))
    assert str(raised.value) in ("sample 3 is corrupt", "the rest is missing")
    assert raised.value.__notes__ == [f"(penstock: raised for {origin})"]


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_an_error_of_a_workers_sample_names_its_index(worker_type: str) -> None:
    loader = DataLoader(Raising(40), batch_size=4, num_workers=1, worker_type=worker_type)
    with pytest.raises(OSError, match=r"(?s)^Caught OSError in DataLoader worker .*raised for sample 3 of the dataset"):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_samples_are_left_out_and_named(workers: int) -> None:
    loader = DataLoader(Raising(40), batch_size=4, num_workers=workers, errors="skip")
    batches = list(loader)
    assert [int(i) for _, labels in batches for i in labels] == [i for i in range(40) if i not in BAD]
    assert all(torch.equal(images[:, 0, 0, 0], labels.float()) for images, labels in batches)
    assert loader.statistics().skipped == 4
    assert sorted(loader.statistics().skipped_indices) == BAD


def replace(error: Exception, index: int) -> object:
    assert "corrupt" in str(error)
    return penstock.SKIP if index == 13 else (torch.full((3, 40, 40), -1.0), -1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_callable_gives_the_replacement(workers: int) -> None:
    loader = DataLoader(Raising(40), batch_size=8, num_workers=workers, errors=replace)
    labels = [int(i) for _, labels in loader for i in labels]
    assert labels.count(-1) == 3
    assert len(labels) == 39
    assert loader.statistics().skipped == 4


def test_a_batch_of_nothing_but_bad_samples_is_left_out() -> None:
    assert len(list(DataLoader(Raising(40), batch_sampler=[[3, 13], [1], [23]], errors="skip", num_workers=2))) == 1


class Hiccups(IterableDataset):
    def __iter__(self):
        return self

    def __init__(self) -> None:
        self.position = -1

    def __next__(self) -> int:
        self.position += 1
        if self.position >= 20:
            raise StopIteration
        if self.position % 5 == 2:
            raise ValueError("bad record")
        return self.position


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_goes_on_after_a_bad_record(workers: int) -> None:
    loader = DataLoader(Hiccups(), batch_size=4, num_workers=workers, errors="skip")
    assert torch.cat(list(loader)).tolist() == [i for i in range(20) if i % 5 != 2]
    assert loader.statistics().skipped_indices == (2, 7, 12, 17)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"errors": "ignore"}, "errors must be"),
        ({"worker_type": "fiber"}, "worker_type must be"),
        ({"dispatch": "random"}, "dispatch must be"),
        ({"max_worker_crashes": 0}, "max_worker_crashes must be at least 1"),
        ({"ring_bytes": 1}, "ring_bytes: 1 is not a size of at least 4096"),
    ],
)
def test_an_argument_that_makes_no_sense_says_what_would(argument, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        DataLoader([1], **argument)


def test_threads_refuse_a_stream_that_they_cannot_share() -> None:
    with pytest.raises(OptionError, match="threads share one dataset"):
        DataLoader(Hiccups(), num_workers=2, worker_type="thread")


def test_statistics_add_up() -> None:
    loader = DataLoader(Raising(43), batch_size=4, num_workers=2, errors="skip")
    for _ in range(2):
        list(loader)
    counted = loader.statistics()
    assert (counted.epochs, counted.batches, counted.samples) == (2, 22, 78)
    assert counted.stages.fetch_s > 0
    assert counted.length == 11
    assert 0 <= counted.stall_fraction <= 1
    assert (counted.ring.filling, counted.ring.ready, counted.ring.held) == (0, 0, 0)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("bad", "before"), [((4, 6), 1), ((16, 18), 4)], ids=["in the middle", "at the end"])
def test_a_rank_does_not_end_with_fewer_batches_than_the_others(
    workers: int, bad: tuple[int, int], before: int
) -> None:
    class Broken(Raising):
        def __getitem__(self, index: int) -> int:
            if index in bad:
                raise OSError
            return index

    sampler = DistributedSampler(Broken(20), 2, 0, shuffle=False)
    loader = DataLoader(Broken(20), 2, sampler=sampler, num_workers=workers, errors="skip")
    batches = iter(loader)
    for _ in range(before):
        assert len(next(batches)) == 2
    with pytest.raises(RankError, match=r"all samples of a batch of rank 0 have failed .* indices [46], [46]|1[68]"):
        next(batches)


def test_ranks_that_may_have_other_batches_need_the_states_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def loader(rank: int) -> DataLoader[Any]:
        be_rank(monkeypatch, rank, 2)
        return DataLoader(Raising(40), 1, errors="skip", distributed=True, uneven="join")

    states, seen = [], []
    for rank in range(2):
        one = loader(rank)
        iterator = iter(one)
        seen += [int(next(iterator)[1]) for _ in range(3)]
        states.append(one.state_dict())
    with pytest.raises(StateError, match="load the states of all"):
        loader(0).load_state_dict(states[0])
    for rank in range(2):
        other = loader(rank)
        other.load_state_dict(states)
        seen += [int(index) for _, index in other]
    assert sorted(seen) == [index for index in range(40) if index not in BAD]
