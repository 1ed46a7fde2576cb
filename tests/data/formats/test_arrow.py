"""Arrow IPC: files and streams, as views of a map where nothing is compressed."""

from __future__ import annotations

import io
import pickle
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from sample_files import assert_same, datasets, samples_in, write_samples

import penstock
from penstock.core.errors import RecordError, SourceError
from penstock.data.schema import Sample, Schema, plain

pa = pytest.importorskip("pyarrow")
feather = pytest.importorskip("pyarrow.feather")


def ipc(path: Path, kind: str, table: Any, batch_rows: int = 4) -> None:
    """Write a table as pyarrow does: kind is "file", "stream", "zstd file" ..."""
    *compression, container = kind.split()
    options = pa.ipc.IpcWriteOptions(compression=compression[0] if compression else None)
    make = pa.ipc.new_file if container == "file" else pa.ipc.new_stream
    with make(path, table.schema, options=options) as sink:
        sink.write_table(table, max_chunksize=batch_rows)


KINDS = ["file", "stream", "zstd file", "lz4 stream"]
TABLE = pa.table(
    {
        "x": pa.array([[number, number] for number in range(30)], pa.list_(pa.int16(), 2)),
        "list": pa.array([[True] * number for number in range(30)]),
        "name": pa.array([f"name {number}" * 3 for number in range(30)], pa.string_view()),
        "jpeg": pa.array([bytes([number]) for number in range(30)]),
        "half": pa.array(np.arange(30, dtype=np.float16)),
    }
)


@pytest.mark.parametrize(("layout", "compression"), [("raw", "none"), ("tensors", "lz4")])
def test_samples_come_back_as_they_were(layout: str, compression: str) -> None:
    @settings(deadline=None, max_examples=40)
    @given(datasets())
    def check(made: tuple[Schema, list[Sample]]) -> None:
        schema, samples = made
        with tempfile.TemporaryDirectory() as folder:
            write_samples(f"{folder}/a.arrow", samples, schema, layout=layout, compression=compression)
            source = penstock.open(f"{folder}/a.arrow")
            assert source.schema == schema
            assert len(source) == len(samples)
            for sample, other in zip(samples, source, strict=True):
                assert_same({name: plain(value) for name, value in sample.items()}, other)
            source.close()
            assert feather.read_table(f"{folder}/a.arrow").num_rows == len(samples)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_what_pyarrow_writes_is_read(tmp_path: Path, kind: str) -> None:
    ipc(tmp_path / "a.arrow", kind, TABLE)
    source = penstock.open(tmp_path / "a.arrow")
    assert source.chunk_starts.tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 30]
    for number in random.Random(0).sample(range(30), 30):
        assert_same(
            source[number],
            {
                "x": np.array([number, number], np.int16),
                "list": np.ones(number, bool),
                "name": f"name {number}" * 3,
                "jpeg": bytes([number]),
                "half": np.float16(number),
            },
        )
    source.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_and_a_pass_have_the_samples_that_are_read_one_by_one(tmp_path: Path, kind: str) -> None:
    sparse = {
        "text": pa.array(["a", None, "ß"] * 10),
        "cell": pa.array([b"abc", None, b"def"] * 10, pa.binary(3)),
        "nested": pa.array([[[1, 2]], [], [[3, 4], [5, 6]]] * 10, pa.list_(pa.list_(pa.int8()))),
        "turns": pa.array([[{"role": "user"}], None, []] * 10),
        "number": pa.array([1, None, 3] * 10),
        "list": pa.array([[1], None, [2, 3]] * 10),
    }
    for name, array in sparse.items():
        table = TABLE.drop(["list"]).append_column(name, array)
        ipc(tmp_path / f"{name}.arrow", kind, table)
        source = penstock.open(tmp_path / f"{name}.arrow", null={"number": -1, "list": np.zeros(0)})
        alone = [source[index] for index in range(30)]
        order = np.random.default_rng(0).permutation(30).tolist()
        for index, sample in [*enumerate(source), *zip(order, source.__getitems__(order), strict=True)]:
            assert_same(sample, alone[index])
            assert name not in ("text", "cell", "turns") or sample[name] == array[index].as_py()
        source.close()


@pytest.mark.parametrize("kind", KINDS)
def test_dictionaries_are_looked_up_even_if_they_change(tmp_path: Path, kind: str) -> None:
    if kind == "file":  # a file has one dictionary for all of its batches
        table = pa.table({"c": pa.array(["a", "b", None] * 3).dictionary_encode(), "n": range(9)})
    else:
        chunks = [pa.array(words).dictionary_encode() for words in (["a", "b", "a"], ["c", "a", None], ["d", "d", "d"])]
        table = pa.table({"c": pa.chunked_array(chunks), "n": range(9)})
        table = table.unify_dictionaries() if kind == "zstd file" else table
    words = table.column("c").to_pylist()
    ipc(tmp_path / "a.arrow", kind, table)
    assert [sample["c"] for sample in samples_in(tmp_path / "a.arrow", null={"c": "none"})] == [
        word or "none" for word in words
    ]


