"""Batches of any make are cut by samples, into views."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock import OptionError
from penstock.memory.cutting.micro_batch import MicroBatchSizes
from penstock.memory.cutting.split import count_samples, part_bounds, split_batch

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: torch.Tensor
    name: str = ""


@given(size=st.integers(1, 200), parts=st.integers(1, 250))
def test_parts_are_even_and_contain_every_sample(size: int, parts: int) -> None:
    cut = split_batch(torch.arange(size), parts)
    assert torch.cat(cut).tolist() == list(range(size))
    sizes = [len(part) for part in cut]
    assert max(sizes) - min(sizes) <= 1
    assert len(cut) == min(parts, size)
    assert list(part_bounds(size, len(cut)))[-1][1] == size


def test_containers_keep_their_type_and_values_that_are_not_samples_go_to_every_part() -> None:
    x = torch.arange(12).view(4, 3)
    batch = {
        "pair": Pair(x, [x, (x,)]),
        "sample": Sample(x, "all"),
        "array": np.arange(4),
        "texts": ["a", "b", "c", "d"],
        "boxes": [torch.zeros(1, 4), torch.zeros(0, 4), torch.zeros(7, 4), torch.zeros(2, 4)],
        "mask": torch.ones(1, 3),
        "scale": torch.tensor(2.0),
        "name": "batch",
        "nothing": None,
        "length": 4,
    }
    first, second = split_batch(batch, 2)
    assert type(first["pair"]) is Pair
    assert first["pair"].y[1][0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second["sample"] == Sample(second["sample"].x, "all")
    assert second["array"].tolist() == [2, 3]
    assert second["texts"] == ["c", "d"]
    assert [len(box) for box in second["boxes"]] == [7, 2]
    assert (first["scale"], first["name"], first["nothing"], first["length"]) == (torch.tensor(2.0), "batch", None, 4)
    assert first["mask"] is batch["mask"]
    assert second["pair"].x.data_ptr() == x[2:].data_ptr()


def test_a_pair_of_tensors_is_not_a_list_of_two_samples() -> None:
    x, y = torch.zeros(2, 3), torch.ones(2)
    first, second = split_batch((x, y), 2)
    assert [one.shape for one in first] == [(1, 3), (1,)]
    assert second[1].tolist() == [1.0]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (["a", "b"], "no tensor whose first dimension"),
        ({"x": torch.zeros(4, 2), "y": torch.zeros(3)}, r"y, of shape \(3,\), does not have the 4 samples"),
        ([torch.zeros(4), torch.zeros(4, 2).to_sparse()], "nested or sparse"),
    ],
)
def test_the_error_of_a_batch_that_cannot_be_cut_has_the_remedy(batch: Any, words: str) -> None:
    with pytest.raises(OptionError, match=f"{words}.*pass split= to cut it"):
        split_batch(batch, 2)


def test_size_is_that_of_the_first_tensor_with_a_dimension() -> None:
    assert count_samples([torch.tensor(1.0), {"x": torch.zeros(5, 2)}]) == 5


@given(capacity=st.integers(1, 70), size=st.integers(1, 64), patience=st.integers(1, 5))
def test_the_search_settles_on_the_fewest_parts_that_fit(capacity: int, size: int, patience: int) -> None:
    """Whatever fits is found within a few steps, and what does not fit is tried ever more rarely."""
    sizes, bucket = MicroBatchSizes(patience=patience), ("any",)
    failures = []
    for _ in range(300):
        count = 0
        while True:
            parts = sizes.count_parts(bucket, size)
            micro_batch = -(-size // parts)
            if micro_batch <= capacity:
                sizes.record_success(bucket, micro_batch)
                break
            sizes.record_failure(bucket, micro_batch)
            count += 1
        failures.append(count)
    fewest = -(-size // capacity)
    assert sum(failures[100:]) <= 12
    found = sizes.count_parts(bucket, size)
    assert (fewest if sizes.is_probe(bucket) else found) == fewest


def test_a_tensor_of_one_row_does_not_set_the_size_if_others_have_more() -> None:
    batch = {"positions": torch.zeros(1, 7), "x": torch.zeros(4, 3)}
    assert count_samples(batch) == 4
    assert [part["positions"].shape[0] for part in split_batch(batch, 2)] == [1, 1]
    assert count_samples(batch["positions"]) == 1


def test_a_named_tuple_with_one_field_per_sample_is_not_cut() -> None:
    parts = split_batch({"x": torch.zeros(2, 3), "pair": Pair("a", 1.0)}, 2)
    assert [part["pair"] for part in parts] == [Pair("a", 1.0)] * 2


def test_packed_sequences_are_not_cut_through_time() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(4, 2)])
    with pytest.raises(OptionError, match="a PackedSequence in a batch cannot be cut; pass split="):
        split_batch(packed, 2)
