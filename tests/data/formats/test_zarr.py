"""Zarr: what others wrote, what we write, and groups that are broken."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import pickle
import shutil
import tempfile
import tracemalloc
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from sample_files import assert_same, datasets, write_samples

import penstock
from penstock.core.errors import RecordError, SourceError
from penstock.data.formats.zarr.source import open_files
from penstock.data.formats.zarr.writer import ZarrWriter, why_unsupported
from penstock.data.schema import Field, Sample, Schema, Selection, schema_of
from penstock.data.storage.storage import Storage

RNG = np.random.default_rng(0)
zarr.config.set({"threading.max_workers": 1})
with tempfile.TemporaryDirectory() as folder:  # the package's threads stay for as long as the process does
    zarr.save(f"{folder}/a.zarr", np.zeros(1))


def reading(*paths: Path, fields: Any = None, **options: Any) -> Any:
    return closing(
        open_files(
            [str(path) for path in paths], storage=Storage(), fields=Selection.of(fields), errors="raise", **options
        )
    )


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("dtype", ["uint8", ">i4", "float16", "bool", "complex64"])
def test_rows_are_those_that_zarr_reads(tmp_path: Path, version: Any, dtype: str) -> None:
    data = RNG.integers(0, 2, (50, 6, 5)).astype(dtype)
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=version)
    group.create_array("image", data=data, chunks=(8, 4, 5))
    group.create_array("inner/label", data=np.arange(50), chunks=(20,))
    with reading(tmp_path / "a.zarr") as source:
        for index in (0, 7, 8, 49):
            expected = data[index].astype(data.dtype.newbyteorder("="))
            assert_same(source[index], {"image": expected, "inner/label": np.int64(index)})
        assert source.chunk_starts.tolist() == [*range(0, 50, 8), 50]
        assert source.select_fields(["inner/label"])[3] == {"inner/label": 3}


def test_groups_of_different_dtypes_are_read_in_one_that_holds_both(tmp_path: Path) -> None:
    for number, dtype in enumerate(("int32", "float32")):
        group = zarr.open_group(tmp_path / f"{number}.zarr", mode="w")
        group.create_array("x", data=np.arange(3, dtype=dtype) + (1 << 24), chunks=(2,))
    with reading(tmp_path / "0.zarr", tmp_path / "1.zarr") as source:
        assert source.schema == {"x": Field("number", "float64")}
        assert [sample["x"] for sample in source] == [16777216, 16777217, 16777218, 16777216, 16777216, 16777218]
        assert {type(sample["x"]) for sample in source.__getitems__([0, 4])} == {np.float64}


def test_dates_and_durations_are_their_integers_in_a_unit(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    for name, dtype in (("day", "M8[D]"), ("time", "M8[ns]"), ("step", ">m8[us]")):
        group.create_array(name, data=np.array([0, 18262], "i8").view("i8").astype(dtype), chunks=(2,))
    with reading(tmp_path / "a.zarr") as source:
        assert {name: field.words() for name, field in source.schema.items()} == {
            "day": "int64 (datetime64[D])",
            "time": "int64 (timestamp[ns])",
            "step": "int64 (duration[us])",
        }
        assert_same(source[1], dict.fromkeys(("day", "step", "time"), np.int64(18262)))
    group["time"][1] = np.datetime64("NaT")
    with reading(tmp_path / "a.zarr") as source:
        assert source[0]["time"] == 0
        with pytest.raises(RecordError, match=r"time\[1\].*NaT"):
            source[1]


def test_an_array_that_no_field_can_hold_is_left_out_and_named(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    group.create_array("x", data=np.arange(3), chunks=(3,))
    group.create_array("pairs", data=np.zeros(3, "i4,f4"), chunks=(3,))
    with pytest.warns(UserWarning, match="left out: .*'pairs'"), reading(tmp_path / "a.zarr") as source:
        assert [*source] == [{"x": 0}, {"x": 1}, {"x": 2}]
    with pytest.raises(SourceError, match="'pairs' holds"), reading(tmp_path / "a.zarr", fields=["x", "pairs"]):
        pass


def test_arrays_that_differ_in_length_are_refused_unless_they_are_chosen(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    for name, rows in (("train/x", 5), ("test/x", 3)):
        group.create_array(name, data=np.zeros((rows, 2), "f4"), chunks=(rows, 2))
    group.create_array("mean", data=np.zeros(2, "f4"), chunks=(2,))
    words = r"a\.zarr: .* differ in their rows: 'mean' has 2, 'test/x' has 3, 'train/x' has 5; choose"
    with pytest.raises(SourceError, match=words):
        reading(tmp_path / "a.zarr")
    with reading(tmp_path / "a.zarr", fields=["test/x"]) as source:
        assert len(source) == 3
    with closing(penstock.open(tmp_path / "a.zarr" / "train", format="zarr")) as source:
        assert (len(source), set(source.schema)) == (5, {"x"})


def test_arrays_whose_attributes_state_other_units_are_refused(tmp_path: Path) -> None:
    for name, unit in (("0", "m"), ("1", "km")):
        group = zarr.open_group(tmp_path / f"{name}.zarr", mode="w")
        group.create_array("x", data=np.arange(3), chunks=(3,)).attrs["units"] = unit
    with reading(tmp_path / "0.zarr") as source:
        assert source.schema["x"].words() == "int64 (units=m)"
    with pytest.raises(SourceError, match=r"units=km.*units=m"), reading(tmp_path / "0.zarr", tmp_path / "1.zarr"):
        pass


@pytest.mark.parametrize("version", [2, 3])
def test_integers_that_netcdf_marks_unsigned_are_unsigned(tmp_path: Path, version: Any) -> None:
    x = np.arange(-5, 5, dtype=">i2").reshape(5, 2)
    for name, attributes in (("a", {"_Unsigned": "true"}), ("b", {})):
        group = zarr.open_group(tmp_path / f"{name}.zarr", mode="w", zarr_format=version)
        group.create_array("x", data=x, chunks=(2, 2)).attrs.update(attributes)
    with reading(tmp_path / "a.zarr") as source:
        assert source.schema["x"].words() == "uint16[2] (_Unsigned=true)"
        for samples in ([*source], source.__getitems__([*range(5)]), [source[index] for index in range(5)]):
            for sample, row in zip(samples, x.astype("u2"), strict=True):
                assert_same(sample, {"x": row})
    with pytest.raises(SourceError, match=r"int16\[2\], and that of .*uint16\[2\] \(_Unsigned=true\)"):
        reading(tmp_path / "a.zarr", tmp_path / "b.zarr")


@pytest.mark.parametrize(("version", "stated"), [(2, None), (3, -9999.0), (3, "AAAAAICHw8A=")])
def test_fill_values_are_found_where_xarray_keeps_them(tmp_path: Path, version: Any, stated: Any) -> None:
    for name, fill in (("a", stated), ("b", "AAAAAAAA+H8=")):  # the base64 of NaN
        group = zarr.open_group(tmp_path / f"{name}.zarr", mode="w", zarr_format=version)
        kept = {"fill_value": -9999.0 if name == "a" else np.nan} if version == 2 else {}
        array = group.create_array("x", shape=(3,), dtype="f4", chunks=(3,), **kept)
        array.attrs.update({"_ARRAY_DIMENSIONS": ["time"]} if version == 2 else {"_FillValue": fill})
    with reading(tmp_path / "b.zarr") as source:
        assert source.schema["x"].words() == "float32"
    with pytest.raises(SourceError, match=r"float32, and that of .*float32 \(_FillValue=-9999\.0\)"):
        reading(tmp_path / "a.zarr", tmp_path / "b.zarr")


def test_batches_are_gathered_from_chunks_that_are_held(tmp_path: Path) -> None:
    data = RNG.normal(size=(50, 6)).astype(">f4")
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    group.create_array("x", data=data, chunks=(8, 3))
    group.create_array("label", data=np.arange(50), chunks=(20,))
    with reading(tmp_path / "a.zarr") as source:
        expected = [source[index] for index in range(50)]
        for indices in ([*range(5, 30)], RNG.permutation(50).tolist(), [7, 7, -1]):
            for found in (source.__getitems__(indices), source.__getitems__(indices)):
                for one, index in zip(found, indices, strict=True):
                    assert_same(one, expected[index])
        for one, other in zip(source, expected, strict=True):
            assert_same(one, other)
        assert source.ready(np.arange(3)).tolist() == [0, 1, 2]
        source.close()
        assert source.ready(np.arange(3)).tolist() == [], "a chunk is unpacked by the sample that needs it"


def test_shards_and_arrays_without_a_group(tmp_path: Path) -> None:
    made = zarr.create_array(tmp_path / "a.zarr", shape=(40, 3), chunks=(4, 3), shards=(16, 3), dtype="f4")
    made[:] = data = RNG.normal(size=(40, 3)).astype("f4")
    with reading(tmp_path / "a.zarr", fields={"x": "array"}) as source:
        assert source.chunk_starts.tolist() == [0, 16, 32, 40]
        np.testing.assert_array_equal(np.stack([sample["x"] for sample in source]), data)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None, max_examples=25
)
@given(made=datasets())
def test_what_was_written_comes_back(tmp_path: Path, made: tuple[Schema, list[Sample]]) -> None:
    schema, samples = made
    assert why_unsupported(schema) == ""
    with reading(write_samples(tmp_path / "a.zarr", samples, schema)) as source:
        assert (source.schema, len(source)) == (schema, len(samples))
        for one, other in zip(samples, source, strict=True):
            assert_same(one, other)


def many(count: int) -> tuple[Schema, list[Sample]]:
    samples = [
        {
            "image": RNG.integers(0, 256, (64, 48, 3), np.uint8),
            "name": f"número {number}",
            "jpeg": RNG.bytes(number * 7 % 5000),
            "boxes": RNG.normal(size=(number % 5, 4)),
        }
        for number in range(count)
    ]
    return schema_of(samples[0]) | {"boxes": Field("array", "float64", (None, 4))}, samples


def test_blocks_are_appended_and_zarr_reads_them(tmp_path: Path) -> None:
    schema, samples = many(300)
    with reading(write_samples(tmp_path / "a.zarr", samples, schema)) as source:
        for number in RNG.permutation(300).tolist():
            assert_same(samples[number], source[number])
        with closing(pickle.loads(pickle.dumps(source))) as other:
            assert_same(samples[7], other[7])
    group: Any = zarr.open_group(tmp_path / "a.zarr", mode="r")
    assert group["image"].chunks == (113, 64, 48, 3)
    np.testing.assert_array_equal(group["image"][250], samples[250]["image"])
    assert group["name"][250:251].tolist() == [samples[250]["name"]]


def test_several_groups_through_a_loader(tmp_path: Path) -> None:
    for number in range(2):
        values = [{"x": np.float32(number * 10 + at)} for at in range(10)]
        write_samples(tmp_path / f"{number}.zarr", values, {"x": Field("number", "float32")})
    with closing(penstock.open(tmp_path / "{0..1}.zarr")) as source:  # type: ignore[type-var]
        loader = penstock.DataLoader(source, batch_size=4, shuffle=True, num_workers=2)
        assert torch.cat([batch["x"] for batch in loader]).sort().values.tolist() == list(range(20))


def test_what_cannot_be_a_field_is_said(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    group.create_array("x", data=np.zeros((4, 1000)), chunks=(4, 1000))
    group.create_array("y", data=np.zeros(3), chunks=(3,))
    group.create_array("pair", data=np.zeros(4, "i4,f4"), chunks=(4,))
    for fields, options, words in (
        (["pair"], {}, "'pair' holds"),
        (["z"], {}, "has no field 'z'"),
        (["x", "y"], {}, "'x' has 4, 'y' has 3"),
        (["x"], {"max_record_nbytes": 1000}, "chunks of all columns, 32000 bytes in 1; 1000 are the most"),
    ):
        with pytest.raises(SourceError, match=words):
            reading(tmp_path / "a.zarr", fields=fields, **options)
    (tmp_path / "b.zarr").mkdir()
    with pytest.raises(SourceError, match="cannot be read as Zarr"):
        reading(tmp_path / "b.zarr")
    with pytest.raises(SourceError, match="cannot be the name"):
        ZarrWriter(str(tmp_path / "c.zarr"), {"a/b": Field("text")})


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("is_consolidated", [False, True])
@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_beside_an_array_that_zarr_cannot_open_others_are_read_by_name(
    tmp_path: Path, version: Any, is_consolidated: bool
) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=version)
    for name in ("x", "odd", "inner/y", "inner/odd"):
        group.create_array(name, data=np.arange(5))
    group.create_array("short", data=np.arange(2))
    if is_consolidated:
        zarr.consolidate_metadata(str(tmp_path / "a.zarr"))
    for file in (tmp_path / "a.zarr").rglob("*z*"):
        if file.is_file() and (file.parent.name == "odd" or file.parent.name == "a.zarr"):
            text = file.read_text()
            if version == 3:
                file.write_text(text.replace('"int64"', '"a type of the future"'))
            else:
                file.write_text(text.replace('"<i8"', '"|O"'))  # as numcodecs' VLenArray has it
    words = r"cannot be read as Zarr: array '{}': .*; with fields= no other array is opened"
    with pytest.raises(SourceError, match=words.format("odd")):
        reading(tmp_path / "a.zarr")
    with reading(tmp_path / "a.zarr", fields=["x", "inner/y"]) as opened:
        assert opened[4] == {"x": 4, "inner/y": 4}
    with pytest.raises(SourceError, match="cannot be read as Zarr"):
        reading(tmp_path / "a.zarr", fields=["odd"])
    if not is_consolidated:
        shutil.rmtree(tmp_path / "a.zarr" / "odd")
        with pytest.raises(SourceError, match=words.format("inner/odd")):
            reading(tmp_path / "a.zarr")


def test_an_error_of_a_remote_stores_client_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class ClientError(Exception):
        """As httpx's, which derive from nothing else."""

    def opened(path: str, version: Any = None) -> Any:
        raise ClientError("the name of the server is not known")

    monkeypatch.setattr("penstock.data.formats.zarr.source._open_group", opened)
    with pytest.raises(SourceError, match=r"gs://bucket/a\.zarr cannot be read as Zarr: ClientError: the name of"):
        open_files(["gs://bucket/a.zarr"], storage=Storage(), fields=Selection.of(None), errors="raise")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:left out")
