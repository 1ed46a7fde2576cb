"""A sample comes back as it was, as objects of its own."""

from __future__ import annotations

import datetime
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from nested_equal import assert_same

from penstock.core.errors import UnpicklableError
from penstock.data.sample_cache.sample_bytes import decode, encode

Pair = namedtuple("Pair", "left right")

SAMPLES = [
    torch.arange(6).view(2, 3),
    {"x": torch.rand(3, 4).t(), "label": 3, "name": "ä", "raw": b"\0", "none": None, "flag": True},
    (torch.zeros(()), [torch.ones(2, dtype=torch.bfloat16), torch.empty(0, 3)], 0.5),
    Pair(torch.ones(1, requires_grad=True), datetime.date(2020, 1, 1)),
    [torch.arange(10)[::3], torch.zeros(1).expand(4), torch.tensor([1j]).conj()],
    7,
    None,
    "text",
]


def again(sample: Any) -> Any:
    return decode(np.frombuffer(bytearray(encode(sample, 0)), np.uint8))


@pytest.mark.parametrize("sample", SAMPLES, ids=range(len(SAMPLES)))
def test_a_sample_comes_back_as_it_was(sample: Any) -> None:
    assert_same(again(sample), sample)


def test_arrays_keep_their_dtype_and_order() -> None:
    for array in (
        np.arange(6.0).reshape(2, 3).T,
        np.array(["a", "bc"]),
        np.array([{}, 1], object),
        np.float32(2),
    ):
        back = again([array, {"x": array}])
        np.testing.assert_array_equal(back[0], array)
        assert (back[0].dtype, back[0].strides, type(back[0])) == (array.dtype, array.strides, type(array))


def test_pictures_of_pillow_come_back() -> None:
    image = pytest.importorskip("PIL.Image")
    picture = image.effect_noise((9, 7), 20).convert("RGB")
    assert again((picture, 1))[0].tobytes() == picture.tobytes()


def test_tensors_can_be_resized_and_keep_alive_nothing_but_themselves() -> None:
    back = again({"large": torch.zeros(1000), "small": torch.zeros(2)})
    assert back["small"].untyped_storage().nbytes() == 8
    back["small"].resize_(5)
    assert again(torch.zeros(2, 2).numpy()).flags.writeable


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(UnpicklableError, match=r"sample 4 \(dict\) cannot be cached"):
        encode({"f": lambda: 0}, 4)
