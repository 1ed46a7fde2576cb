"""HDF5: what others wrote, what we write, each chunk unpacked once, and files that are broken."""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_files import assert_all_same, assert_same, datasets, write_samples

import penstock
from penstock.core.errors import OptionError, RecordError, SourceError, WorkerKilledError
from penstock.data.formats import column_source
from penstock.data.formats.column_source import ColumnSource
from penstock.data.formats.hdf5 import dataset_rows as rows
from penstock.data.formats.hdf5.file import HDF5File
from penstock.data.formats.hdf5.source import open_files
from penstock.data.formats.hdf5.writer import HDF5Writer, why_unsupported
from penstock.data.schema import Field, Sample, Schema, Selection, schema_of
from penstock.data.storage.storage import Storage

pytestmark = pytest.mark.usefixtures("preloaded_python")

RNG = np.random.default_rng(0)
_NAMED = np.dtype([("name", h5py.string_dtype()), ("number", "i4")])


def reading(*paths: Path, fields: Any = None, **options: Any) -> Any:
    return closing(
        open_files(
            [str(path) for path in paths], storage=Storage(), fields=Selection.of(fields), errors="raise", **options
        )
    )


@pytest.fixture
def images(tmp_path: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    """As people write them: 100 images in gzip chunks of 8, labels in one piece."""
    x, y = RNG.integers(0, 256, (100, 6, 5, 3), np.uint8), np.arange(100)
    with h5py.File(tmp_path / "train.h5", "w") as file:
        file.create_dataset("image", data=x, chunks=(8, 6, 5, 3), compression="gzip")
        file["label"] = y
    return tmp_path / "train.h5", x, y


# ── what others wrote ───────────────────────────────────────────────────────────────────────────────────────

PACKED: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunks": {"chunks": (8, 6, 5)},
    "parts of rows": {"chunks": (7, 4, 2)},
    "gzip": {"chunks": (8, 6, 5), "compression": "gzip"},
    "gzip and shuffle": {"chunks": (8, 6, 5), "compression": "gzip", "shuffle": True},
    "gzip of parts": {"chunks": (9, 4, 5), "compression": "gzip", "shuffle": True},
    "shuffle": {"chunks": (8, 6, 5), "shuffle": True},
    "lzf": {"chunks": (8, 6, 5), "compression": "lzf"},
    "checksums": {"chunks": (8, 6, 5), "fletcher32": True},
    "guessed chunks": {"chunks": True, "maxshape": (None, None, None)},
}


@pytest.mark.parametrize("dtype", ["uint8", "<i4", ">i4", "<f2", ">f8", "bool", "complex64", "uint64"])
@pytest.mark.parametrize("packed", PACKED)
def test_rows_are_those_that_h5py_reads(tmp_path: Path, packed: str, dtype: str) -> None:
    data = (RNG.integers(0, 2, (50, 6, 5)) if dtype == "bool" else RNG.integers(0, 99, (50, 6, 5))).astype(dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=data, **PACKED[packed])
    with reading(tmp_path / "a.h5") as source:
        for index in (0, 7, 8, 30, 49, -1):
            expected = data[index].astype(data.dtype.newbyteorder("="))
            assert_same(source[index], {"x": expected})
        assert source.schema == {"x": Field("array", data.dtype.newbyteorder("=").name, (6, 5))}


def test_every_type_of_a_field(tmp_path: Path) -> None:
    jpegs = [RNG.integers(0, 256, size, np.uint8).tobytes() for size in (9000, 0, 3, 5000)]
    texts = ["a cat", "", "größer", "x" * 5000]
    ragged = [np.arange(number, dtype=np.float32) for number in (3, 0, 1, 7)]
    record = np.dtype([("x", "f4"), ("inner", [("flag", "?"), ("pair", "i2", (2,))]), ("tag", "S3")])
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["text"] = texts
        file["fixed"] = np.array([b"a", b"bcd", b"", b"\xc3\xa4"])
        for name, inner, values in (("jpeg", np.uint8, jpegs), ("ragged", np.float32, ragged)):
            made = file.create_dataset(name, (4,), h5py.vlen_dtype(inner))
            for number, value in enumerate(values):
                made[number] = np.frombuffer(value, inner)
        file["class"] = np.array([0, 2, 1, 0], h5py.enum_dtype({"cat": 0, "dog": 1, "owl": 2}, "u1"))
        file["opaque"] = np.array([b"ab\0", b"\0cd", b"efg", b"\0\0\0"], "V3")
        file["record"] = np.array([(number, (number % 2, (number, 9)), b"t%d" % number) for number in range(4)], record)
        file["row"] = np.zeros((4, 1), np.float16)
        file.create_dataset("array", (4,), "(2,)f4")[...] = np.ones((4, 2), "f4")
    with reading(tmp_path / "a.h5") as source:
        for number, sample in enumerate(source):
            assert_same(
                sample,
                {
                    "text": texts[number],
                    "fixed": ["a", "bcd", "", "ä"][number],
                    "jpeg": jpegs[number],
                    "ragged": ragged[number],
                    "class": np.uint8([0, 2, 1, 0][number]),
                    "opaque": [b"ab\0", b"\0cd", b"efg", b"\0\0\0"][number],
                    "record/x": np.float32(number),
                    "record/inner/flag": np.bool_(number % 2),
                    "record/inner/pair": np.array([number, 9], np.int16),
                    "record/tag": f"t{number}",
                    "row": np.zeros(1, np.float16),
                    "array": np.ones(2, np.float32),
                },
            )
        assert source.schema["ragged"] == Field("array", "float32", (None,))


@pytest.mark.parametrize(
    "options", [{"chunks": (3,)}, {"chunks": (3,), "compression": "gzip"}, {"chunks": (2,), "compression": "lzf"}]
)
def test_text_in_chunks(tmp_path: Path, options: dict[str, Any]) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("text", data=[f"größe {number}" for number in range(10)], **options)
        file.create_dataset("unset", (10,), h5py.string_dtype(), **options)
    with reading(tmp_path / "a.h5", external=options.get("compression") == "lzf") as source:
        assert [sample["text"] for sample in source] == [f"größe {number}" for number in range(10)]
        assert {sample["unset"] for sample in source} == {""}


def test_short_texts_of_a_large_heap_collection(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(5000)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["text"] = texts
    with reading(tmp_path / "a.h5") as source:
        assert [source[number]["text"] for number in range(4999, -1, -1)] == texts[::-1]


def test_strings_as_fortran_and_c_write_them(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, padding, raw in (
            ("c", h5py.h5t.STR_NULLTERM, b"ab\0zz"),
            ("fortran", h5py.h5t.STR_SPACEPAD, b"ab   "),
        ):
            kind = h5py.h5t.C_S1.copy()
            kind.set_size(5)
            kind.set_strpad(padding)
            made = h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple((1,)))
            made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array([raw], "S5"), kind)
    with reading(tmp_path / "a.h5") as source:
        assert source[0] == {"c": "ab", "fortran": "ab"}