def test_a_stream_of_the_other_byte_order_is_refused(tmp_path: Path) -> None:
    ipc(tmp_path / "a.arrow", "stream", pa.table({"x": np.arange(4)}))
    data = bytearray((tmp_path / "a.arrow").read_bytes())
    root = 8 + int.from_bytes(data[8:12], "little")
    fields = root - int.from_bytes(data[root : root + 4], "little", signed=True)
    at = root + int.from_bytes(data[fields + 8 : fields + 10], "little")
    schema = at + int.from_bytes(data[at : at + 4], "little")
    one = next(at for at in range(schema + 4, len(data), 2) if data[at : at + 2] == b"\1\0")  # has none for it so far
    vtable = schema - int.from_bytes(data[schema : schema + 4], "little", signed=True)
    data[vtable + 4 : vtable + 6] = (one - schema).to_bytes(2, "little")
    (tmp_path / "a.arrow").write_bytes(data)
    with pytest.raises(SourceError, match=r"a\.arrow is of the other byte order"):
        penstock.open(tmp_path / "a.arrow")


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_a_file_that_was_cut_off_since_it_was_opened_is_an_error_that_names_it(tmp_path: Path, kind: str) -> None:
    ipc(tmp_path / "a.arrow", kind, TABLE)
    source = penstock.open(tmp_path / "a.arrow")
    data = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceError, match=r"a\.arrow is shorter than it was when it was opened"):
        source[0]
    source.close()


def test_batches_that_are_views_of_a_map_cost_nearly_nothing_to_keep(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array(list(np.zeros((64, 5000))))})
    for kind, most in (("stream", 64 << 10), ("zstd stream", 1 << 30)):
        ipc(tmp_path / "a.arrow", kind, table)
        source = penstock.open(tmp_path / "a.arrow")
        held = source._held.get()
        source.__getitems__(range(64))
        assert sum(held.peek(number).nbytes for number in range(16)) < 16 * most
        assert kind == "stream" or held.peek(0).nbytes > 4 * 5000 * 8
        source.close()


def test_streams_as_hugging_face_writes_them_are_one_source(tmp_path: Path) -> None:
    images = [{"bytes": bytes([number]), "path": f"{number}.jpg"} for number in range(20)]
    for shard in range(2):
        table = pa.table({"image": images[10 * shard : 10 * shard + 10], "label": range(10 * shard, 10 * shard + 10)})
        ipc(
            tmp_path / f"data-0000{shard}-of-00002.arrow",
            "stream",
            table.replace_schema_metadata({"huggingface": "{}"}),
        )
    source = penstock.open(str(tmp_path / "data-*.arrow"), fields={"x": "image/bytes", "y": "label"})
    assert list(source) == [{"x": bytes([number]), "y": number} for number in range(20)]
    source.close()


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_samples_are_views_of_the_map_and_outlive_the_source(tmp_path: Path, kind: str) -> None:
    ipc(tmp_path / "a.arrow", kind, pa.table({"x": pa.array(list(np.arange(30 * 5000).reshape(30, 5000)))}))
    source = penstock.open(tmp_path / "a.arrow", fields=["x"])
    before = pa.total_allocated_bytes()
    samples = list(source)
    assert pa.total_allocated_bytes() - before < 30 * 5000
    source.close()
    del source
    assert samples[7]["x"][:2].tolist() == [35000, 35001]
    with pytest.raises(ValueError, match="read-only"):
        samples[7]["x"] += 1


@pytest.mark.parametrize("metadata", [b"{}", b'{"permutation": [1, 0]}'])
def test_tensors_of_others_keep_their_shapes(tmp_path: Path, metadata: bytes) -> None:
    shape = pa.FixedSizeListArray.from_arrays(pa.array([2, 2, 1, 3], pa.int32()), 2)
    array = pa.StructArray.from_arrays([pa.array([[1, 2, 3, 4], [5, 6, 7]]), shape], names=["data", "shape"])
    named = {b"ARROW:extension:name": b"arrow.variable_shape_tensor", b"ARROW:extension:metadata": metadata}
    schema = pa.schema([pa.field("x", array.type, metadata=named)])
    ipc(tmp_path / "a.arrow", "file", pa.table([array], schema=schema))
    if metadata != b"{}":
        with pytest.raises(SourceError, match="axes are permuted"):
            penstock.open(tmp_path / "a.arrow")
        return
    source = penstock.open(tmp_path / "a.arrow")
    assert source.schema["x"].words() == "int64[?, ?]"
    assert [sample["x"].tolist() for sample in source] == [[[1, 2], [3, 4]], [[5, 6, 7]]]
    source.close()


