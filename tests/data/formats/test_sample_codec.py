"""A sample as bytes: exact, self-describing, and no way to hurt with them."""

from __future__ import annotations

import contextlib
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
from penstock.data.formats.lmdb.sample_codec import MAGIC, pack, unpack, why_unsupported
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
    with pytest.raises(SourceError, match="no valid text"):
        pack({"x": "\ud800"})
    assert "'x'" in why_unsupported({"x": Field("array", "longdouble", (2,))})


def sealed(worker_type: bytes) -> bytes:
    """Return a packed sample whose checksum is right, whatever it says."""
    return MAGIC + struct.pack("<I", zlib.crc32(worker_type)) + worker_type


def head(kind: int = 0, dtype: int = 1, shape: tuple[int, ...] = (4,), name: bytes = b"x", nbytes: int = 4) -> bytes:
    return struct.pack(f"<BBHIQ{len(shape)}Q", kind, dtype, len(shape), len(name), nbytes, *shape) + name


def one_field(header: bytes, value: bytes = b"abcd", count: int = 1) -> bytes:
    start = 16 + len(header)
    return sealed(struct.pack("<II", len(header), count) + header + b"\0" * (-start % 16) + value)


def test_a_field_by_hand_is_read() -> None:
    assert unpack(one_field(head()))["x"].tolist() == [97, 98, 99, 100]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "too few"),
        (b"\x80\x04K\x01." + bytes(20), "begins with"),
        (pack(SAMPLE)[:-1], "CRC-32"),
        (one_field(head(shape=(5,))), "has 4 bytes"),
        (one_field(head(shape=(2**63, 2))), "has 4 bytes"),
        (one_field(head(shape=(0, 2**62)), b"", 1), "has 4 bytes"),
        (one_field(head(shape=(0, 2**62), nbytes=0), b""), "has 0 bytes"),
        (one_field(head(nbytes=2**63, shape=(2**63,))), "bytes"),
        (one_field(head(kind=1)), "number"),
        (one_field(head(kind=3)), "has 4 bytes"),
        (one_field(head(kind=9)), "kind 9"),
        (one_field(head(dtype=99)), "dtype 99"),
        (one_field(head(dtype=0)), "neither 0 nor 1"),
        (one_field(head(name=b"\xff")), "name is no UTF-8"),
        (one_field(head(kind=2, shape=()), b"\xff\xff\xff\xff"), "no UTF-8"),
        (one_field(head() + head(), b"abcd" + bytes(12) + b"abcd", 2), "two fields"),
        (one_field(head(), count=2**32 - 1), "ends before"),
        (one_field(head() + b"more"), "end at byte"),
        (one_field(head(), b"abcde"), "and has"),
        (sealed(struct.pack("<II", 2**32 - 1, 1)), "does not fit"),
        (one_field(struct.pack("<BBHIQ", 0, 1, 33, 0, 0) + bytes(33 * 8)), "33 dimensions"),
        (one_field(struct.pack("<BBHIQ", 0, 1, 1, 2**32 - 1, 0)), "ends before"),
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
def test_any_bytes_behind_a_right_checksum_give_samples_or_errors(worker_type: bytes) -> None:
    with contextlib.suppress(SourceError):
        unpack(sealed(worker_type))


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