def test_chunks_that_were_never_written_hold_the_fill_value(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        packed = file.create_dataset("packed", (10, 2), "i4", chunks=(2, 2), compression="gzip", fillvalue=7)
        plain = file.create_dataset("plain", (10, 2), "i4", chunks=(2, 2), fillvalue=8)
        file.create_dataset("never", (10,), "f4", fillvalue=0.5)
        packed[4] = plain[4] = 1
    with reading(tmp_path / "a.h5") as source:
        assert source[0]["packed"].tolist() == [7, 7]
        assert source[0]["plain"].tolist() == [8, 8]
        assert source[4]["plain"].tolist() == [1, 1]
        assert source[9]["never"] == 0.5


def test_chunks_that_filters_left_out(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("x", (8, 4), "i4", chunks=(4, 4), compression="gzip", shuffle=True)
        made[...] = np.arange(32).reshape(8, 4)
        made.id.write_direct_chunk((4, 0), np.arange(100, 116, dtype="i4").tobytes(), filter_mask=3)
    with reading(tmp_path / "a.h5") as source:
        assert source[0]["x"].tolist() == [0, 1, 2, 3]
        assert source[7]["x"].tolist() == [112, 113, 114, 115]


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("userblock", [0, 512])
def test_versions_of_the_format_and_user_blocks(tmp_path: Path, libver: str, userblock: int) -> None:
    x, names = RNG.normal(size=(300, 3)), [f"n{number}" for number in range(300)]
    with h5py.File(tmp_path / "a.h5", "w", libver=libver, userblock_size=userblock) as file:
        file["contiguous"] = x
        file.create_dataset("packed", data=x, chunks=(2, 3), compression="gzip")
        file.create_dataset("growing", data=x, chunks=(7, 2), maxshape=(None, None))
        file["name"] = names
        compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        compact.set_layout(h5py.h5d.COMPACT)
        made = h5py.h5d.create(file.id, b"compact", h5py.h5t.NATIVE_INT64, h5py.h5s.create_simple((300,)), compact)
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(300))
    with reading(tmp_path / "a.h5", external=userblock > 0) as source:
        for number in (0, 150, 299):
            sample = source[number]
            for name in ("contiguous", "packed", "growing"):
                np.testing.assert_array_equal(sample[name], x[number])
            assert (sample["name"], sample["compact"]) == (names[number], number)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A file with three datasets whose values lie in other files: "virtual", "storage" and "link"."""
    layout = h5py.VirtualLayout((6, 2), "i4")
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = np.full((3, 2), number, "i4")
        layout[number * 3 : number * 3 + 3] = h5py.VirtualSource(str(tmp_path / f"{number}.h5"), "x", (3, 2))
    with h5py.File(tmp_path / "linked.h5", "w") as file:
        file["deep/y"], file["deep/name"] = np.arange(6), [f"n{number}" for number in range(6)]
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("virtual", layout)
        (tmp_path / "raw").write_bytes(np.arange(6, dtype="i4").tobytes())
        file.create_dataset("storage", (6,), "i4", external=[(str(tmp_path / "raw"), 0, 24)])
        file["link"] = h5py.ExternalLink(str(tmp_path / "linked.h5"), "deep")
    return tmp_path / "all.h5"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (None, "lie in"),
        (["virtual"], r"'/virtual' lie in '.*0\.h5' \(a virtual dataset\); pass external=True"),
        (["storage"], r"'/storage' lie in '.*raw' \(external storage\); pass external=True"),
        (["link/y"], r"'/deep/y' lie in '.*linked\.h5'; pass external=True"),
    ],
)
def test_values_that_lie_in_other_files_are_refused(elsewhere: Path, fields: Any, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        reading(elsewhere, fields=fields)


def test_values_that_lie_in_other_files_are_read_when_that_is_allowed(elsewhere: Path) -> None:
    with reading(elsewhere, external=True) as source:
        assert source.schema.keys() == {"virtual", "storage", "link/y", "link/name"}
        assert [sample["virtual"].tolist() for sample in source] == [[0, 0]] * 3 + [[1, 1]] * 3
        assert [sample["storage"] for sample in source] == list(range(6))
        assert [(sample["link/y"], sample["link/name"]) for sample in source] == [(n, f"n{n}") for n in range(6)]
    with reading(elsewhere, external=True, group="link") as source:
        assert source[5] == {"y": 5, "name": "n5"}


def test_a_virtual_dataset_or_a_link_whose_file_is_missing_is_refused(elsewhere: Path) -> None:
    (elsewhere.parent / "1.h5").unlink()
    with pytest.raises(
        SourceError, match=r"'/virtual' has values of '.*/1\.h5', which is not there; put it where it was"
    ):
        reading(elsewhere, external=True)
    (elsewhere.parent / "linked.h5").unlink()
    with pytest.raises(SourceError, match=r"'link' is a link to 'deep' of '.*linked\.h5', which cannot be opened"):
        reading(elsewhere, external=True)
    with reading(elsewhere, external=True, fields=["storage"]) as source:
        assert source[5]["storage"] == 5


def test_the_files_of_a_virtual_dataset_are_found_where_hdf5_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data, elsewhere):
        folder.mkdir()
    monkeypatch.chdir(elsewhere)
    with h5py.File(data / "x-0.h5", "w") as file:
        file["x"] = np.arange(3)
    for number, name in enumerate(("x-0.h5", "/gone/x-0.h5", str(data / "x-0.h5"), "../data/x-0.h5")):
        layout = h5py.VirtualLayout((3,), "i8")
        layout[:] = h5py.VirtualSource(name, "x", (3,))
        with h5py.File(data / f"{number}.h5", "w") as file:
            file.create_virtual_dataset("y", layout, fillvalue=-1)
        (elsewhere / f"{number}.h5").symlink_to(data / f"{number}.h5")
        with h5py.File(elsewhere / f"{number}.h5") as file:
            expected = file["y"][:].tolist()
        with reading(elsewhere / f"{number}.h5", external=True) as source:
            assert [sample["y"] for sample in source] == expected == [0, 1, 2], name


@pytest.mark.parametrize(("head", "words"), [(b"CDF\2", "netCDF-3, .*nccopy"), (b"\x0e\x03\x13\1", "HDF4, .*h4toh5")])
def test_formats_that_were_before_hdf5_are_named(tmp_path: Path, head: bytes, words: str) -> None:
    (tmp_path / "a.h5").write_bytes(head + bytes(100))
    with pytest.raises(SourceError, match=rf"a\.h5 is {words}"):
        reading(tmp_path / "a.h5")


# ── which datasets are the fields ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "arrays",
    [
        {"x": np.zeros((100, 3)), "y": np.zeros(99)},
        {"data": np.zeros(500), "indices": np.zeros(500, "i4"), "indptr": np.zeros(21, "i4")},
        {"rgb": np.zeros((3, 40, 30), "u1"), "depth": np.zeros((40, 30), "f4")},
    ],
    ids=["a target that lacks a row", "a sparse matrix", "planes of one picture"],
)
def test_datasets_of_several_lengths_are_refused_with_their_lengths(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, array in arrays.items():
            file[name] = array
    counts = ", ".join(f"'{name}' has {len(arrays[name])}" for name in sorted(arrays))
    with pytest.raises(SourceError, match=rf"differ in their rows: {counts}; choose arrays of one length with fields="):
        reading(tmp_path / "a.h5")
    name = sorted(arrays)[-1]
    with reading(tmp_path / "a.h5", fields=[name]) as source:
        assert len(source) == len(arrays[name])


def test_fields_are_chosen_renamed_and_found_in_groups(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["train/x"], file["train/y"] = np.zeros((4, 2)), np.arange(4)
        file["test/x"], file["test/y"] = np.ones((3, 2)), np.arange(3)
        file["mean"], file["std"] = np.zeros(2), np.ones(2)
        file["record"] = np.zeros(4, [("p", "f4"), ("q", "i4")])
    with pytest.raises(SourceError, match=r"'test/x' has 3, 'test/y' has 3, 'train/x' has 4"):
        reading(tmp_path / "a.h5")
    with reading(tmp_path / "a.h5", group="test") as source:
        assert (len(source), set(source.schema)) == (3, {"x", "y"})
    with reading(tmp_path / "a.h5", fields={"a": "train/y", "b": "record/q"}) as source:
        assert source[2] == {"a": 2, "b": 0}
    for fields, words in (
        (["x"], "has no field 'x'; it has 'mean', 'record'"),
        (["train/x", "test/y"], "'train/x' has 4, 'test/y' has 3"),
        (["record"], "has no field 'record'; it has 'record/p', 'record/q'"),
        (["train"], "has no field 'train'"),
    ):
        with pytest.raises(SourceError, match=words):
            reading(tmp_path / "a.h5", fields=fields)
    with pytest.raises(SourceError, match="no group 'valid'"):
        reading(tmp_path / "a.h5", group="valid")


def test_what_no_field_can_hold_is_left_out_and_named(tmp_path: Path) -> None:
    lists = h5py.vlen_dtype(np.dtype("i4"))
    record = np.dtype([("x", "f4"), ("of", h5py.ref_dtype), ("long", np.longdouble)])
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros((3, 2))
        file["reference"] = np.array([file["x"].ref] * 3, h5py.ref_dtype)
        file["long"] = np.ones(3, np.longdouble)
        file.create_dataset("lists", (3, 2), lists)
        file.create_dataset("record", (3,), record)
        file.create_dataset("larger", (9000, 9), h5py.ref_dtype)
    with pytest.warns(UserWarning, match="left out") as warned, reading(tmp_path / "a.h5") as source:
        assert_same(source[0], {"x": np.zeros(2), "record/x": np.float32(0)})
    said = "".join(str(one.message) for one in warned)
    for words in (
        "'/reference' holds references, which no field can hold",
        "'/long' holds float128, which",
        r"'/lists' holds int32 of variable length of shape (2,) in each sample, which",
        "'/record', part 'of' holds references, which",
        "'/record', part 'long' holds float128, which",
    ):
        assert words in said
    for fields in (["reference"], ["record/long"]):
        with pytest.raises(SourceError, match="which no field can hold; choose other fields with fields="):
            reading(tmp_path / "a.h5", fields=fields)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_dataset("x", (3,), h5py.ref_dtype)
    with pytest.raises(SourceError, match="holds references"):
        reading(tmp_path / "b.h5")


def test_rows_of_text_are_lists(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["names"] = [["a", "ß"], ["c", ""]]
        file["fixed"] = np.array([[[b"a", b"b"]], [[b"c\0d", b""]]])
    with reading(tmp_path / "a.h5") as source:
        assert [sample["names"] for sample in source] == [["a", "ß"], ["c", ""]]
        assert [sample["fixed"] for sample in source] == [[["a", "b"]], [["c\0d", ""]]]
        assert source.schema["fixed"] == Field("object", unit="list<list<string>>")


def test_a_nul_in_text_of_fixed_length_belongs_to_it_as_for_h5py(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.array([b"a\0b", b"c\0", b"\0d", b""], "S4")
        file.create_dataset("packed", data=file["x"][:], compression="gzip")
        expected = [one.decode() for one in file["x"][:]]
    with reading(tmp_path / "a.h5") as source:
        assert [sample["x"] for sample in source] == [sample["packed"] for sample in source] == expected
    assert expected[0] == "a\0b"


@pytest.mark.parametrize(
    "options", [{}, {"chunks": (2,), "compression": "gzip"}, {"chunks": (2,), "compression": "lzf"}]
)
def test_strings_that_are_no_utf8_are_refused_as_text_and_given_as_bytes(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    values = [b"gr\xf6\xdfe", b"\xff\xd8\xff\0\x10JFIF\xff\xd9", b""]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("fixed", data=np.array(values), **options)
        words = [one.replace(b"\0", b"") for one in values]
        file.create_dataset("varying", data=np.array(words, object), dtype=h5py.string_dtype("ascii"), **options)
        record = np.zeros(3, [("name", "S12"), ("x", "f4")])
        record["name"] = values
        file.create_dataset("record", data=record, **options)
        file["label"], file["table"] = np.arange(3), np.array([[one, b"a"] for one in values])
        file.create_dataset("texts", data=[[one, b"a"] for one in words], dtype=h5py.string_dtype("ascii"))
    binary = ["fixed", "varying", "record/name", "table", "texts"]
    for name in binary:
        with (
            reading(tmp_path / "a.h5", fields=[name], external=True) as source,
            pytest.raises(RecordError, match=r"no UTF-8.*binary="),
        ):
            source[0]
    with reading(tmp_path / "a.h5", binary=binary, external=True) as source:
        assert source.schema["fixed"] == source.schema["varying"] == Field("bytes")
        for samples in ([*source], [source[index] for index in range(3)]):
            assert [sample["fixed"] for sample in samples] == values
            assert [sample["record/name"] for sample in samples] == values
            assert [sample["varying"] for sample in samples] == words
            assert [sample["table"] for sample in samples] == [[one, b"a"] for one in values]
            assert [sample["texts"] for sample in samples] == [[one, b"a"] for one in words]
    with reading(tmp_path / "a.h5", binary=["varying"], fields={"v": "varying"}, external=True) as source:
        assert source[0] == {"v": values[0]}


@pytest.mark.parametrize("userblock", [0, 512])
@pytest.mark.parametrize("dtype", ["<i2", ">i2", ">f8", ">c8"])
def test_arrays_of_variable_length_are_read_in_their_byte_order_or_left_out(
    tmp_path: Path, dtype: str, userblock: int
) -> None:
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=userblock) as file:
        file["label"] = np.arange(3)
        dataset = file.create_dataset("x", 3, h5py.vlen_dtype(np.dtype(dtype)))
        for number in range(3):
            dataset[number] = np.arange(number)
    if userblock and dtype[0] == ">":  # which h5py 3.16 reads as if it were of this machine's order
        with pytest.raises(SourceError, match=rf"'/x' holds {dtype} of variable length, of which h5py swaps no bytes"):
            reading(tmp_path / "a.h5", fields=["x"], external=True)
        return
    with reading(tmp_path / "a.h5", external=userblock > 0) as source:
        assert [sample["x"].tolist() for sample in source] == [[], [0], [0, 1]]
        assert source[2]["x"].dtype == np.dtype(dtype).newbyteorder("=")


@pytest.mark.parametrize(
    ("binary", "words"),
    [
        (["x"], r"binary= names 'x', which is float64\[2\], and no string in each sample"),
        (["nam"], r"binary= names \['nam'\], and the fields are \['name', 'x'\]"),
    ],
)
def test_binary_names_fields_of_strings(tmp_path: Path, binary: list[str], words: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["name"] = np.zeros((3, 2)), ["a", "b", "c"]
    with pytest.raises(SourceError, match=words):
        reading(tmp_path / "a.h5", binary=binary)


@pytest.mark.parametrize("options", [{}, {"chunks": (2,)}, {"chunks": (2,), "compression": "gzip"}])
def test_text_that_was_never_written_is_the_fill_value(tmp_path: Path, options: dict[str, Any]) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (7,), h5py.string_dtype(), fillvalue="größe", **options)
        file.create_dataset("fixed", (7,), "S6", fillvalue=b"fixed", **options)
        if options:
            file["x"][3], file["x"][4] = "written", ""
    with reading(tmp_path / "a.h5", external=True) as source:
        assert {sample["fixed"] for sample in source.select_fields(["fixed"])} == {"fixed"}
        if not options:
            assert {sample["x"] for sample in source} == {"größe"}
            return
        assert [sample["x"] for sample in source] == ["größe"] * 3 + ["written", ""] + ["größe"] * 2


def test_classes_that_are_numbered_in_another_way_are_refused(tmp_path: Path) -> None:
    for number, classes in enumerate(({"cat": 0, "dog": 1}, {"cat": 1, "dog": 0})):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["label"] = np.array([0, 1], h5py.enum_dtype(classes, "u1"))
    with pytest.raises(SourceError, match=r"1\.h5 is uint8 \(enum cat=1, dog=0\), and that of .*0\.h5 uint8 \(enum c"):
        reading(tmp_path / "0.h5", tmp_path / "1.h5")


def test_a_dataset_of_another_file_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = np.zeros(3)
            file["other"] = h5py.ExternalLink(str(tmp_path / "a.h5"), "x")
    with h5py.File(tmp_path / "links.h5", "w") as file:
        file["other"] = h5py.ExternalLink(str(tmp_path / "a.h5"), "x")
    for name in ("links", "b"):
        words = rf"{name}\.h5: the values of 'other' lie in '.*a\.h5', to which it links; pass external=True"
        with pytest.raises(SourceError, match=words):
            reading(tmp_path / f"{name}.h5")
    with pytest.raises(SourceError, match="lie in"):
        reading(tmp_path / "b.h5", fields=["other"])
    with pytest.raises(SourceError, match="has no field 'y'; it has 'x'"):
        reading(tmp_path / "b.h5", fields=["y"])
    with reading(tmp_path / "b.h5", fields=["x"]) as source:
        assert set(source[0]) == {"x"}


def test_a_link_by_way_of_another_link_is_not_followed_into_another_file(
    tmp_path: Path,
) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["deep/x"] = np.arange(3)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["y"] = np.arange(3)
        file["hidden/other"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "deep")
        file["in/x"], file["in/y"] = h5py.SoftLink("/group/other/x"), file["y"]
        file["group"] = h5py.SoftLink("hidden")
    with reading(tmp_path / "a.h5", group="in", external=True) as source:
        assert source[2] == {"x": 2, "y": 2}
    (tmp_path / "other.h5").unlink()  # it is not even opened
    with pytest.raises(SourceError, match=r"group '/in': the values of 'x' lie in '.*other\.h5', to which it links"):
        reading(tmp_path / "a.h5", group="in")


def test_a_name_that_links_to_a_dataset_of_the_file_is_a_field(tmp_path: Path) -> None:
    x = np.arange(12.0).reshape(6, 2)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("pool/x", data=x, chunks=(2, 2), compression="gzip")
        file["pool/name"], file["other"] = [f"n{number}" for number in range(6)], np.zeros((9000, 9))
        file["train/y"], file["train/x"] = np.arange(6), h5py.SoftLink("/pool/x")
        file["train/meta"], file["train/chained"] = h5py.SoftLink("/also"), h5py.SoftLink("./meta/name")
        file["also"], file["links/only"] = h5py.SoftLink("pool"), h5py.SoftLink("/train/y")
    with reading(tmp_path / "a.h5", group="train") as source:
        assert source.schema.keys() == {"x", "y", "meta/x", "meta/name", "chained"}
        for number, sample in enumerate(source):
            name = f"n{number}"
            expected = {"x": x[number], "y": np.int64(number), "meta/x": x[number], "meta/name": name, "chained": name}
            assert_same(sample, expected)
    with reading(tmp_path / "a.h5", group="links") as source:
        assert [*source] == [{"only": number} for number in range(6)]


def test_a_link_that_leads_nowhere_is_left_out_and_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["gone"] = np.zeros(3), h5py.SoftLink("/no/such")
        file["inner/one"], file["inner/other"] = h5py.SoftLink("/inner/other"), h5py.SoftLink("one")
        file["part"] = h5py.SoftLink("/x/y")
    with pytest.warns(UserWarning, match="left out") as warned, reading(tmp_path / "a.h5") as source:
        assert set(source[0]) == {"x"}
    said = [str(one.message).partition("a.h5: ")[2] for one in warned]
    assert sorted(said) == [
        "'gone' is a link to '/no/such', where nothing is",
        "'inner/one' is a link to '/inner/other', where nothing is",
        "'inner/other' is a link to 'one', where nothing is",
        "'part' is a link to '/x/y', where nothing is",
    ]
    with pytest.raises(SourceError, match=r"group '/inner': 'one' is a link to '/inner/other', where nothing is"):
        reading(tmp_path / "a.h5", group="inner")


def test_links_that_lead_back_are_not_followed_for_ever(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["back"], file["inner/up"] = np.zeros(3), file["/"], h5py.SoftLink("/")
        file["inner/y"], file["inner/here"] = np.ones(3), h5py.SoftLink("/inner")
    with reading(tmp_path / "a.h5") as source:
        assert source[0] == {"x": 0, "inner/y": 1}


def test_a_group_of_too_many_names_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file
        for _ in range(14):
            group = group.create_group("left")
            group.parent["right"] = group
        file["x"] = np.zeros(3)
    with pytest.raises(SourceError, match="more than 10000 objects; choose"):
        reading(tmp_path / "a.h5")
    with reading(tmp_path / "a.h5", fields=["x"]) as source:
        assert len(source) == 3


def test_several_files_are_one_source(tmp_path: Path) -> None:
    counts = (5, 0, 3)
    for number, count in enumerate(counts):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("x", data=np.full((count, 2 + number), number, "i4"), chunks=(2, 2), maxshape=(None, 9))
    source = penstock.open(tmp_path / "{0..2}.h5")
    assert isinstance(source, ColumnSource)
    with closing(source):
        assert [sample["x"].tolist() for sample in source] == [[0] * 2] * 5 + [[2] * 4] * 3
        assert source.schema == {"x": Field("array", "int32", (None,))}
        assert source.chunk_starts is not None
        assert source.chunk_starts.tolist() == [0, 2, 4, 5, 7, 8]
    with h5py.File(tmp_path / "3.h5", "w") as file:
        file["x"] = np.zeros((3, 2), "?")
    with pytest.raises(SourceError, match=r"field 'x' of .*3.h5 is bool\[2\], and that of .*0.h5 int32\[2\]"):
        reading(tmp_path / "0.h5", tmp_path / "3.h5")


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────


class Counted:
    """Counts chunks that are unpacked, in this process and in workers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inflated = rows.inflate

    def __call__(self, data: Any, most_nbytes: int) -> bytes:
        with self.path.open("a") as file:
            file.write(f"{hash(bytes(data))}\n")
        return self.inflated(data, most_nbytes)

    def counts(self) -> Counter[str]:
        return Counter(self.path.read_text().split())


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    counting = Counted(tmp_path / "counted")
    monkeypatch.setattr(rows, "inflate", counting)
    return counting


@pytest.mark.parametrize(("workers", "worker_type"), [(0, "process"), (2, "process"), (3, "thread")])
def test_a_shuffled_epoch_unpacks_each_chunk_once(
    tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch, workers: int, worker_type: Any
) -> None:
    if worker_type == "process":  # a thread may begin with batches that are meant for others
        monkeypatch.setattr("penstock.data.rows._SMALL_CACHE_NBYTES", 0)
    x = RNG.integers(0, 256, (1000, 30), np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(8, 30), compression="gzip")
        file["y"] = np.arange(1000)
    with reading(tmp_path / "a.h5", chunk_cache_nbytes=(40 if worker_type == "thread" else 8) * 240) as source:
        loader = penstock.DataLoader(source, batch_size=16, shuffle=True, num_workers=workers, worker_type=worker_type)
        batches = list(loader)
    y = torch.cat([batch["y"] for batch in batches])
    assert y.sort().values.tolist() == list(range(1000))
    assert y.tolist() != list(range(1000))
    np.testing.assert_array_equal(torch.cat([batch["x"] for batch in batches]), x[y])
    assert Counter(counted.counts().values()) == {1: 125}


def test_threads_that_want_one_chunk_unpack_it_once(images: Any, counted: Counted) -> None:
    path, x, _ = images
    with reading(path) as source, ThreadPoolExecutor(8) as pool:
        barrier = threading.Barrier(8)

        def read(number: int) -> Any:
            barrier.wait()
            return source[number]["image"]

        for number, image in enumerate(pool.map(read, range(8))):
            np.testing.assert_array_equal(image, x[number])
    assert sum(counted.counts().values()) == 1


def test_the_parts_of_a_compound_share_its_chunks(tmp_path: Path, counted: Counted) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        record = np.zeros(50, [("a", "f4"), ("b", "i4"), ("c", "S3"), ("d", "f8", (2,))])
        record["b"] = np.arange(50)
        file.create_dataset("record", data=record, chunks=(10,), compression="gzip")
    with reading(tmp_path / "a.h5") as source:
        assert [sample["record/b"] for sample in source] == list(range(50))
    assert sum(counted.counts().values()) == 5


def test_fields_that_are_not_asked_for_are_not_unpacked(images: Any, counted: Counted) -> None:
    with reading(images[0]) as source:
        assert len(source.filter(lambda sample: sample["label"] % 2, fields=["label"])) == 50
        assert source.select_fields(["label"])[3] == {"label": 3}
    assert not counted.path.exists()


def test_runs_are_the_chunks_of_what_has_to_be_unpacked(images: Any, tmp_path: Path) -> None:
    with reading(images[0]) as source:
        assert source.chunk_starts.tolist() == [*range(0, 100, 8), 100]
    with reading(images[0], fields=["label"]) as source:
        assert source.chunk_starts is None
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (10, 3), "f4", chunks=(4, 3))
    with reading(tmp_path / "a.h5") as source:
        assert source.chunk_starts is None


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_worker_processes_open_files_of_their_own(images: Any, context: str) -> None:
    path, x, y = images
    with reading(path) as source:
        source[0]
        loader = penstock.DataLoader(source, batch_size=10, num_workers=2, multiprocessing_context=context)
        for batch, start in zip(loader, range(0, 100, 10), strict=True):
            np.testing.assert_array_equal(batch["image"], x[start : start + 10])
            np.testing.assert_array_equal(batch["label"], y[start : start + 10])