@pytest.mark.parametrize("shape", [[-1, 4], [2, 3], [2**31 - 1, 2**31 - 1], [0, 4]])
def test_shapes_that_do_not_fit_are_records_in_error(tmp_path: Path, shape: list[int]) -> None:
    shapes = pa.FixedSizeListArray.from_arrays(pa.array([*shape, 2, 2], pa.int32()), 2)
    data = pa.array([b"abcd", b"abcd"])
    array = pa.StructArray.from_arrays([data, shapes], names=["data", "shape"])
    schema = pa.schema([pa.field("x", array.type, metadata={b"penstock.array": b"uint8[2, ?]"})])
    ipc(tmp_path / "a.arrow", "file", pa.table([array], schema=schema))
    source = penstock.open(tmp_path / "a.arrow")
    assert source[1]["x"].tolist() == [[97, 98], [99, 100]]
    with pytest.raises(RecordError, match="shape"):
        source[0]
    source.close()


@pytest.mark.parametrize(
    "words",
    [b"", b"uint8", b"uint8[]", b"uint8[3]", b"object[2, 2]", b"uint8[2, ?]", b"\xff", b"uint8[99999999999999999]"],
)
def test_metadata_that_does_not_fit_is_refused(tmp_path: Path, words: bytes) -> None:
    schema = pa.schema([pa.field("x", pa.binary(4), metadata={b"penstock.array": words})])
    ipc(tmp_path / "a.arrow", "file", pa.table([pa.array([b"abcd"], pa.binary(4))], schema=schema))
    with pytest.raises(SourceError, match="its metadata are"):
        penstock.open(tmp_path / "a.arrow")


@pytest.mark.parametrize("kind", KINDS)
def test_threads_forks_and_pickles_read_the_same(tmp_path: Path, kind: str) -> None:
    ipc(tmp_path / "a.arrow", kind, pa.table({"x": np.arange(640)}), 64)
    source = penstock.open(tmp_path / "a.arrow")
    with ThreadPoolExecutor(4) as pool:
        order = list(np.random.default_rng(0).permutation(640))
        assert [sample["x"] for sample in pool.map(source.read, map(int, order))] == order
    other = pickle.loads(pickle.dumps(source))
    assert other[5] == {"x": 5}
    other.close()
    loader = penstock.DataLoader(source, batch_size=8, num_workers=2, shuffle=True)
    assert sorted(torch.cat([batch["x"] for batch in loader]).tolist()) == list(range(640))
    source.close()


@pytest.mark.parametrize("data", [b"", b"ARROW1\0\0", b"ARROW1\0\0" + b"\xff" * 50, b"\xff" * 100, b"\0" * 100])
def test_what_is_no_arrow_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.arrow").write_bytes(data)
    with pytest.raises(SourceError, match=r"a\.arrow"):
        penstock.open(tmp_path / "a.arrow")


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_refused(tmp_path: Path, kind: str) -> None:
    ipc(tmp_path / "a.arrow", kind, TABLE)
    data = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceError, match=r"a\.arrow"):
        penstock.open(tmp_path / "a.arrow")


def test_a_batch_that_unpacks_to_more_than_the_limit_is_refused(tmp_path: Path) -> None:
    ipc(tmp_path / "a.arrow", "zstd file", pa.table({"x": [b"\0" * 1_000_000] * 20}), 20)
    assert (tmp_path / "a.arrow").stat().st_size < 100_000
    source = penstock.open(tmp_path / "a.arrow", max_record_nbytes=10_000_000)
    with pytest.raises(RecordError, match="max_record_nbytes"):
        source[0]
    source.close()


