"""Parquet: what pyarrow writes is read right, what is written comes back, and row groups are unpacked once."""

from __future__ import annotations

import base64
import datetime
import math
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from sample_files import assert_same, datasets, samples_in, write_samples

import penstock
from penstock.core.errors import OptionError, RecordError, SourceError, WorkerKilledError
from penstock.data.chunk_shuffle import ChunkShuffle
from penstock.data.formats.arrow import parquet
from penstock.data.formats.arrow.parquet import ParquetSource, ParquetWriter
from penstock.data.formats.arrow.table import partition_leaves
from penstock.data.formats.arrow.writer import why_unsupported
from penstock.data.formats.partition_names import check_left_out
from penstock.data.schema import Field, Sample, Schema, Selection, plain, schema_of

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
feather = pytest.importorskip("pyarrow.feather")
encryption = pytest.importorskip("pyarrow.parquet.encryption")


def table(path: Path, columns: dict[str, Any], **options: Any) -> None:
    pq.write_table(pa.table(columns), path, **options)


@pytest.mark.parametrize("first", [0, 1])
def test_a_column_that_has_no_type_in_one_file_is_null_there(tmp_path: Path, first: int) -> None:
    values = {"text": "a", "number": 2, "list": [1, 2], "chat": [{"role": "u"}], "amount": Decimal("1.50")}
    table(tmp_path / f"{first}.parquet", {name: pa.array([value]) for name, value in values.items()})
    table(tmp_path / f"{1 - first}.parquet", {name: pa.nulls(2) for name in values})
    source = pickle.loads(pickle.dumps(penstock.open(tmp_path, null={"number": -1, "list": np.zeros(2, np.int64)})))
    found = [{name: getattr(value, "tolist", lambda v=value: v)() for name, value in one.items()} for one in source]
    nulls = {"text": None, "number": -1, "list": [0, 0], "chat": None, "amount": None}
    assert found == ([values, nulls, nulls] if first == 0 else [nulls, nulls, values])
    with pytest.raises(RecordError, match="it is null; pass a value"):
        [*penstock.open(tmp_path, fields=["number"])]


@pytest.mark.parametrize("layout", ["raw", "tensors"])
def test_samples_come_back_as_they_were(layout: str) -> None:
    @settings(deadline=None, max_examples=30)
    @given(datasets())
    def check(made: tuple[Schema, list[Sample]]) -> None:
        schema, samples = made
        with tempfile.TemporaryDirectory() as folder:
            write_samples(f"{folder}/a.parquet", samples, schema, layout=layout)
            found = samples_in(f"{folder}/a.parquet")
            assert len(found) == len(samples)
            for sample, other in zip(samples, found, strict=True):
                assert_same({name: plain(value) for name, value in sample.items()}, other)
            source = penstock.open(f"{folder}/a.parquet")
            assert source.schema == schema
            assert pq.read_table(f"{folder}/a.parquet").num_rows == len(samples)

    check()


def test_numbers_keep_the_bits_of_what_is_not_a_number(tmp_path: Path) -> None:
    bits = np.array([0x7FC00001, 0x7F800001, 0xFFC12345, 0x7FC00000, 0x80000000], np.uint32)
    samples = [{"n": one, "x": bits.view(np.float32)} for one in bits.view(np.float32)]
    write_samples(tmp_path / "a.parquet", samples)
    found = samples_in(tmp_path / "a.parquet")
    assert [int(np.asarray(sample["n"]).view(np.uint32)) for sample in found] == bits.tolist()
    assert found[0]["x"].view(np.uint32).tolist() == bits.tolist()


def test_pyarrow_reads_what_was_written(tmp_path: Path) -> None:
    samples = [
        {"x": np.full((2, 3), number, np.int16), "label": number, "name": "é", "jpeg": b"\xff"} for number in (1, 2)
    ]
    write_samples(tmp_path / "a.parquet", samples)
    found = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert np.frombuffer(found[1].pop("x"), "<i2").reshape(2, 3).tolist() == [[2, 2, 2], [2, 2, 2]]
    assert found[1] == {"label": 2, "name": "é", "jpeg": b"\xff"}
    write_samples(tmp_path / "b.parquet", samples, layout="tensors")
    column = pq.read_table(tmp_path / "b.parquet").column("x").combine_chunks()
    assert column.to_numpy_ndarray().tolist() == [[[number] * 3] * 2 for number in (1, 2)]


