"""Streams: every record once, whoever reads; shuffled, resumed, and broken ones left out."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from one_rank import be_rank
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.data.stream import ReadOrder, Shard, Stream
from penstock.data.stream_order import ShardRange, share_of

pytestmark = pytest.mark.usefixtures("preloaded_python")


class Numbers(Stream):
    """Shard "3" with 5 records holds 3000 ... 3004."""

    where = "numbers"
    broken: frozenset[int] = frozenset()
    ends_at: int | None = None

    def read(self, shard: Shard, first: int, step: int) -> Iterator[Any]:
        for number in range(first, shard.count or 0, step):
            value = int(shard.name) * 1000 + number
            if value == self.ends_at:
                raise RecordError(shard.name, number, number, "the rest is gone")
            yield RecordError(shard.name, number, number, "broken") if value in self.broken else value


def numbers(*counts: int, order: ReadOrder | None = None, errors: Any = "raise") -> Numbers:
    return Numbers([Shard(str(number), count) for number, count in enumerate(counts)], order, errors)


def everything(*counts: int) -> list[int]:
    return [shard * 1000 + number for shard, count in enumerate(counts) for number in range(count)]


COUNTS = st.lists(st.integers(0, 9), min_size=0, max_size=7)
ORDERS = st.builds(
    ReadOrder,
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
    shuffle_block=st.integers(1, 7),
    interleave=st.integers(1, 4),
)


@given(counts=COUNTS, order=ORDERS, ranks=st.integers(1, 4), workers=st.integers(1, 4), epoch=st.integers(0, 3))
def test_ranks_and_workers_divide_all_records_and_read_each_once(
    counts: list[int], order: ReadOrder, ranks: int, workers: int, epoch: int
) -> None:
    stream = numbers(*counts, order=order)
    values = []
    for rank, worker in itertools.product(range(ranks), range(workers)):
        stream.load_state_dict(
            stream.initial_state(epoch=epoch, base_seed=0, rank=rank, ranks=ranks, worker=worker, workers=workers)
        )
        values += stream
    assert sorted(values) == everything(*counts)


@given(counts=COUNTS, order=ORDERS, data=st.data())
def test_a_pass_resumes_where_its_state_was_taken(counts: list[int], order: ReadOrder, data: st.DataObject) -> None:
    stream = numbers(*counts, order=order)
    at = data.draw(st.integers(0, sum(counts)))
    drawing = iter(stream)
    list(itertools.islice(drawing, at))
    state = pickle.loads(pickle.dumps(stream.state_dict()))
    rest = list(drawing)
    other = numbers(*counts, order=order)
    other.load_state_dict(state)
    assert list(other) == rest
    following = list(other)
    assert Counter(following) == Counter(everything(*counts))
    assert following == list(stream)


def test_the_state_does_not_grow_with_the_records_read() -> None:
    stream = numbers(*[1000] * 50, order=ReadOrder(shuffle=True, seed=0))
    drawing = iter(stream)
    sizes = []
    for _ in range(20):
        list(itertools.islice(drawing, 2000))
        sizes.append(len(repr(stream.state_dict())))
    assert max(sizes) < 600


def test_in_order_without_shuffling() -> None:
    assert list(numbers(3, 0, 4)) == everything(3, 0, 4)


def test_epochs_differ_and_seeds_repeat_them() -> None:
    order = ReadOrder(shuffle=True, seed=3)
    stream = numbers(20, 20, 20, order=order)
    first, second = list(stream), list(stream)
    assert first != second
    again = numbers(20, 20, 20, order=order)
    again.set_epoch(1)
    assert list(again) == second


def test_without_a_seed_torchs_random_state_decides() -> None:
    def drawn() -> list[int]:
        torch.manual_seed(1)
        return list(numbers(20, 20).shuffle())

    assert drawn() == drawn()
    assert drawn() != list(numbers(20, 20).shuffle())


@pytest.mark.parametrize("loader", [TorchDataLoader, penstock.DataLoader])
@pytest.mark.parametrize("counts", [(9, 9, 9, 9, 9), (40,)])
def test_workers_divide_the_records(loader: Any, counts: tuple[int, ...]) -> None:
    stream = numbers(*counts).shuffle(shuffle_block=5)
    batches = loader(stream, batch_size=4, num_workers=3)
    epochs = [torch.cat(list(batches)).tolist() for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [everything(*counts)] * 2
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("persistent", [False, True])
def test_penstocks_loader_counts_epochs_of_a_seeded_stream(persistent: bool) -> None:
    stream = numbers(20, 20).shuffle(seed=5)
    loader = penstock.DataLoader(stream, batch_size=4, num_workers=2, persistent_workers=persistent)
    first, second = (torch.cat(list(loader)).tolist() for _ in range(2))
    assert first != second
    alone = penstock.DataLoader(numbers(20, 20).shuffle(seed=5), batch_size=4, num_workers=2)
    assert [torch.cat(list(alone)).tolist() for _ in range(2)] == [first, second]


class Fatal(Numbers):
    """Kills the worker that reads a record, once, in its second pass."""

    fatal = -1
    trace = ""

    def read(self, shard: Shard, first: int, step: int) -> Iterator[Any]:
        for value in super().read(shard, first, step):
            if value == self.fatal and self.epoch == 2 and not os.path.exists(self.trace):
                open(self.trace, "x").close()
                os.kill(os.getpid(), signal.SIGKILL)
            yield value


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_dies_in_a_later_pass_is_replaced_in_that_pass(method: str, tmp_path: Path) -> None:
    def passes(fatal: int) -> list[list[int]]:
        stream = Fatal([Shard("0", 12), Shard("1", 12)], ReadOrder(shuffle=True, seed=2, shuffle_block=3))
        stream.fatal, stream.trace = fatal, str(tmp_path / "killed")
        loader = penstock.DataLoader(
            stream, batch_size=2, num_workers=2, persistent_workers=True, multiprocessing_context=method
        )
        return [torch.cat(list(loader)).tolist() for _ in range(3)]

    assert passes(1007) == passes(-1)
    assert (tmp_path / "killed").exists()


def test_ranks_divide_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for rank in range(3):
        be_rank(monkeypatch, rank, 3)
        stream = pickle.loads(pickle.dumps(numbers(7, 7, order=ReadOrder(shuffle=True, seed=1))))
        share = list(stream)
        assert len(share) == len(stream)
        drawn += share
    assert Counter(drawn) == Counter(everything(7, 7))


def test_a_broken_record_raises_and_the_pass_can_continue() -> None:
    stream = numbers(4)
    stream.broken = frozenset({1})
    drawing = iter(stream)
    assert next(drawing) == 0
    with pytest.raises(RecordError, match="0: record 1 at byte 1: broken"):
        next(drawing)
    assert list(drawing) == [2, 3]


def test_broken_records_are_left_out_and_counted() -> None:
    stream = numbers(4, 4, errors="skip")
    stream.broken, stream.ends_at = frozenset({1}), 1002
    with pytest.warns(UserWarning, match="left out: "):
        assert list(stream) == [0, 2, 3, 1000, 1001]
    assert stream.skipped == 2


class Missing(Numbers):
    def read(self, shard: Shard, first: int, step: int) -> Iterator[Any]:
        if shard.name == "1":
            raise SourceError("there is no file '1'")
        return super().read(shard, first, step)


class Interrupted(Numbers):
    """A Ctrl-C comes while record 1002 is read, once."""

    is_over = False

    def read(self, shard: Shard, first: int, step: int) -> Iterator[Any]:
        for value in super().read(shard, first, step):
            if value == 1002 and not self.is_over:
                self.is_over = True
                raise KeyboardInterrupt
            yield value


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_interrupt_neither_loses_nor_repeats_records(shuffle: bool) -> None:
    stream = Interrupted(numbers(4, 5, 3).shards, ReadOrder(shuffle=shuffle, seed=0, shuffle_block=5, interleave=2))
    drawing, found = iter(stream), []
    with pytest.raises(KeyboardInterrupt):
        found.extend(drawing)
    found.extend(drawing)
    assert sorted(found) == everything(4, 5, 3)


def test_a_shard_that_cannot_be_opened_is_reported_once_and_the_others_are_read() -> None:
    shards = [Shard(str(number), 2) for number in range(3)]
    with pytest.warns(UserWarning, match="the shard cannot be read: there is no file '1'"):
        assert list(Missing(shards, errors="skip")) == [0, 1, 2000, 2001]
    loader = penstock.DataLoader(Missing(shards), batch_size=2, num_workers=1, errors="skip")
    assert torch.cat(list(loader)).tolist() == [0, 1, 2000, 2001]
    with pytest.raises(RecordError, match="1: record 0: the shard cannot be read"):
        list(Missing(shards))


def test_a_loader_counts_broken_records() -> None:
    stream = numbers(8)
    stream.broken = frozenset({3})
    loader = penstock.DataLoader(stream, batch_size=2, num_workers=1, errors="skip")
    assert torch.cat(list(loader)).tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert loader.statistics().skipped == 1


def test_maps_and_filters_apply_in_their_order() -> None:
    stream = numbers(6).map(lambda number: number + 1).filter(lambda number: number % 2 == 0).map(str)
    assert list(stream) == ["2", "4", "6"]
    with pytest.raises(TypeError, match="known only when it has been read"):
        len(stream)
    assert len(numbers(6, 2)) == 8


def test_the_ranges_of_a_shard_with_several_readers_cover_it() -> None:
    shards = [ShardRange(0, 0, 1), ShardRange(1, 0, 1)]
    ranges = [one for consumer in range(5) for one in share_of(shards, consumer, 5)]
    drawn = sorted((one.shard, number) for one in ranges for number in range(one.first, 11, one.step))
    assert drawn == sorted((shard, number) for shard in range(2) for number in range(11))


def test_a_state_of_other_shards_is_refused() -> None:
    with pytest.raises(SourceError, match="no state of numbers"):
        numbers(3).load_state_dict(numbers(3, 3).state_dict())


def test_a_shuffle_block_of_0_and_an_unknown_errors_option_are_refused() -> None:
    with pytest.raises(OptionError, match="shuffle_block=0"):
        numbers(3).shuffle(shuffle_block=0)
    with pytest.raises(OptionError, match="errors="):
        numbers(3, errors="ignore")


def test_a_stream_says_what_has_a_cache(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    with pytest.raises(OptionError, match=r"a\.csv have no numbers, .*index=True, `penstock convert` others"):
        penstock.open(tmp_path / "a.csv").cached("ram")