@pytest.mark.filterwarnings("ignore:A DataLoader worker .* Its work is done again:RuntimeWarning")
@pytest.mark.parametrize("gathers", [True, False])
def test_a_crash_of_the_library_is_survived_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gathers: bool
) -> None:
    for name in ("a", "b"):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_dataset("x", data=np.arange(12).reshape(6, 2), chunks=(1, 2), compression="lzf")
            if not gathers:
                file["words"] = [["text", "of"]] * 6
    read = HDF5File.rows

    def crash(self: HDF5File, name: str, start: int, stop: int, max_nbytes: int) -> np.ndarray:
        if self.path.endswith("b.h5") and name == "/x" and start <= 2 < stop:
            os.kill(os.getpid(), signal.SIGKILL)  # SIGSEGV would be reported at length
        return read(self, name, start, stop, max_nbytes)

    monkeypatch.setattr(HDF5File, "rows", crash)
    with reading(tmp_path / "a.h5", tmp_path / "b.h5") as source:
        options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork", "max_worker_crashes": 1}
        loader = penstock.DataLoader(source, batch_size=12, collate_fn=list, errors="skip", **options)
        assert [sample["x"][0] for sample in next(iter(loader))] == [*range(0, 12, 2), 0, 2, 6, 8, 10]
        wrapped = source.select(range(12)).map(dict)
        with pytest.raises(WorkerKilledError, match=r"making sample 8 of .*b\.h5, on which"):
            list(penstock.DataLoader(wrapped, batch_size=12, collate_fn=list, **options))


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    for name, options in (
        ("whole", {}),
        ("chunks", {"chunks": (4, 3)}),
        ("gzip", {"chunks": (4, 3), "compression": 1}),
    ):
        path = tmp_path / f"{name}.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.ones((4000, 3)), **options)
        with reading(path) as source:
            assert len(source.__getitems__([3999, 0, 8])) == 3
            os.truncate(path, 2048)
            for read in (lambda source: source[2000], lambda source: source.__getitems__([3999, 2000])):
                with pytest.raises(SourceError, match=rf"{name}\.h5 has 2048 bytes, and had \d+ when it was opened"):
                    read(source)