def test_what_pyarrow_writes_is_read(tmp_path: Path) -> None:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.float32).reshape(2, 3, 2))
    turned = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int8(), [2, 3], permutation=[1, 0]),
        pa.array([list(range(6))] * 2, pa.list_(pa.int8(), 6)),
    )
    day = datetime.date(1970, 1, 3)
    columns = {
        "half": pa.array(np.array([1, 2], np.float16)),
        "flag": pa.array([True, False]),
        "flags": pa.array([[True] * 9, [False, True]]),
        "text": pa.array(["a", "ß"], pa.large_string()),
        "view": pa.array(["a", "a string that is too long for a view"], pa.string_view()),
        "bytes": pa.array([b"", b"\0"], pa.large_binary()),
        "cell": pa.array([b"abc", b"def"], pa.binary(3)),
        "list": pa.array([[1, 2, 3], []], pa.list_(pa.uint8())),
        "nested": pa.array([[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]], pa.large_list(pa.list_(pa.float64()))),
        "mixed": pa.array([[[1, 2]], []], pa.list_(pa.list_(pa.int16(), 2))),
        "fixed": pa.array([[[1, 2], [3, 4]]] * 2, pa.list_(pa.list_(pa.int32(), 2), 2)),
        "tensor": tensors,
        "turned": turned,
        "coded": pa.array(["x", "y"]).dictionary_encode(),
        "time": pa.array([datetime.datetime(1970, 1, 1, 0, 0, 1)] * 2, pa.timestamp("us")),
        "day": pa.array([day] * 2),
    }
    table(tmp_path / "a.parquet", columns)
    one, two = samples_in(tmp_path / "a.parquet")
    assert_same(
        two,
        {
            "half": np.float16(2),
            "flag": np.bool_(False),
            "flags": np.array([False, True]),
            "text": "ß",
            "view": "a string that is too long for a view",
            "bytes": b"\0",
            "cell": b"def",
            "list": np.array([], np.uint8),
            "nested": np.array([[3.0, 4.0], [5.0, 6.0]]),
            "mixed": np.zeros((0, 2), np.int16),
            "fixed": np.array([[1, 2], [3, 4]], np.int32),
            "tensor": np.arange(6, 12, dtype=np.float32).reshape(3, 2),
            "turned": np.arange(6, dtype=np.int8).reshape(2, 3).T,
            "coded": "y",
            "time": np.int64(1_000_000),
            "day": np.int32(2),
        },
    )
    assert (one["flags"].tolist(), one["nested"].shape, one["mixed"].tolist()) == ([True] * 9, (1, 2), [[1, 2]])
    source = penstock.open(tmp_path / "a.parquet")
    assert {name: field.words() for name, field in source.schema.items() if field.kind == "array"} == {
        "flags": "bool[?]",
        "list": "uint8[?]",
        "nested": "float64[?, ?]",
        "mixed": "int16[?, 2]",
        "fixed": "int32[2, 2]",
        "tensor": "float32[3, 2]",
        "turned": "int8[3, 2]",
    }


def test_structs_are_fields_of_their_own(tmp_path: Path) -> None:
    image = pa.array([{"bytes": b"1", "path": None}, None, {"bytes": b"3", "path": "c.jpg"}])
    table(tmp_path / "a.parquet", {"image": image, "label": [1, 2, 3]})
    assert list(penstock.open(tmp_path / "a.parquet").schema) == ["image/bytes", "image/path", "label"]
    source = penstock.open(tmp_path / "a.parquet", fields={"x": "image/bytes", "y": "label", "z": "image/path"})
    assert list(source) == [
        {"x": b"1", "y": 1, "z": None},
        {"x": None, "y": 2, "z": None},
        {"x": b"3", "y": 3, "z": "c.jpg"},
    ]
    source.close()


def test_nulls_are_what_the_user_says_or_errors(tmp_path: Path) -> None:
    table(tmp_path / "a.parquet", {"label": pa.array([1, None], pa.int64()), "x": pa.array([[1, None], [2, 3]])})
    assert samples_in(tmp_path / "a.parquet", fields=["label"], null={"label": -1}) == [{"label": 1}, {"label": -1}]
    source = penstock.open(tmp_path / "a.parquet", fields=["label"])
    with pytest.raises(
        RecordError, match=r"a\.parquet: record 1: field 'label': it is null; pass a value to use instead: null="
    ):
        source[1]
    source.close()
    source = penstock.open(tmp_path / "a.parquet", fields=["x"])
    assert source[1]["x"].tolist() == [2, 3]
    with pytest.raises(RecordError, match="nulls between its numbers"):
        source[0]
    source.close()


@pytest.mark.parametrize(
    ("column", "null"),
    [
        (pa.array([1, None], pa.uint8()), -1),
        (pa.array([1, None], pa.int8()), 300),
        (pa.array([1, None], pa.int32()), math.nan),
        (pa.array([1, None], pa.int32()), 0.5),
        (pa.array([1, None], pa.int32()), "none"),
        (pa.array([True, None]), -1),
        (pa.array([1.5, None], pa.float32()), 1e300),
        (pa.array(["a", None]), 0),
        (pa.array([[1, 2], None], pa.list_(pa.int64(), 2)), 0),
        (pa.array([[1, 2], None], pa.list_(pa.int64(), 2)), np.zeros(3, np.int64)),
        (pa.array([[1, 2], None], pa.list_(pa.uint8())), np.array([-1])),
    ],
)
def test_a_value_for_nulls_that_does_not_fit_its_column_is_refused(tmp_path: Path, column: Any, null: Any) -> None:
    table(tmp_path / "a.parquet", {"x": column})
    words = re.escape(penstock.open(tmp_path / "a.parquet").schema["x"].words())
    with pytest.raises(OptionError, match=rf"null=\{{'x': .* not fit the field, which is {words}: .*objects=\['x'\]"):
        penstock.open(tmp_path / "a.parquet", null={"x": null})
    assert len(penstock.open(tmp_path / "a.parquet", null={"x": null}, objects=["x"])) == 2


