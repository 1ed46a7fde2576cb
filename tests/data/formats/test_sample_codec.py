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


def one_field(field: str, value: bytes = b"abcd") -> bytes:
    header = field.encode() if field.startswith("{") else b'{"x":[%s]}' % field.encode()
    return sealed(struct.pack("<I", len(header)) + header + b"\0" * (-(12 + len(header)) % 16) + value)


def test_a_field_by_hand_is_read() -> None:
    assert unpack(one_field('"array","uint8",[4]'))["x"].tolist() == [97, 98, 99, 100]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "too few"),
        (b"\x80\x04K\x01." + bytes(20), "begins with"),
        (b"PSK\x01" + bytes(20), "begins with"),
        (pack(SAMPLE)[:-1], "CRC-32"),
        (one_field('"array","uint8",[5]'), "and has"),
        (one_field('"array","uint8",[9223372036854775808,2]'), "and has"),
        (one_field('"array","uint8",[0,4611686018427387904]'), "and has"),
        (one_field('"array","float64",[0,4611686018427387904]', b""), "cannot have the shape"),
        (one_field('"array","uint8",[null]'), "lists 'x'"),
        (one_field('"array","uint8",[-4]'), "impossible"),
        (one_field('"array","uint8",[4.0]'), "impossible"),
        (one_field('"number","uint8",[4]'), "lists 'x'"),
        (one_field('"bytes","",[]'), "lists 'x'"),
        (one_field('"bytes","uint8",[4]'), "lists 'x'"),
        (one_field('"object","",[4]'), "impossible"),
        (one_field('"array","O",[4]'), "the dtype 'O'"),
        (one_field('"array","i4,f4",[4]'), "the dtype 'i4,f4'"),
        (one_field('"array","longdouble",[4]'), "the dtype 'longdouble'"),
        (one_field('"array",[],[4]'), "the dtype"),
        (one_field('"array","bool",[4]'), "neither 0 nor 1"),
        (one_field('"text","",[4]', b"\xff\xff\xff\xff"), "field 'x' .*utf-8"),
        (one_field('"array","uint8",[4]', b"abcde"), "and has"),
        (one_field("[" * 100_000), "cannot be understood"),
        (one_field("{}", b""), "and has"),
        (sealed(struct.pack("<I", 2**32 - 1)), "does not fit"),
        (one_field(f'"array","uint8",[{",".join("1" * 65)}]'), "impossible"),
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