def test_broken_groups_give_our_errors_only(tmp_path: Path) -> None:
    schema, samples = many(6)
    path = write_samples(tmp_path / "a.zarr", samples, schema)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    outcomes = set()
    for number in range(100):
        rng = np.random.default_rng(number)
        file = files[number % len(files)]
        whole = file.read_bytes()
        data = bytearray(whole)
        at = int(rng.integers(0, len(data)))
        if number % 3 == 0:
            data[at] ^= 1 << int(rng.integers(0, 8))
        elif number % 3 == 1:
            del data[at:]
        else:
            data[at:at] = rng.bytes(2)
        file.write_bytes(data)
        try:
            with reading(path) as source:
                for index in range(min(len(source), 6)):
                    try:
                        source[index]
                        outcomes.add("read")
                    except RecordError:
                        outcomes.add("record")
        except SourceError:
            outcomes.add("refused")
        file.write_bytes(whole)
    assert outcomes == {"read", "record", "refused"}
    assert json.loads((path / "zarr.json").read_text())["node_type"] == "group"


@pytest.mark.parametrize("version", [2, 3])
def test_a_chunk_that_reaches_far_beyond_its_array_is_refused(tmp_path: Path, version: Any) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=version)
    group.create_array("x", shape=(4, 10), chunks=(1, 1 << 30), dtype="u1")
    with pytest.raises(SourceError, match="chunks of all columns, 1073741824 bytes in 1; 1048576 are"):
        reading(tmp_path / "a.zarr", max_record_nbytes=1 << 20)