@pytest.mark.parametrize(
    ("column", "null"),
    [
        (pa.array([1, None], pa.int8()), -1),
        (pa.array([None, 1], pa.int32()), -1),
        (pa.array([None, 1.5], pa.float32()), math.nan),
        (pa.array([None, 1.5], pa.float32()), -1),
        (pa.array([1.5, None], pa.float64()), 0.1),
        (pa.array([None, True]), False),
        (pa.array([[1, 2], None], pa.list_(pa.float32(), 2)), np.zeros(2)),
    ],
)
def test_batches_with_nulls_are_of_the_type_in_the_schema(tmp_path: Path, column: Any, null: Any) -> None:
    table(tmp_path / "a.parquet", {"x": column})
    source = penstock.open(tmp_path / "a.parquet", null={"x": null})
    (batch,) = penstock.DataLoader(source, batch_size=2)
    assert str(batch["x"].dtype) == f"torch.{source.schema['x'].dtype}"
    source.close()


def test_lists_that_are_no_array_are_records_in_error(tmp_path: Path) -> None:
    table(tmp_path / "a.parquet", {"x": pa.array([[[1], [2, 3]], [[1, 2]]])})
    source = penstock.open(tmp_path / "a.parquet")
    assert source[1]["x"].tolist() == [[1, 2]]
    with pytest.raises(RecordError, match="rows have different lengths"):
        source[0]
    source.close()


