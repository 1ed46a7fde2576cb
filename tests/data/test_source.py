"""What can be put on top of any source by number."""

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
from penstock.core.errors import RecordError, SourceError
from penstock.core.per_process import PerProcess
from penstock.data.source import Source


class Squares(Source):
    """Sample i is {"x": i * i}; samples come in runs of `size`."""

    where = "squares"

    def __init__(self, count: int, size: int = 0, broken: int = -1) -> None:
        self.count, self.size, self.broken = count, size, broken
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> Any:
        self.reads.append(index)
        if index == self.broken:
            raise RecordError("squares", -1, index, "broken")
        return {"x": np.int64(index * index), "y": np.int64(-index)}

    @property
    def chunk_starts(self) -> np.ndarray | None:
        return np.append(np.arange(0, self.count, self.size), self.count) if self.size else None


def xs(source: Any) -> list[int]:
    return [int(sample["x"]) for sample in source]


def test_samples_are_counted_from_both_ends_and_not_beyond() -> None:
    source = Squares(3)
    assert (source[2]["x"], source[-1]["x"], source[-3]["x"]) == (4, 4, 0)
    for index in (3, -4):
        with pytest.raises(IndexError, match="of squares, which has 3"):
            source[index]


def test_an_index_is_a_whole_number_of_any_kind() -> None:
    source = Squares(3)
    assert source[np.int64(2)]["x"] == source[torch.tensor(2)]["x"] == 4  # type: ignore[index]
    for index in (1.5, "1", None):
        with pytest.raises(TypeError):
            source[index]  # type: ignore[index]


def test_maps_filters_and_selections_stack() -> None:
    source = Squares(6).filter(lambda sample: sample["x"] % 2 == 0).map(lambda sample: {"x": sample["x"] + 1})
    assert xs(source) == [1, 5, 17]
    assert xs(source.select([2, 0])) == [17, 1]
    assert xs(Squares(4).filter(lambda sample: sample["y"] < -1, fields=["y"])) == [4, 9]
    with pytest.raises(KeyError):
        Squares(4).filter(lambda sample: sample["x"] > 1, fields=["y"])


def test_what_is_picked_keeps_the_runs_it_came_from() -> None:
    runs = Squares(12, size=4).select([0, 1, 5, 8, 9, 11]).chunk_starts
    assert runs is not None
    assert runs.tolist() == [0, 2, 3, 6]
    assert Squares(12, size=4).select([5, 0]).chunk_starts is None


def test_shuffling_reads_each_run_in_one_worker() -> None:
    loader = penstock.DataLoader(Squares(96, size=8), batch_size=4, shuffle=True)
    drawn = torch.cat([batch["y"] for batch in loader]).neg().tolist()
    assert sorted(drawn) == list(range(96))
    assert drawn != sorted(drawn)
    for at in range(0, 96, 32):  # four runs are mixed at a time
        assert len({index // 8 for index in drawn[at : at + 32]}) == 4


@given(count=st.integers(0, 9), at=st.integers(0, 9))
def test_iterating_goes_on_where_its_state_was_taken(count: int, at: int) -> None:
    one, other = Squares(count), Squares(count)
    drawing = iter(one)
    begun = xs(itertools.islice(drawing, at))
    other.load_state_dict(pickle.loads(pickle.dumps(one.state_dict())))
    rest = xs(drawing)
    assert begun + rest == [number * number for number in range(count)]
    assert xs(other) == (rest if at <= count else begun)
    assert xs(other) == [number * number for number in range(count)]
    with pytest.raises(SourceError, match="no state of squares"):
        other.load_state_dict({"version": 1, "of": count + 1, "position": 0})


@given(count=st.integers(0, 30), size=st.integers(0, 9), at=st.integers(0, 30), shuffle=st.booleans())
def test_a_stream_of_a_source_goes_on_where_its_state_was_taken(count: int, size: int, at: int, shuffle: bool) -> None:
    def stream() -> penstock.Stream:
        made = Squares(count, size=size).stream()
        return made.shuffle(seed=3, shuffle_block=4) if shuffle else made

    one, other = stream(), stream()
    drawing = iter(one)
    begun = xs(itertools.islice(drawing, at))
    other.load_state_dict(pickle.loads(pickle.dumps(one.state_dict())))
    rest = xs(drawing)
    assert xs(other) == rest
    assert sorted(begun + rest) == [number * number for number in range(count)]
    assert len(one) == count


def test_a_stream_of_a_source_leaves_out_what_is_broken() -> None:
    stream = Squares(4, broken=1).stream(errors="skip")
    with pytest.warns(UserWarning, match="left out: squares: record 1: broken"):
        assert xs(stream) == [0, 4, 9]
    assert stream.skipped == 1


def test_workers_share_out_the_stream_of_a_source() -> None:
    loader = penstock.DataLoader(Squares(50, size=8).stream(), batch_size=5, num_workers=3)
    assert sorted(torch.cat([batch["y"] for batch in loader]).neg().tolist()) == list(range(50))


def test_an_empty_source_has_no_schema() -> None:
    with pytest.raises(SourceError, match="has no samples"):
        _ = Squares(0).schema


def test_what_belongs_to_a_process_travels_closed() -> None:
    opened = PerProcess(list, list.clear)
    opened.get().append(1)
    assert pickle.loads(pickle.dumps(opened)).get() == []
    opened.close()
    assert opened.get() == []


def test_what_a_dropped_source_had_opened_is_closed() -> None:
    closed: list[str] = []
    opened = PerProcess(lambda: "handle", closed.append)
    opened.get()
    del opened
    assert closed == ["handle"]
