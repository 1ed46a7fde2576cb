"""Padded batches: the same in any loader, and written where they travel."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

import penstock
from penstock.core.errors import OptionError
from penstock.loader.padding import PadCollate
from penstock.loader.transport.arena import Arena, ArenaFullError


class Ragged(Dataset[Any]):
    """Sample i has 10 * (i % 7) + 1 tokens, all of them i."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        length = 10 * (index % 7) + 1
        tokens = np.full(length, index, np.uint16)
        return {
            "tokens": tokens,
            "labels": torch.full((2, length), index),
            "image": np.full((30, 30), index, np.float32),
            "name": f"number {index}",
        }


class Bulk(Ragged):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


COLLATE = PadCollate({"tokens": 0, "labels": -100}, multiple_of=8, dtypes={"tokens": torch.int64}, lengths="lengths")


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    assert list(one) == list(other)
    return all(
        torch.equal(value, other[name]) and value.dtype == other[name].dtype
        if isinstance(value, torch.Tensor)
        else value == other[name]
        for name, value in one.items()
    )


@pytest.mark.parametrize("dataset", [Ragged(), Bulk()])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"num_workers": 2, "worker_type": "thread"}, {"num_workers": 2, "device": "cpu"}],
)
def test_batches_are_those_of_torchs_loader(dataset: Any, options: Any) -> None:
    expected = list(TorchDataLoader(dataset, batch_size=12, collate_fn=COLLATE))
    loader = penstock.DataLoader(dataset, batch_size=12, collate_fn=COLLATE, **options)
    for _ in range(2):
        found = list(loader)
        assert len(found) == len(expected) == 5
        assert all(map(same, found, expected))
    in_workers = list(TorchDataLoader(dataset, batch_size=12, collate_fn=COLLATE, num_workers=2))
    assert all(map(same, in_workers, expected))


def test_a_batch_is_what_pad_sequence_makes() -> None:
    samples = [Ragged()[number] for number in range(7)]
    batch = COLLATE(samples)
    tokens = pad_sequence([torch.from_numpy(sample["tokens"]).long() for sample in samples], batch_first=True)
    assert batch["tokens"].shape == (7, 64)
    assert torch.equal(batch["tokens"][:, :61], tokens)
    assert not batch["tokens"][:, 61:].any()
    assert batch["labels"].shape == (7, 2, 64)
    assert (batch["labels"][0, :, 1:] == -100).all()
    assert batch["lengths"].tolist() == [sample["tokens"].shape[0] for sample in samples]
    assert batch["name"] == [f"number {number}" for number in range(7)]


def test_a_batch_lies_in_the_arena() -> None:
    samples = [Ragged()[number] for number in range(30)]
    with pytest.raises(ArenaFullError) as caught:
        COLLATE.collate_into(samples, Arena(np.zeros(4096, np.uint8)))
    arena = Arena(np.zeros(caught.value.needed, np.uint8))
    batch = COLLATE.collate_into(samples, arena)
    for name in ("tokens", "labels", "image"):
        assert arena.offset_of(batch[name].data_ptr(), batch[name].nbytes) is not None
    assert same(batch, COLLATE(samples))
    few = Arena(np.zeros(0, np.uint8))
    COLLATE.collate_into([{"tokens": [1], "labels": [2]}], few)
    assert few.used == 0


def test_slots_are_large_enough_once_they_are_known() -> None:
    loader = penstock.DataLoader(Ragged(), batch_size=25, collate_fn=COLLATE, num_workers=1)
    list(loader)
    learned = loader.statistics().ring
    for _ in range(2):
        list(loader)
    ring = loader.statistics().ring
    assert (ring.oversize, ring.copied_out) == (learned.oversize, 0)


@given(st.lists(st.lists(st.integers(-5, 5), max_size=9), min_size=1, max_size=6), st.integers(1, 5))
def test_lists_are_padded(rows: list[list[int]], multiple_of: int) -> None:
    batch = PadCollate({"x": -1}, multiple_of=multiple_of)([{"x": row} for row in rows])
    longest = max(map(len, rows))
    assert batch["x"].shape[1] % multiple_of == 0
    assert longest <= batch["x"].shape[1] < longest + multiple_of
    for row, found in zip(rows, batch["x"].tolist(), strict=True):
        assert found == row + [-1] * (len(found) - len(row))


@pytest.mark.parametrize(
    ("samples", "pad", "message"),
    [
        ([{"y": 1}], {"x": 0}, "not every sample has"),
        ([{"x": [1]}, {"y": 1}], {"x": 0}, "not every sample has"),
        ([{"x": ["a"]}], {"x": 0}, "not numbers"),
        ([{"x": [[1], [2, 3]]}], {"x": 0}, "cannot be padded"),
        ([{"x": [[1]]}, {"x": [[1], [2]]}], {"x": 0}, "differ elsewhere"),
        ([{"x": 3}], {"x": 0}, "differ elsewhere"),
        ([{"x": np.zeros(2, np.uint8)}], {"x": -100}, "uint8 does not have pad=-100"),
        ([{"x": np.zeros(2, np.uint8)}], {"x": 0.5}, "uint8 does not have pad=0.5"),
        ([{"x": np.zeros(2, np.uint8)}, {"x": np.zeros(2, np.int32)}], {"x": 0}, "is int32 in one sample"),
        ([[1, 2]], {"x": 0}, "dicts of fields"),
    ],
)
def test_a_field_that_cannot_be_padded_is_named(samples: Any, pad: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        PadCollate(pad)(samples)


def test_invalid_options_raise_an_option_error() -> None:
    with pytest.raises(OptionError, match="multiple_of=0"):
        PadCollate({"x": 0}, multiple_of=0)
    with pytest.raises(OptionError, match="must name a field"):
        PadCollate({})
    with pytest.raises(OptionError, match="bfloat16"):
        PadCollate({"x": 0}, dtypes={"x": torch.bfloat16})([{"x": [1]}])
    assert pickle.loads(pickle.dumps(COLLATE))([Ragged()[1]])["tokens"].shape == (1, 16)