NESTED = {
    "messages": pa.array([[{"role": "user", "content": "hi"}, {"role": "bot", "content": None}], []]),
    "tags": pa.array([["a", "ß"], None], pa.large_list(pa.string())),
    "map": pa.array([[("a", 1)], [("b", None)]], pa.map_("string", "int8")),
    "price": pa.array([Decimal("1.50"), Decimal("-2.25")]),
    "deep": pa.array([{"tools": [["x"]], "n": 1}, {"tools": [], "n": 2}]),
    "coded": pa.array([["a"], ["b"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
}


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_nested_values_are_the_python_objects_that_pyarrow_gives(tmp_path: Path, suffix: str) -> None:
    columns = pa.table(NESTED)
    if suffix == "parquet":
        pq.write_table(columns, tmp_path / "a.parquet")
    else:
        feather.write_feather(columns, tmp_path / "a.arrow", compression="uncompressed")
    source = penstock.open(tmp_path / f"a.{suffix}")
    assert {name: (field.kind, field.unit) for name, field in source.schema.items() if name != "deep/n"} == {
        "messages": ("object", "list<struct<role: string, content: string>>"),
        "tags": ("object", "list<string>"),
        "map": ("object", "map<string, int8>"),
        "price": ("object", "decimal128(3, 2)"),
        "deep/tools": ("object", "list<list<string>>"),
        "coded": ("object", "list<string>"),
    }
    expected = [{**row, "deep/tools": row["deep"]["tools"], "deep/n": row["deep"]["n"]} for row in columns.to_pylist()]
    assert list(source) == [{name: value for name, value in row.items() if name != "deep"} for row in expected]
    assert penstock.open(tmp_path / f"a.{suffix}", fields=["tags"], null={"tags": []})[1] == {"tags": []}
    assert pickle.loads(pickle.dumps(source))[0]["price"] == Decimal("1.50")
    source.close()


@pytest.mark.parametrize("store_schema", [True, False])  # DuckDB and fastparquet store none
def test_json_and_uuids_are_text_and_bytes_whoever_marked_them(tmp_path: Path, store_schema: bool) -> None:
    uuids, texts = [bytes(range(16)), bytes(16)], ['{"a": 1}', None]
    columns = {
        "id": pa.ExtensionArray.from_storage(pa.uuid(), pa.array(uuids, pa.binary(16))),
        "text": pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts)),
    }
    table(tmp_path / "a.parquet", columns, store_schema=store_schema)
    source = penstock.open(tmp_path / "a.parquet")
    assert [*source] == [{"id": uuids[place], "text": texts[place]} for place in range(2)]
    assert [source.schema[name].kind for name in columns] == ["bytes", "text"]


def test_any_column_can_be_a_python_object(tmp_path: Path) -> None:
    columns = {"x": [[[1], [2, None]], [[3, 4]]], "s": [{"a": 1, "b": ["c"]}, {"a": 2, "b": []}], "n": [1, 2]}
    table(tmp_path / "a.parquet", {name: pa.array(values) for name, values in columns.items()})
    source = penstock.open(tmp_path / "a.parquet", objects=["x", "s"])
    assert [source[index] for index in range(2)] == pa.table(columns).to_pylist()
    assert source.schema["s"].words() == "object (struct<a: int64, b: list<string>>)"
    source.close()
    with pytest.raises(SourceError, match="has no field 'y'"):
        penstock.open(tmp_path / "a.parquet", objects=["y"])
    with pytest.raises(OptionError, match=r"has to be a list of columns, as in \['x'\]"):
        penstock.open(tmp_path / "a.parquet", objects="x")


def test_a_column_without_a_type_is_left_out_and_named(tmp_path: Path) -> None:
    image = pa.array([{"bytes": b"1", "path": None}, {"bytes": b"2", "path": None}])
    table(tmp_path / "a.parquet", {"image": image, "x": [1, 2]})
    with pytest.warns(
        UserWarning, match=r"left out: .*a\.parquet: field 'image/path' cannot be read: all its rows are"
    ):
        source = penstock.open(tmp_path / "a.parquet")
    assert list(source) == [{"image/bytes": b"1", "x": 1}, {"image/bytes": b"2", "x": 2}]
    source.close()
    with pytest.raises(SourceError, match=r"field 'image/path' cannot be read: .*; leave it out: fields="):
        penstock.open(tmp_path / "a.parquet", fields=["image/path"])


DAY = datetime.datetime(2020, 1, 1)


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (pa.timestamp("us"), pa.timestamp("ns"), pa.timestamp("ns")),
        (pa.timestamp("ns", "UTC"), pa.timestamp("ms", "Europe/Berlin"), pa.timestamp("ns", "UTC")),
        (pa.list_(pa.timestamp("us")), pa.list_(pa.timestamp("ns")), pa.list_(pa.timestamp("ns"))),
        (pa.duration("ms"), pa.duration("us"), pa.duration("us")),
        (pa.time32("ms"), pa.time64("us"), pa.time64("us")),
        (pa.date32(), pa.date64(), pa.date64()),
        (pa.decimal128(5, 2), pa.decimal128(9, 4), pa.decimal128(9, 4)),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_units_of_one_folder_are_converted_to_the_finest(
    tmp_path: Path, one: Any, other: Any, common: Any, turned: bool
) -> None:
    value = {
        "timestamp": DAY,
        "duration": datetime.timedelta(1),
        "time": datetime.time(1, 2, 3),
        "date": DAY.date(),
        "decimal": Decimal("1.25"),
        "list<": [DAY],
    }[next(name for name in ("timestamp", "duration", "time", "date", "decimal", "list<") if str(one).startswith(name))]
    for number, type in enumerate((other, one) if turned else (one, other)):
        with pa.OSFile(str(tmp_path / f"{number}.arrow"), "wb") as file:  # Parquet has no date64, and no seconds
            part = pa.table({"t": pa.array([value], type)})
            with pa.ipc.new_file(file, part.schema) as writer:
                writer.write_table(part)
    source = penstock.open(tmp_path)
    first, second = (sample["t"] for sample in source)
    assert_same({"t": first}, {"t": second})
    assert str(common).removeprefix("list<item: ").removesuffix(">") == source.schema["t"].unit
    if source.schema["t"].kind == "object":
        assert str(first) == "1.2500"
    else:
        numbers = pa.array([value], common)
        numbers = numbers.flatten() if isinstance(value, list) else numbers
        assert np.asarray(first).reshape(1) == numbers.view(f"int{first.dtype.itemsize * 8}").to_numpy()
    source.close()


@pytest.mark.parametrize(
    ("one", "other", "wide"),
    [
        (pa.int32(), pa.int64(), "int64"),
        (pa.uint8(), pa.int8(), "int16"),
        (pa.uint64(), pa.uint8(), "uint64"),
        (pa.float32(), pa.float64(), "float64"),
        (pa.float16(), pa.float32(), "float32"),
        (pa.list_(pa.int16()), pa.list_(pa.int32()), "int32"),
        (pa.list_(pa.float32(), 1), pa.list_(pa.float64(), 1), "float64"),
        (pa.list_(pa.int32(), 1), pa.list_(pa.int64()), "int64"),
        (pa.list_(pa.int32()), pa.large_list(pa.float64()), "float64"),
        (pa.int32(), pa.float32(), "float64"),
        (pa.int16(), pa.float32(), "float32"),
    ],
)
def test_numbers_of_different_types_are_read_in_one_that_holds_both(
    tmp_path: Path, one: Any, other: Any, wide: str
) -> None:
    for number, type in enumerate((one, other)):
        values = [[3], [5]] if pa.types.is_nested(type) else [3, 5]
        table(tmp_path / f"{number}.parquet", {"x": pa.array(values, type)})
    source = penstock.open(tmp_path)
    assert source.schema["x"].dtype == wide
    assert [(sample["x"].dtype.name, int(sample["x"].sum())) for sample in source] == [(wide, 3), (wide, 5)] * 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.timestamp("us"), pa.int64()),
        (pa.duration("us"), pa.timestamp("us")),
        (pa.date32(), pa.int32()),
        (pa.decimal256(76, 0), pa.decimal256(76, 70)),
        (pa.list_(pa.string()), pa.list_(pa.binary())),
        (pa.int64(), pa.uint64()),
        (pa.int64(), pa.float64()),
        (pa.bool_(), pa.int8()),
        (pa.struct({"a": pa.timestamp("us")}), pa.struct({"a": pa.int64()})),
        (pa.list_(pa.struct({"a": pa.string()})), pa.list_(pa.struct({"b": pa.string()}))),
    ],
)
def test_values_of_different_meaning_are_refused_with_both_files_named(tmp_path: Path, one: Any, other: Any) -> None:
    for number, type in enumerate((one, other)):
        table(tmp_path / f"{number}.parquet", {"t": pa.array([], type)})
    with pytest.raises(SourceError, match=r"1\.parquet: field 't(/a)?' is .*, and .* in .*0\.parquet"):
        penstock.open(tmp_path)


