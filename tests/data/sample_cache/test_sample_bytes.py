"""A sample comes back as it was, as objects of its own."""

from __future__ import annotations

import datetime
import math
import pickle
from collections import OrderedDict, namedtuple
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
    (torch.ones(1, requires_grad=True), "a"),
    {1: "one", None: 2.5, (1, "a"): [[], {}, ()], "\ud83d\ude00": "\ud83d", "": "/a/b"},
    ([*range(100)], [0.1] * 100, [1 << 70] * 100, [True] * 100, [1, 2.5, "three", None], -0.0, math.inf),
    {"list": ["tensor", "int64"], "dict": [["bytes"]]},
    {"boxes": [{"box": [1.5, 2.0], "id": 7}] * 3},
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
        np.array([(1, 2.5)], [("a", "i4"), ("b", "f8", (1,))]),
        np.array(["2020-01-01"], "M8[D]"),
        np.arange(6, dtype=">i2"),
        np.zeros((0, 3), "f2"),
        np.array(5.0),
        np.float32(2),
        np.datetime64("2020-01-01T00:00:05", "ns"),
        np.str_(""),
    ):
        back = again([array, {"x": array}])
        np.testing.assert_array_equal(back[0], array)
        assert (back[0].dtype, back[0].strides, type(back[0])) == (array.dtype, array.strides, type(array))


def test_pictures_of_pillow_come_back() -> None:
    image = pytest.importorskip("PIL.Image")
    for mode in ("RGB", "L", "1", "F", "I;16", "RGBA", "CMYK", "P"):
        picture = image.effect_noise((9, 7), 20).convert(mode)
        picture.info["dpi"] = (72, 72)
        back = again((picture, 1))[0]
        assert (type(back), back.mode, back.size, back.info) == (image.Image, mode, (9, 7), {"dpi": (72, 72)})
        assert (back.tobytes(), back.getpalette()) == (picture.tobytes(), picture.getpalette())


def test_tensors_can_be_resized_and_keep_alive_nothing_but_themselves() -> None:
    back = again({"large": torch.zeros(1000), "small": torch.zeros(2)})
    assert back["small"].untyped_storage().nbytes() == 8
    back["small"].resize_(5)
    assert again(torch.zeros(2, 2).numpy()).flags.writeable


REFUSED = [
    (lambda: 0, "builtins.function"),
    (Pair(1, 2), r"test_sample_bytes\.Pair"),
    (OrderedDict(), "collections.OrderedDict"),
    ({1, 2}, "builtins.set"),
    (np.array([{}, 1], object), "of the dtype object"),
    (torch.eye(2).to_sparse(), r"torch\.sparse_coo.*to_dense"),
    (torch.ones(1, requires_grad=True) * 2, "detach"),
    (torch.nn.Parameter(torch.ones(1)), "nn.parameter.Parameter"),
    (10**5000, "limit"),
    (datetime.date(2020, 1, 1), "datetime.date"),
]


@pytest.mark.parametrize(("value", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_kept_is_refused_with_its_type(value: Any, reason: str) -> None:
    for sample in (value, [{"x": (value,)}]):
        with pytest.raises(UnpicklableError, match=rf"sample 4 \(\w+\) cannot be cached: .*{reason}.* A cache keeps"):
            encode(sample, 4)


def test_a_circle_of_containers_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(UnpicklableError, match="cannot be cached"):
        encode(circle, 4)


class Runs:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was run",)


@pytest.mark.parametrize("skeleton", [pickle.dumps(Runs()), b'["Runs"]', b'["tensor","load",[1],null,false]', b"[{}]"])
def test_bytes_that_another_has_made_run_no_code(skeleton: bytes) -> None:
    head = np.array([1, len(skeleton), 8], "<i8").tobytes()
    content = np.frombuffer(bytearray(head + skeleton + bytes(200)), np.uint8)
    with pytest.raises((ValueError, KeyError, TypeError)):
        decode(content)
