"""A sample as bytes: exact, self-describing, and no way to hurt with them."""

from __future__ import annotations

import contextlib
import json
import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_files import assert_same, datasets

from penstock.core.errors import SourceError
from penstock.data.formats.lmdb.sample_codec import MAGIC, pack, unpack
from penstock.data.formats.stored_fields import why_unsupported
from penstock.data.schema import Field, Sample, Schema, plain

SAMPLE = {
    "image": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    "mask": np.array([True, False, True]),
    "empty": np.zeros((0, 3), np.float32),
    "label": np.int64(-3),
    "name": "äöü",
    "jpeg": b"\xff\xd8\x00",
}


@given(datasets())
def test_samples_come_back_as_they_were(made: tuple[Schema, list[Sample]]) -> None:
    schema, samples = made
    assert why_unsupported(schema) == ""
    for sample in samples:
        assert_same({name: plain(value) for name, value in sample.items()}, unpack(pack(sample)))


@pytest.mark.parametrize(
    "value",
    [
        np.array([1 + 2j], np.complex64),
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.arange(12).reshape(3, 4)[::2, ::-1],
        np.frombuffer(b"\x01\x00\xc0\x7f\xff\xff\xff\xff", np.float32),
    ],
)
def test_arrays_of_every_layout_come_back(value: np.ndarray) -> None:
    found = unpack(pack({"x": value}))["x"]
    assert found.dtype == value.dtype.newbyteorder("=")
    assert found.tobytes() == value.astype(found.dtype).tobytes()
    assert found.shape == value.shape


def test_arrays_are_views_of_the_bytes() -> None:
    data = bytearray(pack({"x": np.zeros(3), "y": np.zeros(5)}))
    sample = unpack(data)
    sample["y"][:] = 7.0
    assert data.count(struct.pack("<d", 7.0)) == 5


def test_tensors_and_python_numbers_are_packed_as_arrays_and_scalars() -> None:
    found = unpack(pack({"x": torch.ones(2), "y": 3, "z": True}))
    assert_same(found, {"x": np.ones(2, np.float32), "y": np.int64(3), "z": np.bool_(True)})


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(SourceError, match="'x' is float128"):
        pack({"x": np.zeros(2, np.longdouble)})
    with pytest.raises(SourceError, match="no UTF-8"):
        pack({"x": "\ud800"})
    assert "'x'" in why_unsupported({"x": Field("array", "longdouble", (2,))})


def sealed(body: bytes) -> bytes:
    """Return a packed sample whose checksum is right, whatever it says."""
    return MAGIC + struct.pack("<I", zlib.crc32(body)) + body


def head(kind: Any = "array", dtype: Any = "uint8", shape: Any = (4,), name: str = "x") -> dict[str, Any]:
    return {name: [kind, dtype, shape]}


def packed(header: Any, value: bytes = b"abcd") -> bytes:
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return sealed(struct.pack("<I", len(header)) + header + bytes(-(12 + len(header)) % 16) + value)


def test_a_field_by_hand_is_read() -> None:
    assert unpack(packed(head()))["x"].tolist() == [97, 98, 99, 100]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "too few"),
        (b"\x80\x04K\x01." + bytes(20), "begins with"),
        (pack(SAMPLE)[:-1], "CRC-32"),
        (packed(head(shape=(5,))), "bytes, and has"),
        (packed(head(shape=(2**63, 2))), "bytes, and has"),
        (packed(head(shape=(0, 2**62))), "bytes, and has"),
        (packed(head(shape=(0, 2**70)), b""), "cannot have the shape"),
        (packed(head(shape=(-1,))), "impossible one"),
        (packed(head(shape=(True,))), "impossible one"),
        (packed(head(shape=(None,))), "has no size"),
        (packed(head(shape=4)), "cannot be understood"),
        (packed(head(kind="number")), "is a uint8 of the shape"),
        (packed(head(kind="bytes")), "impossible one"),
        (packed(head(kind="object", dtype="")), "impossible one"),
        (packed(head(kind=[])), "impossible one"),
        (packed(head(dtype="object")), "impossible one"),
        (packed(head(dtype=[])), "impossible one"),
        (packed(head(dtype="bool")), "neither 0 nor 1"),
        (packed(head(kind="text", dtype=""), b"\xff\xff\xff\xff"), "no UTF-8"),
        (packed({"x": ["array", "uint8"]}), "cannot be understood"),
        (packed([]), "cannot be understood"),
        (packed(b"\xff"), "cannot be read"),
        (packed(b"[" * 100_000), "cannot be read"),
        (packed(head(), b"abcde"), "and has"),
        (sealed(struct.pack("<I", 2**32 - 1)), "does not fit"),
        (packed(head(shape=(1,) * 33)), "impossible one"),
    ],
)
def test_what_does_not_hold_together_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        unpack(data)


def test_mutated_bytes_give_nothing_but_errors() -> None:
    rng, good = random.Random(0), pack(SAMPLE)
    for _ in range(3000):
        bad = mutated(good, rng)
        if bad != good:
            with pytest.raises(SourceError):
                unpack(bad)


def test_mutated_bytes_with_a_right_checksum_give_samples_or_errors() -> None:
    rng, good = random.Random(1), pack(SAMPLE)[8:]
    refused = 0
    for _ in range(5000):
        try:
            sample = unpack(sealed(mutated(good, rng)))
        except SourceError:
            refused += 1
        else:
            assert all(isinstance(plain(value), np.ndarray | np.generic | str | bytes) for value in sample.values())
    assert refused > 1000


@given(st.binary(max_size=200))
def test_any_bytes_behind_a_right_checksum_give_samples_or_errors(body: bytes) -> None:
    with contextlib.suppress(SourceError):
        unpack(sealed(body))


def mutated(data: bytes, rng: random.Random) -> bytes:
    bad: Any = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(bad) + 1)
        match rng.randrange(4):
            case 0:
                bad[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del bad[at : at + rng.randint(1, 9)]
            case 2:
                bad[at:at] = rng.randbytes(rng.randint(1, 9))
            case _:
                bad[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
    return bytes(bad)