def _nested(inner: Any) -> Any:
    return pa.list_(pa.struct({"role": pa.string(), "call": inner}))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([[None], []], pa.list_(pa.null())), pa.array([["a"], ["b", None]])),
        (pa.array([[]], pa.list_(pa.null())), pa.array([["a"]], pa.large_list(pa.large_string()))),
        (
            pa.array([[{"role": "user", "call": None}]], _nested(pa.null())),
            pa.array([[{"role": "tool", "call": [1]}], None], _nested(pa.list_(pa.int64()))),
        ),
        (
            pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int8())),
            pa.array([[("l", None)]], pa.map_(pa.large_string(), pa.int32())),
        ),
        (pa.array([["a"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))), pa.array([[None]], pa.list_(pa.null()))),
    ],
)
def test_nested_values_keep_theirs_where_another_file_has_nulls_or_other_layouts(
    tmp_path: Path, one: Any, other: Any
) -> None:
    for number, column in enumerate((one, other)):
        table(tmp_path / f"{number}.parquet", {"x": column})
    for paths in (["0", "1"], ["1", "0"]):
        source = penstock.open([tmp_path / f"{name}.parquet" for name in paths])
        columns = [one, other] if paths == ["0", "1"] else [other, one]
        assert [sample["x"] for sample in source] == [value for column in columns for value in column.to_pylist()]


def test_lists_that_are_empty_in_one_file_are_arrays_of_the_other_files_type(tmp_path: Path) -> None:
    table(tmp_path / "0.parquet", {"x": pa.array([[]], pa.list_(pa.null()))})
    table(tmp_path / "1.parquet", {"x": pa.array([[1, 2]], pa.list_(pa.int16()))})
    assert [(s["x"].dtype.name, s["x"].tolist()) for s in penstock.open(tmp_path)] == [("int16", []), ("int16", [1, 2])]


def test_arrays_of_bytes_in_different_shapes_do_not_become_bytes(tmp_path: Path) -> None:
    for number, shape in enumerate(((2, 2), (4,))):
        writer = ParquetWriter(str(tmp_path / f"{number}.parquet"), {"x": Field("array", "float32", shape)})
        writer.write({"x": np.ones(shape, np.float32)})
        writer.close()
    with pytest.raises(SourceError, match=r"field 'x' is float32\[4\], and float32\[2, 2\] in"):
        penstock.open(tmp_path)


def test_a_time_that_a_finer_unit_cannot_hold_is_a_record_in_error(tmp_path: Path) -> None:
    table(tmp_path / "0.parquet", {"t": pa.array([0], pa.timestamp("ns"))})
    table(tmp_path / "1.parquet", {"t": pa.array([1 << 60], pa.timestamp("us"))})
    source = penstock.open(tmp_path)
    assert source[0]["t"] == 0
    with pytest.raises(RecordError, match="out of bounds"):
        source[1]
    source.close()


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table([[1], [2]], names=["x", "x"]), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="two columns have this name"):
        penstock.open(tmp_path / "a.parquet")


def test_files_are_one_source_if_they_have_the_same_columns(tmp_path: Path) -> None:
    for number in range(3):
        table(tmp_path / f"{number}.parquet", {"x": np.arange(10) + 10 * number}, row_group_size=4)
    source = penstock.open(str(tmp_path / "{0..2}.parquet"))
    assert [sample["x"] for sample in source] == list(range(30))
    assert source.chunk_starts.tolist() == [0, 4, 8, 10, 14, 18, 20, 24, 28, 30]
    assert source[-1] == {"x": 29}
    source.close()
    table(tmp_path / "3.parquet", {"x": ["a"]})
    with pytest.raises(SourceError, match=r"3\.parquet: field 'x' is text, and int64 in .*0\.parquet"):
        penstock.open(str(tmp_path / "{0..3}.parquet"))


def test_a_row_group_is_unpacked_once_if_its_samples_are_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(tmp_path / "a.parquet", {"x": np.arange(1000), "y": np.arange(1000)}, row_group_size=50)
    asked = []
    batches = ParquetSource.batches
    monkeypatch.setattr(ParquetSource, "batches", lambda *args: asked.append(args[2]) or batches(*args))
    source = penstock.open(tmp_path / "a.parquet", fields=["x"], held_nbytes=8 * 50 * 8)
    assert sorted(source[index]["x"] for index in ChunkShuffle(source.chunk_starts, seed=0)) == list(range(1000))
    assert sorted(asked) == list(range(20))
    source.close()


def test_a_large_row_group_is_unpacked_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_PIECE_NBYTES", 1000)
    table(tmp_path / "a.parquet", {"x": [f"number {number}" for number in range(1000)], "y": np.arange(1000)})
    assert samples_in(tmp_path / "a.parquet") == [{"x": f"number {number}", "y": number} for number in range(1000)]


def test_columns_of_others_are_not_read(tmp_path: Path) -> None:
    table(tmp_path / "a.parquet", {"x": [1], "y.z": ["a"], "y": [[1, 2]]})
    source = penstock.open(tmp_path / "a.parquet").select_fields(["y.z"])
    ((batch, _),) = source.batches(0, 0, [("y.z",)])
    assert "x" not in batch.schema.names
    assert source[0] == {"y.z": "a"}
    source.close()


def test_arrays_are_read_only_views(tmp_path: Path) -> None:
    write_samples(
        tmp_path / "a.parquet",
        [{"x": np.zeros(3), "y": np.zeros((1, number))} for number in range(3)],
        {"x": Field("array", "float64", (3,)), "y": Field("array", "float64", (1, None))},
    )
    for sample in samples_in(tmp_path / "a.parquet"):
        for value in sample.values():
            with pytest.raises(ValueError, match="read-only"):
                value += 1