def test_of_many_files_few_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_source, "_MAX_OPEN", 3)
    for number in range(12):
        with h5py.File(tmp_path / f"{number:02}.h5", "w") as file:
            file["x"] = np.full(4, number)
            file.create_dataset("y", data=np.full(4, number), chunks=(4,), compression="lzf")
    with reading(*sorted(tmp_path.glob("*.h5"))) as source:
        before = len(os.listdir("/proc/self/fd"))
        for number in RNG.permutation(48).tolist():
            assert source[number] == {"x": number // 4, "y": number // 4}
        assert len(os.listdir("/proc/self/fd")) - before <= 6
        assert [sample["x"] for sample in source.__getitems__([*range(0, 48, 4)])] == [*range(12)]


def test_a_source_can_be_pickled_and_closed_and_read_again(images: Any) -> None:
    with reading(images[0]) as source:
        source[3]
        with closing(pickle.loads(pickle.dumps(source))) as other:
            assert_same(other[3], source[3])
        source.close()
        assert source[3]["label"] == 3


@pytest.mark.parametrize(
    "options", [{}, {"chunks": (2, 2)}, {"chunks": (2, 2), "compression": "gzip"}, {"chunks": (2, 1)}]
)
def test_a_sample_may_be_changed(tmp_path: Path, options: dict[str, Any]) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.ones((5, 2)), **options)
    with reading(tmp_path / "a.h5") as source:
        source[0]["x"][...] = 0
        assert source[0]["x"].tolist() == [1, 1]


