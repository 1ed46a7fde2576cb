"""Batches are cut along the dimensions that were said, and nothing that was not said is guessed wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock import OptionError
from penstock.memory.cutting.split import BatchDims


def test_fields_are_cut_along_their_own_dimensions() -> None:
    batch = {
        "inputs": {"frames": torch.arange(24).view(3, 4, 2), "mask": np.ones((4, 3))},
        "table": torch.zeros(1, 9),
        "pair": (torch.arange(4), ["a", "b", "c", "d"]),
        "scale": torch.tensor(2.0),
        "name": "all",
    }
    dims = BatchDims({"inputs.frames": 1, "table": None, "pair.0": 0})
    assert dims.count(batch) == 4
    first, second = dims.split(batch, 2)
    assert torch.equal(torch.cat([first["inputs"]["frames"], second["inputs"]["frames"]], 1), batch["inputs"]["frames"])  # type: ignore[index]
    assert second["inputs"]["mask"].shape == (2, 3)
    assert first["table"] is batch["table"]
    assert (second["pair"][0].tolist(), second["pair"][1]) == ([2, 3], ["c", "d"])
    assert (first["scale"], first["name"]) == (torch.tensor(2.0), "all")


def test_one_number_is_the_dimension_of_all_tensors() -> None:
    parts = BatchDims(-1).split([torch.zeros(2, 5), torch.zeros(5)], 2)
    assert [one.shape for one in parts[0]] == [(2, 3), (3,)]


@pytest.mark.parametrize(
    ("dims", "batch", "words"),
    [
        ({"x": 0}, {"x": torch.zeros(4), "y": torch.zeros(1, 4)}, r"y, of shape \(1, 4\), does not have the 4 samples"),
        ({"x": 0, "y": 1}, {"x": torch.zeros(4), "y": torch.zeros(2, 3)}, "different numbers of samples"),
        (
            {"z": None},
            {"x": torch.zeros(4)},
            r"names 'z', which is not in the batch; its fields are \['x'\]",
        ),
        (1, torch.zeros(4), "has no dimension 1"),
        ("first", torch.zeros(4), "must be a dimension, or a dict"),
    ],
)
def test_what_cannot_be_cut_so_is_an_error_with_the_remedy(dims: Any, batch: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        BatchDims(dims).split(batch, 2)