@pytest.mark.parametrize("compression", ["zstd", "snappy", "none"])
def test_several_files_are_one_source_whatever_their_compression(tmp_path: Path, compression: str) -> None:
    numbers = [np.arange(number) for number in range(30)]
    schema = {"x": Field("array", "int64", (None,))}
    parts = [str(tmp_path / f"{part}.parquet") for part in range(3)]
    for part, path in enumerate(parts):
        samples = [{"x": one} for one in numbers[part * 10 : part * 10 + 10]]
        write_samples(path, samples, schema, compression=compression)
    source = penstock.open(str(tmp_path / "{0,1,2}.parquet"))
    assert [sample["x"].tolist() for sample in source] == [one.tolist() for one in numbers]
    assert source.schema == schema
    assert source.chunk_starts.tolist() == [0, 10, 20, 30]


def test_a_buffer_may_be_used_again_for_the_next_sample(tmp_path: Path) -> None:
    buffer = np.zeros(3)
    writer = ParquetWriter(str(tmp_path / "a.parquet"), schema_of({"x": buffer}))
    for number in range(3):
        buffer[:] = number
        writer.write({"x": buffer})
    writer.close()
    assert [sample["x"][0] for sample in samples_in(tmp_path / "a.parquet")] == [0, 1, 2]


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    for schema, words in (
        ({"x": Field("number", "complex64")}, "Arrow has no type"),
        ({"x": Field("array", "uint8", (1 << 31,))}, "1073741824 are the most"),
        ({}, "without a field"),
    ):
        assert words in why_unsupported(schema)
        with pytest.raises(SourceError, match=words):
            ParquetWriter(str(tmp_path / "a.parquet"), schema)


def test_row_groups_are_neither_large_nor_many(tmp_path: Path) -> None:
    write_samples(tmp_path / "a.parquet", [{"x": np.zeros(1 << 18)} for _ in range(9)])
    assert penstock.open(tmp_path / "a.parquet").chunk_starts.tolist() == [0, 4, 8, 9]
    write_samples(tmp_path / "b.parquet", [{"x": 1} for _ in range(1025)])
    assert penstock.open(tmp_path / "b.parquet").chunk_starts.tolist() == [0, 1024, 1025]


def test_threads_forks_and_pickles_read_the_same(tmp_path: Path) -> None:
    table(tmp_path / "a.parquet", {"x": np.arange(640)}, row_group_size=64)
    source = penstock.open(tmp_path / "a.parquet")
    with ThreadPoolExecutor(4) as pool:
        order = list(np.random.default_rng(0).permutation(640))
        assert [sample["x"] for sample in pool.map(source.read, map(int, order))] == order
    other = pickle.loads(pickle.dumps(source))
    assert other[5] == {"x": 5}
    other.close()
    for loader in (penstock.DataLoader, torch.utils.data.DataLoader):
        batches = loader(source, batch_size=8, num_workers=2, shuffle=True)
        assert sorted(torch.cat([batch["x"] for batch in batches]).tolist()) == list(range(640))
    source.close()


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1\0\0\0\0PAR1", b"PAR1" + b"\xff" * 8 + b"PAR1", b"\0" * 100_000])
def test_what_is_no_parquet_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(SourceError, match=r"a\.parquet"):
        penstock.open(tmp_path / "a.parquet")


class PlainKeys(encryption.KmsClient):
    """Keeps keys as they are."""

    def __init__(self, _: Any) -> None:
        super().__init__()

    def wrap_key(self, key: bytes, _: str) -> bytes:
        return base64.b64encode(key)


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_what_is_encrypted_is_said_to_be(tmp_path: Path, plaintext_footer: bool) -> None:
    config = encryption.EncryptionConfiguration(
        footer_key="f", column_keys={"k": ["x"]}, plaintext_footer=plaintext_footer
    )
    keys = encryption.CryptoFactory(PlainKeys).file_encryption_properties(encryption.KmsConnectionConfig(), config)
    columns = pa.table({"x": [1], "y": [2]})
    with pq.ParquetWriter(tmp_path / "a.parquet", columns.schema, encryption_properties=keys) as writer:
        writer.write_table(columns)
    words = "with encrypted columns" if plaintext_footer else "whose footer is encrypted"
    with pytest.raises(SourceError, match=rf"a\.parquet is a Parquet file {words}"):
        penstock.open(tmp_path / "a.parquet")


def test_a_row_group_that_kills_the_worker_is_survived_and_its_file_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        table(tmp_path / f"{number}.parquet", {"x": np.arange(20) + 20 * number}, row_group_size=10)
    batches = ParquetSource.batches

    def deadly(source: ParquetSource, file: int, number: int, columns: Any) -> Any:
        if (file, number) == (1, 1) and multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return batches(source, file, number, columns)

    monkeypatch.setattr(ParquetSource, "batches", deadly)
    source = penstock.open(tmp_path)
    with pytest.raises(WorkerKilledError, match=r"making sample 3\d of .*1\.parquet, on which"):
        list(penstock.DataLoader(source, batch_size=5, num_workers=1, multiprocessing_context="fork"))
    source.close()