# ── what we write ───────────────────────────────────────────────────────────────────────────────────────────


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(made=datasets(), compression=st.sampled_from([None, "gzip"]))
def test_what_was_written_comes_back(tmp_path: Path, made: tuple[Schema, list[Sample]], compression: Any) -> None:
    schema, samples = made
    assert why_unsupported(schema) == ""
    with reading(write_samples(tmp_path / "a.h5", samples, schema, compression=compression)) as source:
        assert source.schema == schema
        assert_all_same(samples, source)


def many(count: int) -> list[Sample]:
    return [
        {
            "image": RNG.integers(0, 256, (64, 48, 3), np.uint8),
            "label": np.int64(number),
            "name": f"número {number}" + "\0" * (number == 3),
            "jpeg": RNG.bytes(number * 7 % 5000),
            "boxes": RNG.normal(size=(number % 5, 4)),
        }
        for number in range(count)
    ]


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_blocks_are_appended(tmp_path: Path, compression: Any) -> None:
    samples = many(300)
    schema = schema_of(samples[0]) | {"boxes": Field("array", "float64", (None, 4))}
    with reading(write_samples(tmp_path / "a.h5", samples, schema, compression=compression)) as source:
        for number in RNG.permutation(300):
            assert_same(samples[number], source[int(number)])
        loaded = next(iter(penstock.DataLoader(source.select_fields(["image", "label"]), batch_size=300)))
    assert loaded["label"].tolist() == list(range(300))