def _read_no_columns(read: Any) -> Any:
    """Return a function that reads the number of a batch's rows, and fails where its columns are to be read."""

    def checked(message: Any, schema: pa.Schema) -> Any:
        assert not len(schema), "its columns are unpacked"
        return read(message, schema)

    return checked


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("place", ["first", "second"])
def test_a_compressed_batch_that_states_more_than_the_limit_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, place: str
) -> None:
    """Also behind one that is not compressed: whether a batch is, each says itself."""
    schema = pa.schema([("x", pa.int64())])
    counts = (5, 20_000_000) if place == "second" else (20_000_000,)
    batches = [pa.record_batch([pa.array(np.zeros(count, np.int64))], schema=schema) for count in counts]
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(tmp_path / "a.arrow", schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    monkeypatch.setattr(pa.ipc, "read_record_batch", _read_no_columns(pa.ipc.read_record_batch))
    source = penstock.open(tmp_path / "a.arrow", max_record_nbytes="50MiB")
    with pytest.raises(RecordError, match=r"its batch has 160000000 bytes unpacked.* raise max_record_nbytes"):
        source[len(source) - 1]
    source.close()


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_files_whose_footer_alone_says_where_messages_are_are_read(tmp_path: Path, compression: Any) -> None:
    # Polars 2 writes no schema behind the magic, nor anything that a stream may begin with.
    path, table = tmp_path / "a.arrow", pa.table({"x": np.arange(6), "s": [*"abcdef"]})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(str(path), table.schema, options=options) as sink:
        sink.write_table(table, max_chunksize=4)
    data = bytearray(path.read_bytes())
    data[8:16] = b"\x04\0\0\0\xf2\xff\xff\xff"
    path.write_bytes(data)
    source = penstock.open(path)
    assert [*source] == table.to_pylist()
    assert source.__getitems__([5, 0]) == [{"x": 5, "s": "f"}, {"x": 0, "s": "a"}]
    assert source.chunk_starts.tolist() == [0, 4, 6]
    path.write_bytes(data[:-40])
    with pytest.raises(SourceError, match=r"a\.arrow"):
        penstock.open(path)


def test_feather_of_version_1_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.feather").write_bytes(b"FEA1" + bytes(100) + b"FEA1")
    with pytest.raises(SourceError, match="Feather file of version 1"):
        penstock.open(tmp_path / "a.feather")


@pytest.mark.parametrize("options", [{}, {"format": "arrow"}])
def test_results_that_datasets_keeps_beside_what_it_has_saved_are_no_samples(tmp_path: Path, options: Any) -> None:
    ipc(tmp_path / "data-00000-of-00001.arrow", "stream", pa.table({"x": [1, 2]}))
    ipc(tmp_path / "cache-0123.arrow", "stream", pa.table({"x": [10, 20]}))
    assert len(penstock.open(tmp_path, **options)) == 4
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    assert [int(one["x"]) for one in penstock.open(tmp_path, **options)] == [1, 2]


@pytest.mark.parametrize("options", [{}, {"format": "arrow"}])
def test_the_cache_of_load_dataset_is_read_without_results_of_map_and_never_with_several_splits(
    tmp_path: Path, options: Any
) -> None:
    folder = tmp_path / "parquet" / "my-data-12ab" / "0.0.0"
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text("{}")
    ipc(folder / "cache-0123456789abcdef.arrow", "stream", pa.table({"x": [10]}))
    with pytest.raises(SourceError, match="holds no arrow"):
        penstock.open(tmp_path, **options)
    for shard in (0, 1):
        ipc(folder / f"my-data-train-0000{shard}-of-00002.arrow", "stream", pa.table({"x": [shard]}))
    for path in (tmp_path, folder):
        assert [int(one["x"]) for one in penstock.open(path, **options)] == [0, 1]
    ipc(folder / "my-data-test.arrow", "stream", pa.table({"x": [7]}))
    with pytest.raises(SourceError, match=r"2 splits, .*/my-data-test\.arrow, .*-train-\*\.arrow; open one of"):
        penstock.open(tmp_path, **options)
    assert [int(one["x"]) for one in penstock.open(folder / "my-data-train-*.arrow", **options)] == [0, 1]


def test_what_load_dataset_has_made_is_known_remotely() -> None:
    files = fsspec.filesystem("memory")
    table = io.BytesIO()
    with pa.ipc.new_stream(table, pa.schema({"x": pa.int64()})) as writer:
        writer.write_table(pa.table({"x": [1]}))
    data = table.getvalue()
    files.pipe({"/hf/dataset_info.json": b"{}", "/hf/a-train.arrow": data, "/hf/cache-01.arrow": data})
    assert [int(one["x"]) for one in penstock.open("memory://hf/")] == [1]
    files.pipe({"/hf/state.json": b'{"_data_files": [{"filename": "cache-01.arrow"}]}'})
    assert [str(one) for one in penstock.open("memory://hf/").read_paths()] == ["memory://hf/cache-01.arrow"]
    files.rm("/hf", recursive=True)


def test_splits_that_were_saved_together_are_not_mixed(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        ipc(tmp_path / split / "data.arrow", "stream", pa.table({"x": [7]}))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(SourceError, match=r"is a DatasetDict of .* splits train, test; open one of them: .*/train"):
        penstock.open(tmp_path)
    assert len(penstock.open(tmp_path / "train")) == 1