def test_a_flipped_bit_is_noticed_and_other_row_groups_are_read(tmp_path: Path) -> None:
    write_samples(tmp_path / "a.parquet", [{"x": np.random.default_rng(number).bytes(4096)} for number in range(2048)])
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[1 << 20] ^= 1
    (tmp_path / "a.parquet").write_bytes(data)
    source = penstock.open(tmp_path / "a.parquet")
    with pytest.raises(RecordError, match=r"record 3: its group cannot be unpacked"):
        source[3]
    assert len(source[2047]["x"]) == 4096
    source.close()


def test_a_remote_file_is_read_when_a_row_group_of_it_is(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    table(tmp_path / "a.parquet", {"x": np.arange(20_000)}, row_group_size=4000)
    fsspec.filesystem("memory").put(str(tmp_path / "a.parquet"), "/folder/a.parquet")
    source = penstock.open("memory://folder/a.parquet", cache=tmp_path / "cache")
    assert len(source) == 20_000
    assert not any(path.is_file() for path in (tmp_path / "cache").rglob("*"))
    assert [source[index]["x"] for index in range(0, 20_000, 99)] == list(range(0, 20_000, 99))
    source.close()


@pytest.mark.parametrize("dtype", [np.int32, np.bool_])
def test_a_few_bytes_that_say_to_be_millions_of_values_are_held_to_the_limit(tmp_path: Path, dtype: Any) -> None:
    count = 2_000_000
    values = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.array(np.zeros(count, dtype)))
    pq.write_table(pa.table({"x": values}), tmp_path / "even.parquet")
    assert (tmp_path / "even.parquet").stat().st_size < 100_000
    source = penstock.open(tmp_path / "even.parquet", max_record_nbytes=4 * count - 1)
    with pytest.raises(RecordError, match="its row group has 8000000 bytes unpacked"):
        source[0]
    source.close()
    assert samples_in(tmp_path / "even.parquet", max_record_nbytes=5 * count)[0]["x"].shape == (count,)


def test_a_row_group_whose_footer_states_more_than_the_limit_is_not_unpacked(tmp_path: Path) -> None:
    table(tmp_path / "a.parquet", {"x": np.zeros(1_000_000), "y": np.zeros(1_000_000)})
    source = penstock.open(tmp_path / "a.parquet", max_record_nbytes=9_000_000)
    with pytest.raises(RecordError, match="its row group has 16000000 bytes unpacked"):
        source[0]
    source.close()
    part = source.select_fields(["y"])
    assert part[999_999] == {"y": 0}
    part.close()


LONG = pa.DictionaryArray.from_arrays(pa.array([0] * 64, pa.int32()), pa.array([bytes(16 << 20)]))
BOMBS = {
    "dictionary": ({"x": LONG}, {"dictionary_pagesize_limit": 1 << 30}),
    "lists": ({"x": pa.ListArray.from_arrays(pa.array([0, 64], pa.int32()), LONG)}, {}),
    "page": ({"x": pa.array([bytes(100 << 20)])}, {"use_dictionary": False, "data_page_size": 1 << 30}),
    "values": ({"x": pa.array([np.zeros(40_000_000, np.int8)])}, {}),
    "pages": ({"x": pa.array([bytes(8 << 20)] * 24)}, {"use_dictionary": False, "data_page_size": 8 << 20}),
    "ends of the value before": (
        {"x": pa.array([bytes(8 << 20)] * 24)},
        {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY", "data_page_size": 1 << 30},
    ),
    "page of a dictionary": ({"x": pa.array([bytes(120 << 20)])}, {}),
    "page beside its value": ({"x": pa.array([bytes(64 << 20)])}, {}),
}

READ_BOMBS = """
import sys
import pyarrow as pa
import penstock
for path in sys.argv[1:]:
    source = penstock.open(path, max_record_nbytes="90MiB")
    try:
        source[0]
    except penstock.RecordError as error:
        print("max_record_nbytes" in str(error))
    source.close()
print(pa.default_memory_pool().max_memory() >> 20)
"""


def test_a_few_bytes_that_unpack_to_more_than_the_limit_take_no_memory(tmp_path: Path) -> None:
    paths = []
    for kind, (columns, options) in BOMBS.items():
        paths.append(tmp_path / f"{kind}.parquet")
        usual = {"compression": "brotli", "write_statistics": False, "store_schema": False}
        pq.write_table(pa.table(columns), paths[-1], **{**usual, "dictionary_pagesize_limit": 1 << 30, **options})
        assert paths[-1].stat().st_size < 10_000
    done = subprocess.run(
        [sys.executable, "-c", READ_BOMBS, *map(str, paths)], capture_output=True, text=True, check=True
    )
    *refused, most_mib = done.stdout.split()
    assert refused == ["True"] * len(BOMBS)
    assert int(most_mib) <= 180


def test_what_repeats_long_values_and_fits_is_read(tmp_path: Path) -> None:
    """Where the longest entry for all values would be too much, the entries that they have are added up."""
    texts = [["a" * 100_000], *[["b"]] * 10_000]
    pq.write_table(pa.table({"t": texts, "s": [one[0] for one in texts]}), tmp_path / "a.parquet")
    source = penstock.open(tmp_path / "a.parquet", max_record_nbytes="2MiB")
    assert [source[index] for index in (0, 10_000)] == [{"t": one, "s": one[0]} for one in (texts[0], texts[-1])]
    source.close()


def test_columns_that_compress_well_are_believed(tmp_path: Path) -> None:
    count = 2_000_000
    pq.write_table(pa.table({"x": np.zeros(count, np.int64), "t": ["abc"] * count}), tmp_path / "even.parquet")
    assert penstock.open(tmp_path / "even.parquet")[count - 1] == {"x": 0, "t": "abc"}


def test_statistics_that_are_long_texts_are_skipped(tmp_path: Path) -> None:
    texts = ["a" * 20_000, "b" * 20_000]
    pq.write_table(pa.table({"t": texts}), tmp_path / "long.parquet", write_page_index=False)
    source = penstock.open(tmp_path / "long.parquet")
    assert [source[index]["t"] for index in range(2)] == texts


@pytest.mark.parametrize(
    ("claim", "words"), [(-77, "states 23 rows, in groups of -77 to 100"), (1 << 42, "in groups of 100 to 43")]
)
def test_a_footer_with_impossible_row_counts_is_refused(tmp_path: Path, claim: int, words: str) -> None:
    with pq.ParquetWriter(tmp_path / "a.parquet", pa.schema({"x": pa.int64()}), write_page_index=False) as writer:
        for count in (100, 77):
            writer.write_table(pa.table({"x": range(count)}))
    data = (tmp_path / "a.parquet").read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    worker_type, footer = data[: -8 - length], data[-8 - length : -8]
    before, after = footer.rsplit(b"\x16" + varint(77), 1)  # the last group's num_rows: a field of type i64
    footer = before + b"\x16" + varint(claim) + after
    (tmp_path / "a.parquet").write_bytes(worker_type + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(SourceError, match=words):
        penstock.open(tmp_path / "a.parquet")


def varint(value: int) -> bytes:
    """Return a number as Thrift's compact protocol writes it."""
    rest, out = (value << 1) ^ (value >> 63), bytearray()
    while rest > 127:
        out.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*out, rest])