def test_h5py_reads_what_we_write(tmp_path: Path) -> None:
    samples = many(200)
    schema = schema_of(samples[0]) | {"boxes": Field("array", "float64", (None, 4))}
    with h5py.File(write_samples(tmp_path / "a.h5", samples, schema, compression="gzip")) as file:
        assert file["image"].chunks == (113, 64, 48, 3)
        for number in (0, 5, 199):
            sample = samples[number]
            np.testing.assert_array_equal(file["image"][number], sample["image"])
            assert file["label"][number] == number
            assert file["name"].asstr()[number] == sample["name"]
            assert bytes(file["jpeg"][number]) == sample["jpeg"]
            start, shape = file["boxes/offsets"][number], file["boxes/shapes"][number]
            flat = file["boxes/values"][start : start + shape.prod()]
            np.testing.assert_array_equal(flat.reshape(shape), sample["boxes"])


def test_nan_bits_survive(tmp_path: Path) -> None:
    bits = np.array([0x7FF8000000000001, 0xFFF8DEADBEEF0000], np.uint64)
    schema = {"x": Field("array", "float64", (2,)), "y": Field("number", "float64")}
    path = write_samples(tmp_path / "a.h5", [{"x": bits.view(np.float64), "y": bits.view(np.float64)[1]}], schema)
    with reading(path) as source:
        assert source[0]["x"].view(np.uint64).tolist() == bits.tolist()
        assert source[0]["y"].view(np.uint64) == bits[1]


@pytest.mark.parametrize("options", [{}, {"chunks": (2, 2)}, {"chunks": (2, 2), "compression": "gzip"}])
@pytest.mark.parametrize(
    ("one", "other", "wide"),
    [("float32", "float64", "float64"), (">i4", "int64", "int64"), ("uint8", "float16", "float16")],
)
def test_files_of_different_dtypes_are_read_in_one_that_holds_both(
    tmp_path: Path, one: str, other: str, wide: str, options: dict[str, Any]
) -> None:
    data = [np.arange(6).reshape(3, 2).astype(one), np.arange(6, 14).reshape(4, 2).astype(other)]
    for number, values in enumerate(data):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("x", data=values, **options)
            file["label"] = values[:, 0]
    with reading(tmp_path / "0.h5", tmp_path / "1.h5") as source:
        assert source.schema == {"x": Field("array", wide, (2,)), "label": Field("number", wide)}
        expected = np.concatenate([values.astype(wide) for values in data])
        for samples in ([*source], source.__getitems__([*range(7)]), [source[index] for index in range(7)]):
            for sample, row in zip(samples, expected, strict=True):
                assert_same(sample, {"x": row, "label": row[0]})


@pytest.mark.parametrize("name", ["units", "scale_factor", "add_offset", "calendar"])
def test_numbers_whose_attributes_give_them_other_meanings_are_not_mixed(tmp_path: Path, name: str) -> None:
    for number, value in enumerate((1, 2, 1)):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = np.arange(3)
            file["x"].attrs[name] = np.array([value])
    with reading(tmp_path / "0.h5", tmp_path / "2.h5") as source:
        assert source.schema["x"].words() == f"int64 ({name}=1)"
        assert [sample["x"] for sample in source] == [0, 1, 2] * 2
    with pytest.raises(SourceError, match=f"{name}=2.*{name}=1"):
        reading(tmp_path / "0.h5", tmp_path / "1.h5")


@pytest.mark.parametrize("true", [np.bytes_("True"), np.array([b"true"])])
@pytest.mark.parametrize("dtype", ["i1", ">i2", "<i4", "i8"])
@pytest.mark.parametrize("options", [{}, {"chunks": (4, 2), "compression": "gzip"}])
def test_integers_that_netcdf_marks_unsigned_are_unsigned(
    tmp_path: Path, true: Any, dtype: str, options: dict[str, Any]
) -> None:
    x = np.arange(-5, 5, dtype=dtype).reshape(5, 2)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=x, **options)
        file["x"].attrs["_Unsigned"], file["x"].attrs["_FillValue"] = true, np.array([-1], dtype)
        file["label"], file["float"] = x[:, 0], np.zeros(5)
        file["label"].attrs["_Unsigned"], file["float"].attrs["_Unsigned"] = np.bytes_("false"), "true"
    bits = 8 * x.itemsize
    expected = x.astype(f"u{x.itemsize}")
    with reading(tmp_path / "a.h5") as source:
        assert source.schema["x"].words() == f"uint{bits}[2] (_FillValue={(1 << bits) - 1}, _Unsigned=true)"
        assert (source.schema["label"].words(), source.schema["float"].words()) == (f"int{bits}", "float64")
        for samples in ([*source], source.__getitems__([*range(5)]), [source[index] for index in range(5)]):
            for sample, row, label in zip(samples, expected, x[:, 0], strict=True):
                assert_same(sample, {"x": row, "label": label, "float": np.float64(0)})


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"_Unsigned": np.bytes_("true")}, {}, r"1\.h5 is int8, and that of .*0\.h5 uint8 \(_Unsigned=true\)"),
        ({"_FillValue": np.int8(-1)}, {"_FillValue": np.int8(0)}, "int8 ._FillValue=0.*int8 ._FillValue=-1"),
        ({}, {"_FillValue": np.int8(0)}, "int8 ._FillValue=0"),
        ({}, {"missing_value": np.int8(0)}, "int8 .missing_value=0"),
        ({"missing_value": np.int8(1)}, {"missing_value": np.int8(0)}, "missing_value=0.*missing_value=1"),
        ({"units": np.bytes_(b"\xb0C")}, {"units": np.bytes_(b"\xb0F")}, r"units=\ufffdF.*units=\ufffdC"),
    ],
)
def test_files_of_other_signs_or_fill_values_are_not_mixed(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any], words: str
) -> None:
    for number, attributes in enumerate((one, other)):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = np.arange(-5, 5, dtype="i1")
            file["x"].attrs.update(attributes)
    with pytest.raises(SourceError, match=words):
        reading(tmp_path / "0.h5", tmp_path / "1.h5")


def test_files_with_and_without_nan_as_the_fill_value_are_alike(tmp_path: Path) -> None:
    for number, attributes in enumerate(({"_FillValue": np.float32("nan"), "missing_value": 1.0}, {})):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = np.zeros(3, "f4")
            file["x"].attrs.update(attributes)
    with reading(tmp_path / "0.h5", tmp_path / "1.h5") as source:
        assert (len(source), source.schema["x"].words()) == (6, "float32")