# ── what chunks unpack to ───────────────────────────────────────────────────────────────────────────────────

MIB = 1 << 20
BOMBS = {
    "zstd": lambda data: numcodecs.Zstd(1).encode(data),
    "blosc": lambda data: numcodecs.Blosc().encode(data),
    "lz4": lambda data: numcodecs.LZ4().encode(data),
    "gzip": gzip.compress,
    "zlib": zlib.compress,
    "bz2": bz2.compress,
    "lzma": lambda data: lzma.compress(data, preset=0),
}


def codec_of(name: str, version: int) -> Any:
    made: dict[str, Any] = {
        "zstd": zarr.codecs.ZstdCodec(),
        "blosc": zarr.codecs.BloscCodec(),
        "gzip": zarr.codecs.GzipCodec(),
    }
    ids = {"gzip": "GZip", "lz4": "LZ4", "bz2": "BZ2", "lzma": "LZMA"}
    if version == 3 and name in made:
        return made[name]
    return getattr(zarr.codecs.numcodecs if version == 3 else numcodecs, ids.get(name, name.title()))()


def bytes_of_chunks(path: Path) -> list[Path]:
    return [one for one in path.rglob("*") if one.is_file() and one.name[0].isdigit()]


def peak_nbytes(path: Path, words: str, **options: Any) -> int:
    """Return what is taken while the first sample is read in vain."""
    with reading(path, **options) as source:
        tracemalloc.start()
        try:
            with pytest.raises(RecordError, match=words):
                source[0]
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in")
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("name", BOMBS)
def test_a_chunk_that_unpacks_to_more_than_the_limit_takes_no_memory(tmp_path: Path, name: str, version: Any) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=version)
    data = RNG.integers(0, 9, (4, 100), "u1")
    group.create_array("x", data=data, chunks=(1, 100), compressors=codec_of(name, version))
    with reading(tmp_path / "a.zarr", max_record_nbytes=MIB) as source:
        for index in range(4):
            assert_same(source[index], {"x": data[index]})
    for chunk in bytes_of_chunks(tmp_path / "a.zarr"):
        chunk.write_bytes(bytes(BOMBS[name](bytes(32 * MIB))))
    words = rf"record x\[0\]: the codec '{name}' unpacks a chunk to \d+ bytes or more; 1048576 are the most"
    assert peak_nbytes(tmp_path / "a.zarr", words, max_record_nbytes=MIB) < 16 * MIB