def write_partitions(root: Path, *folders: str) -> None:
    for number, folder in enumerate(folders):
        (root / folder).mkdir(parents=True)
        pq.write_table(pa.table({"x": [2 * number, 2 * number + 1]}), root / folder / "a.parquet", row_group_size=1)


def test_hive_partitions_that_are_left_out_are_named(tmp_path: Path) -> None:
    write_partitions(tmp_path / "set", "day=1/label=cat", "day=1/label=dog")
    with pytest.warns(UserWarning, match=r"left out: .* state 'label', which .* pass partitions=\['label'\]"):
        source = penstock.open(tmp_path / "set")
    assert [*source.schema] == ["x"]
    assert len(penstock.open(tmp_path / "set", fields=["x"])) == 4  # they are not wanted: no warning
    assert len(penstock.open(tmp_path / "set" / "day=1" / "label=cat")) == 2
    with pytest.raises(SourceError, match=r"no field 'label': .* pass partitions=\['label'\]"):
        penstock.open(tmp_path / "set", fields=["x", "label"])


def test_hive_partitions_are_fields_where_they_are_named(tmp_path: Path) -> None:
    write_partitions(tmp_path, "day=01/label=hot%20dog", "day=02/label=cat", "day=02/label=__HIVE_DEFAULT_PARTITION__")
    source = penstock.open(tmp_path, partitions=["label", "day"])
    parts = [(0, "hot dog", 1), (4, None, 2), (2, "cat", 2)]  # by the folders' names
    want = [{"x": x, "label": label, "day": day} for first, label, day in parts for x in (first, first + 1)]
    assert source.schema == {"x": Field("number", "int64"), "label": Field("text"), "day": Field("number", "int64")}
    assert [*source] == [source[number] for number in range(6)] == source.__getitems__([*range(6)]) == want
    assert [*pickle.loads(pickle.dumps(source))] == want
    only = [{"label": one["label"]} for one in want]
    assert [*source.select_fields(["label"])] == only
    days = penstock.open(tmp_path, partitions=["label", "day"], fields={"y": "day"})
    assert [*days] == [{"y": one["day"]} for one in want]
    loader = penstock.DataLoader(source, batch_size=None, num_workers=2)
    assert [one["label"] for one in loader] == [one["label"] for one in want]


def test_hive_partitions_of_a_web_server_are_named_though_their_urls_quote_them() -> None:
    urls = [f"https://host/set/label%3D{quote(label)}/a.parquet" for label in ("hot%20dog", "cat")]
    assert [leaves["label"].value for leaves in partition_leaves(urls, ["label"])] == ["hot dog", "cat"]
    with pytest.warns(UserWarning, match=r"state 'label'"):
        check_left_out(urls, lambda: ["x"], Selection.of(None), "do without {}")


def test_hive_partitions_that_are_no_fields_of_all_files_are_refused(tmp_path: Path) -> None:
    write_partitions(tmp_path, "label=cat", "x=3")
    with pytest.raises(SourceError, match=r"x=3/a.parquet: partitions= names 'label', and its folders state 'x'"):
        penstock.open(tmp_path, partitions=["label"])
    with pytest.raises(SourceError, match=r"it has a column 'x'; leave it out of partitions="):
        penstock.open(tmp_path / "x=3", partitions=["x"])
    with pytest.raises(OptionError, match=r"partitions='x' has to be a list of columns"):
        penstock.open(tmp_path, partitions="x")