def test_what_pytables_and_netcdf_keep_beside_their_values_are_no_fields(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["table"] = np.arange(3)
        file["_i_table/index/sorted"] = np.zeros((500, 2))
        file["_i_table"].attrs["CLASS"] = np.bytes_("TINDEX")
        file["sample"] = np.zeros(3, "f4")
        file["sample"].make_scale("This is a netCDF dimension but not a netCDF variable.         3")
    with reading(tmp_path / "a.h5") as source:
        assert [*source] == [{"table": 0}, {"table": 1}, {"table": 2}]


def test_what_is_only_named_like_an_index_of_pytables_is_a_field(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["_i_mage"], file["_i_group/y"] = np.arange(3), np.arange(3)
    with reading(tmp_path / "a.h5") as source:
        assert source[2] == {"_i_mage": 2, "_i_group/y": 2}


def test_ragged_arrays_of_different_dtypes_are_read_in_the_wider_one(tmp_path: Path) -> None:
    for number, dtype in enumerate(("float32", "float64")):
        samples = [{"x": np.arange(size, dtype=dtype) / 3} for size in (0, 2, 1)]
        write_samples(tmp_path / f"{number}.h5", samples, {"x": Field("array", dtype, (None,))}, compression="gzip")
    with reading(tmp_path / "0.h5", tmp_path / "1.h5") as source:
        assert source.chunk_starts.tolist() == [0, 3, 6]
        found = [sample["x"] for sample in source]
    assert [one.dtype.name for one in found] == ["float64"] * 6
    assert found[1].tolist() == (np.arange(2, dtype="float32") / 3).tolist()
    assert found[4].tolist() == (np.arange(2) / 3).tolist()


@pytest.mark.parametrize(("one", "other"), [("int64", "float64"), ("int64", "uint64"), ("bool", "uint8")])
def test_files_of_dtypes_that_none_holds_both_of_are_refused(tmp_path: Path, one: str, other: str) -> None:
    for number, dtype in enumerate((one, other)):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = np.zeros(3, dtype)
    with pytest.raises(SourceError, match=f"1.h5 is {other}, and that of .*0.h5 {one}; .* one type that holds both"):
        penstock.open(tmp_path)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({}, "no fields"),
        ({"a//b": Field("text")}, "cannot be a path"),
        ({"..": Field("text"), ".": Field("text")}, "cannot be a path"),
        ({"\ud800": Field("text")}, "cannot be a path"),
        ({"a": Field("text"), "a/b": Field("text")}, "leaves no place"),
        ({"a": Field("number", "float128")}, "has the type float128"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, schema: Schema, words: str) -> None:
    assert words in why_unsupported(schema)
    with pytest.raises(SourceError, match=words):
        HDF5Writer(str(tmp_path / "a.h5"), schema)


def test_samples_that_do_not_fit_the_schema_are_refused(tmp_path: Path) -> None:
    with closing(HDF5Writer(str(tmp_path / "a.h5"), {"x": Field("array", "float32", (2, None))})) as writer:
        for sample, words in (
            ({"y": 1}, "has the fields"),
            ({"x": np.zeros((2, 2))}, r"is float64\[2, 2\], and has to be float32\[2, \?\]"),
            ({"x": np.zeros((3, 2), np.float32)}, "has to be"),
            ({"x": 1.5}, "has to be"),
        ):
            with pytest.raises(SourceError, match=words):
                writer.write(sample)
    with pytest.raises(OptionError, match="'lz4'"):
        HDF5Writer(str(tmp_path / "a.h5"), {"x": Field("text")}, compression="lz4")  # type: ignore[arg-type]
    with pytest.raises(SourceError, match="cannot be written"):
        HDF5Writer(str(tmp_path / "none" / "a.h5"), {"x": Field("text")})
    with (
        closing(HDF5Writer(str(tmp_path / "b.h5"), {"x": Field("text")})) as writer,
        pytest.raises(SourceError, match="utf-8"),
    ):
        writer.write({"x": "\ud800"})


# ── what is broken ──────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_no_hdf5_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(b"nothing of the kind")
    with pytest.raises(SourceError, match=r"a\.h5 cannot be read as HDF5"):
        reading(tmp_path / "a.h5")


def broken(path: Path, change: Callable[[bytearray], None]) -> Path:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    return path


def test_a_broken_chunk_is_named_and_others_are_read(images: Any) -> None:
    path, x, _ = images
    with h5py.File(path) as file:
        place = file["image"].id.get_chunk_info(2)

    def flip(data: bytearray) -> None:
        data[place.byte_offset + place.size // 2] ^= 255

    with reading(broken(path, flip)) as source:
        with pytest.raises(RecordError) as raised:
            source[17]
        assert (raised.value.path, raised.value.offset) == (str(path), place.byte_offset)
        assert raised.value.key == "/image, chunk 2"
        np.testing.assert_array_equal(source[24]["image"], x[24])


@pytest.mark.parametrize("nbytes", [65, 1 << 20, 100 << 20])
def test_a_bomb_is_not_unpacked(tmp_path: Path, nbytes: int) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("x", (8, 4), "i4", chunks=(4, 4), compression="gzip")
        made.id.write_direct_chunk((0, 0), zlib.compress(bytes(nbytes)))
    with reading(tmp_path / "a.h5") as source, pytest.raises(RecordError, match="other than its 64 bytes"):
        source[0]


@pytest.mark.parametrize("other", [{"scaleoffset": 0}, {"fletcher32": True}])
def test_a_bomb_is_not_unpacked_by_the_library(tmp_path: Path, other: dict[str, Any]) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("x", data=np.ones((3, 4), "i4"), chunks=(1, 4), compression="gzip", **other)
        made.id.write_direct_chunk((1, 0), zlib.compress(bytes(2 << 20)) + bytes(4 * ("fletcher32" in other)))
    with reading(tmp_path / "a.h5", max_record_nbytes=1 << 20) as source:
        with pytest.raises(RecordError, match="unpacks to more than max_record_nbytes=1048576"):
            source[1]
        assert source[0]["x"].tolist() == source[2]["x"].tolist() == [1] * 4


def test_a_chunk_that_deflate_packed_well_is_read_by_the_library(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.ones((2, 1 << 20), "u1"), chunks=True, compression="gzip", fletcher32=True)
    with reading(tmp_path / "a.h5", max_record_nbytes=1 << 20) as source:
        assert source[1]["x"].sum() == 1 << 20


def test_rows_and_chunks_that_are_too_large_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (8, 1 << 20), "u1", chunks=(8, 1 << 18))
        file["name"] = ["x" * 100_000] * 8
    with pytest.raises(SourceError, match="in chunks of 2097152; 100000 are the most; raise max_record_nbytes"):
        reading(tmp_path / "a.h5", max_record_nbytes=100_000)
    with (
        reading(tmp_path / "a.h5", fields=["name"], max_record_nbytes=100_000) as source,
        pytest.raises(RecordError, match="a heap collection of 1000"),
    ):
        source[0]


@pytest.mark.parametrize(("count", "number"), [(5, 9), (500, 1)])
def test_a_reference_to_more_than_its_object_or_to_none_reads_nothing_beside_it(
    tmp_path: Path, count: int, number: int
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.array(["hello"], h5py.string_dtype())
    data = (tmp_path / "a.h5").read_bytes()
    reference, changed = (
        struct.pack("<IQI", one, data.index(b"GCOL"), which) for one, which in [(5, 1), (count, number)]
    )
    assert data.count(reference) == 1
    (tmp_path / "a.h5").write_bytes(data.replace(reference, changed))
    with reading(tmp_path / "a.h5") as source, pytest.raises(RecordError, match=f"no object {number} of {count} elem"):
        source[0]


@pytest.mark.parametrize("binary", [[], ["x"]])
@pytest.mark.parametrize("inner", [(50,), (5, 10)])
def test_a_row_of_many_references_to_one_text_takes_no_more_than_the_limit(
    tmp_path: Path, inner: tuple[int, ...], binary: list[str]
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("x", (4, *inner), h5py.string_dtype(), chunks=(1, *inner))
        made[:] = "ß"
        made[(0,) * made.ndim] = "a" * (1 << 20)
        [packed] = {made.id.read_direct_chunk((0,) * made.ndim)[1][:16]}
        made.id.write_direct_chunk((0,) * made.ndim, packed * 50)
    with reading(tmp_path / "a.h5", max_record_nbytes=2 << 20, binary=binary) as source:
        tracemalloc.start()
        with pytest.raises(RecordError, match="its 50 values take 52432000 bytes; max_record_nbytes=2097152"):
            source[0]
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
        tracemalloc.stop()
        values = np.full(inner, "ß".encode() if binary else "ß", object).tolist()
        assert source[1]["x"] == values
        assert source[3] == {"x": values}


LIES: dict[str, Callable[[h5py.File], Any]] = {
    "parts of a compound": lambda file: file.create_dataset("x", data=np.array([("a" * 27, 1)] * 3, _NAMED)),
    "another filter": lambda file: file.create_dataset("x", data=["a" * 27] * 3, chunks=(3,), compression="lzf"),
    "a user block": lambda file: file.create_dataset("x", data=["a" * 27] * 3),
}


@pytest.mark.parametrize("kind", LIES)
def test_values_of_variable_length_that_only_the_library_can_read_are_refused_unless_the_file_is_trusted(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", userblock_size=512 if "block" in kind else 0) as file:
        LIES[kind](file)
        file["label"] = np.arange(3)
    with pytest.raises(SourceError, match=r"takes the memory that the file states .* external=True if this file is"):
        reading(path, fields=["x/name" if "compound" in kind else "x"])
    with pytest.warns(UserWarning, match="'/x' holds values of variable length"), reading(path) as source:
        assert [*source] == [{"label": number} for number in range(3)]
    with reading(path, external=True) as source:
        assert source[2]["x/name" if "compound" in kind else "x"] == "a" * 27


def test_no_attribute_of_variable_length_is_read_unless_the_file_is_trusted(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = np.arange(-1, 2, dtype="i1"), np.zeros(3)
        file["x"].attrs["units"] = "K" * 27
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<IQI", 27, data.index(b"GCOL"), 1))
    data[at : at + 4] = struct.pack("<I", 1 << 20)  # the library takes so much, and then finds 27
    path.write_bytes(data)
    with reading(path) as source:
        assert source[0] == {"x": -1, "y": 0.0}
    with pytest.raises(SourceError, match="heap object size"):
        reading(path, external=True)
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(-1, 2, dtype="i1")
        file["x"].attrs["_Unsigned"] = "true"
    with pytest.raises(SourceError, match=r"_Unsigned as text of variable length.*external=True if you trust the file"):
        reading(path)
    with reading(path, external=True) as source:
        assert source[0] == {"x": 255}


def test_a_row_of_very_many_chunks_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (4, 1 << 20), "u1", chunks=(1, 1))
    with pytest.raises(SourceError, match="lies in 1048576 chunks, for which the HDF5 library takes 8589934592 bytes"):
        reading(tmp_path / "a.h5")


def test_whether_a_filter_is_missing_is_seen_without_a_whole_row(tmp_path: Path) -> None:
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_chunk((1, 1 << 20))
    created.set_filter(32999, h5py.h5z.FLAG_OPTIONAL, ())
    with h5py.File(tmp_path / "a.h5", "w") as file:
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_UINT8, h5py.h5s.create_simple((4, 1 << 26)), created)
    tracemalloc.start()
    with pytest.raises(SourceError, match="67108864 bytes"):
        reading(tmp_path / "a.h5", max_record_nbytes=2 << 20)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_a_file_that_changed_is_said(images: Any) -> None:
    with reading(images[0]) as source:
        broken(images[0], lambda data: data.extend(b"more"))
        with pytest.raises(SourceError, match="when it was opened first; open it again"):
            source[0]


_MUTANTS = """
import sys
import numpy as np
from penstock.core.errors import SourceError
from penstock.data.formats.hdf5.file import HDF5File
from penstock.data.formats.hdf5.source import open_files
from penstock.data.schema import Selection
from penstock.data.storage.storage import Storage

path, seeds, first = sys.argv[1], sys.argv[2:-1], int(sys.argv[-1])
for number in range(first, 400):
    rng = np.random.default_rng(number)
    data = bytearray(open(seeds[number % len(seeds)], "rb").read())
    for _ in range(rng.integers(1, 5)):
        at = int(rng.integers(0, len(data) if number % 2 else 4096))
        change = rng.integers(0, 4)
        if change == 0:
            data[at] ^= 1 << int(rng.integers(0, 8))
        elif change == 1:
            data[at : at + 8] = bytes(8)
        elif change == 2:
            data[at:at] = rng.bytes(3)
        elif number % 5 == 0:
            del data[at:]
            break
    open(path, "wb").write(data)
    print(number, flush=True)
    try:
        source = open_files([path], storage=Storage(), fields=Selection.of(None), errors="raise")
    except SourceError:
        continue
    source.chunk_starts
    for index in range(min(len(source), 50)):
        try:
            source[index]
        except SourceError:
            pass
    source.close()
print("all", flush=True)
"""


def test_files_that_were_tampered_with_give_our_errors_only(tmp_path: Path) -> None:
    """In a process of its own: HDF5 2.0.0 itself crashes on one corrupt file in some thousands."""
    samples = many(20)
    schema = schema_of(samples[0]) | {"boxes": Field("array", "float64", (None, 4))}
    seeds = [write_samples(tmp_path / "ours.h5", samples, schema, compression="gzip")]
    for libver in ("earliest", "latest"):
        with h5py.File(tmp_path / f"{libver}.h5", "w", libver=libver) as file:
            x = RNG.integers(0, 256, (60, 6, 5), np.uint8)
            file.create_dataset("packed", data=x, chunks=(8, 6, 5), compression="gzip", shuffle=True)
            file.create_dataset("parts", data=x, chunks=(8, 4, 3), maxshape=(None, 6, None))
            file.create_dataset("lzf", data=x, compression="lzf")
            file["number"], file["group/text"] = np.arange(60), [f"x{number}" for number in range(60)]
            file["record"] = np.zeros(60, [("x", "f4"), ("tag", "S3")])
        seeds.append(tmp_path / f"{libver}.h5")
    first, crashes = 0, 0
    while first < 400:
        command = [sys.executable, "-c", _MUTANTS, str(tmp_path / "mutant.h5"), *map(str, seeds), str(first)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.stdout.endswith("all\n"):
            break
        assert done.returncode == -signal.SIGSEGV, done.stderr
        first, crashes = int(done.stdout.split()[-1]) + 1, crashes + 1
    assert crashes <= 2


# ── what h5py cannot read ───────────────────────────────────────────────────────────────────────────────────


def test_a_type_that_numpy_lacks_does_not_take_the_file_with_it(tmp_path: Path) -> None:
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(4)
        space = h5py.h5s.create_simple((4,))
        h5py.h5d.create(file.id, b"when", h5py.h5t.UNIX_D32LE, space)
    with pytest.warns(UserWarning, match="left out: .*'/when' holds what no field can hold"):
        source = penstock.open(path)
    assert list(source) == [{"x": np.int64(at)} for at in range(4)]
    with pytest.raises(SourceError, match=r"'/when' holds what no field can hold.*choose other fields"):
        penstock.open(path, fields=["when"])


def _packed_by_nobody(file: h5py.File, name: bytes, skipped: int) -> None:
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_chunk((4,))
    created.set_filter(32_999, h5py.h5z.FLAG_OPTIONAL)
    made = h5py.h5d.create(file.id, name, h5py.h5t.STD_I64LE, h5py.h5s.create_simple((4,)), created)
    made.write_direct_chunk((0,), np.arange(4).tobytes(), skipped)


def test_a_filter_that_is_not_there_is_named_when_the_file_is_opened(tmp_path: Path) -> None:
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(4)
        _packed_by_nobody(file, b"packed", 0)
        _packed_by_nobody(file, b"skipped", 1)
    with pytest.warns(UserWarning, match=r"left out: .*'/packed' is packed by a filter that is not there \(32999"):
        source = penstock.open(path)
    assert source[3] == {"x": 3, "skipped": 3}