@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed` codec")
@pytest.mark.parametrize("where", ["inner", "outer"])
def test_chunks_of_shards_are_bounded(tmp_path: Path, where: str) -> None:
    bomb = BOMBS["zstd"](bytes(32 * MIB))
    inner = zarr.codecs.ZstdCodec() if where == "inner" else zarr.codecs.Crc32cCodec()
    sharding = zarr.codecs.ShardingCodec(chunk_shape=(1, 100), codecs=[zarr.codecs.BytesCodec(), inner])
    compressors = [] if where == "inner" else [zarr.codecs.ZstdCodec()]
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    data = np.ones((4, 100), "u1")
    array = group.create_array(
        "x", shape=(4, 100), chunks=(4, 100), dtype="u1", serializer=sharding, compressors=compressors
    )
    array[:] = data
    with reading(tmp_path / "a.zarr", max_record_nbytes=MIB) as source:
        assert_same(source[3], {"x": data[3]})
    [shard] = bytes_of_chunks(tmp_path / "a.zarr")
    if where == "outer":
        shard.write_bytes(bomb)
    else:
        index = np.array([[0, len(bomb)]] * 4, "<u8").tobytes()
        shard.write_bytes(bomb + bytes(numcodecs.CRC32C(location="end").encode(np.frombuffer(index, "u1"))))
    assert peak_nbytes(tmp_path / "a.zarr", "'zstd' unpacks a chunk to 33554432", max_record_nbytes=MIB) < 16 * MIB


def zstd_frame(*blocks: tuple[int, int, bytes], has_checksum: bool = False) -> bytes:
    """Return a frame that does not state its size: of blocks, their kind (0 raw, 1 repeated), size and bytes."""
    made = [(size << 3 | kind << 1 | (at == len(blocks) - 1)) for at, (kind, size, _) in enumerate(blocks)]
    head = b"\x28\xb5\x2f\xfd" + bytes([4 * has_checksum, 0x58])
    return head + b"".join(one.to_bytes(3, "little") + data for one, (_, _, data) in zip(made, blocks, strict=True))


@pytest.mark.parametrize("version", [2, 3])
def test_chunks_of_zstd_that_do_not_state_their_size_are_bounded_by_their_blocks(tmp_path: Path, version: Any) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=version)
    data = np.arange(100, dtype="u1").reshape(1, 100)
    group.create_array("x", data=data, chunks=(1, 100), compressors=codec_of("zstd", version))
    [chunk] = bytes_of_chunks(tmp_path / "a.zarr")
    chunk.write_bytes(zstd_frame((0, 60, data[0, :60].tobytes()), (0, 40, data[0, 60:].tobytes())))
    with reading(tmp_path / "a.zarr", max_record_nbytes=MIB) as source:
        assert_same(source[0], {"x": data[0]})
    chunk.write_bytes(zstd_frame(*[(1, 128 << 10, b"x")] * 256))
    assert peak_nbytes(tmp_path / "a.zarr", "'zstd' unpacks a chunk to 33554432", max_record_nbytes=MIB) < 16 * MIB
    for odd in (b"", b"\x50\x2a\x4d\x18" + bytes(20), zstd_frame((1, 9, b"x"))[:8]):
        chunk.write_bytes(odd)
        with reading(tmp_path / "a.zarr") as source, pytest.raises(RecordError):
            source[0]


def test_a_codec_that_runs_code_or_that_nobody_can_bound_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    monkeypatch.setattr("numcodecs.pickles.ALLOW_UNSAFE_PICKLE_DECODE", True, raising=False)  # as older ones do
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    group.create_array("x", data=np.arange(4), chunks=(4,), compressors=None)
    [chunk] = bytes_of_chunks(tmp_path / "a.zarr")
    chunk.write_bytes(pickle.dumps(Evil()))
    stated = tmp_path / "a.zarr" / "x" / ".zarray"
    whole = json.loads(stated.read_text())
    for name, filters in {
        "pickle": [{"id": "vlen-utf8"}, {"id": "pickle", "protocol": 5}],
        "json2": [{"id": "vlen-utf8"}, {"id": "json2"}],
        "categorize": [{"id": "vlen-utf8"}, {"id": "categorize", "labels": ["a"], "dtype": "|O", "astype": "|u1"}],
    }.items():
        stated.write_text(json.dumps(whole | {"dtype": "|O", "fill_value": "", "filters": filters}))
        with pytest.raises(SourceError, match=f"array 'x' is packed by the codec '{name}', and nobody can tell"):
            reading(tmp_path / "a.zarr")
    assert not (tmp_path / "ran").exists()


def test_a_codec_that_is_named_is_let_through(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    data = RNG.integers(0, 9, (4, 100), "u1")
    group.create_array("x", data=data, chunks=(1, 100), filters=[numcodecs.Base64()], compressors=None)
    with pytest.raises(SourceError, match=r"pass more_codecs=\['base64'\] if you trust who wrote it"):
        reading(tmp_path / "a.zarr")
    with reading(tmp_path / "a.zarr", more_codecs=["base64"]) as source:
        assert_same(source[3], {"x": data[3]})


def test_filters_that_make_much_of_little_are_bounded(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    data = np.arange(400, dtype="<i8").reshape(4, 100)
    delta = numcodecs.Delta("<i8", "<i2")
    group.create_array("x", data=data, chunks=(1, 100), filters=delta, compressors=numcodecs.Zlib())
    with reading(tmp_path / "a.zarr", max_record_nbytes=MIB) as source:
        assert_same(source[3], {"x": data[3]})
    for chunk in bytes_of_chunks(tmp_path / "a.zarr"):
        chunk.write_bytes(zlib.compress(bytes(MIB)))
    assert peak_nbytes(tmp_path / "a.zarr", "'delta' unpacks a chunk to 8388608", max_record_nbytes=MIB) < 4 * MIB
    stated = tmp_path / "a.zarr" / "x" / ".zarray"
    whole = json.loads(stated.read_text())
    stated.write_text(json.dumps(whole | {"filters": [{"id": "packbits"}] * 8}))
    assert peak_nbytes(tmp_path / "a.zarr", "'packbits' unpacks a chunk to 8388608", max_record_nbytes=MIB) < 4 * MIB
    wide = {"id": "astype", "encode_dtype": "|i1", "decode_dtype": "<U100000"}
    stated.write_text(json.dumps(whole | {"filters": [wide]}))
    with pytest.raises(SourceError, match="the filter 'astype' names types that are no numbers: int8, <U100000"):
        reading(tmp_path / "a.zarr")


@pytest.mark.parametrize("version", [2, 3])
def test_a_chunk_of_texts_states_no_more_of_them_than_it_has_place_for(tmp_path: Path, version: Any) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=version)
    group.create_array("x", shape=(4,), chunks=(4,), dtype=str, compressors=None)[:] = ["a", "bc", "d", ""]
    with reading(tmp_path / "a.zarr") as source:
        assert [sample["x"] for sample in source] == ["a", "bc", "d", ""]
    [chunk] = bytes_of_chunks(tmp_path / "a.zarr")
    chunk.write_bytes((MIB).to_bytes(4, "little") + b"\2\0\0\0ab" * MIB)
    assert peak_nbytes(tmp_path / "a.zarr", "a chunk of 4 values states 1048576") < 32 * MIB


def test_a_row_of_very_many_chunks_or_of_a_long_fill_value_is_refused(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    group.create_array("x", shape=(4, 1 << 20), chunks=(1, 1), dtype="u1")
    with pytest.raises(SourceError, match="array 'x' is read in chunks of all columns, 4296011776 bytes in 1048576"):
        reading(tmp_path / "a.zarr")
    group = zarr.open_group(tmp_path / "b.zarr", mode="w")
    group.create_array("x", shape=(1000,), chunks=(1000,), dtype=str, fill_value="x" * MIB)
    with pytest.raises(SourceError, match=r"array 'x' is read in chunks of all columns, \d+ bytes in 1"):
        reading(tmp_path / "b.zarr", max_record_nbytes=64 * MIB)
