"""Tar shards: round trips, WebDataset and tarfile in both directions, hostile archives."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import random
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from sample_files import DTYPES, assert_same, datasets, mutated, write_samples
from torch.utils.data import DataLoader as TorchDataLoader
from webdataset.autodecode import Decoder
from webdataset.tariterators import group_by_keys, tar_file_expander

import penstock
from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.data.formats.images import image_codec
from penstock.data.formats.tar import source as tar_source
from penstock.data.formats.tar.fields import decode_npy, encode_npy, why_unsupported
from penstock.data.formats.tar.headers import END, note
from penstock.data.schema import Field, Schema, schema_of
from penstock.data.storage.sequential_reader import READ_NBYTES


def archived(path: Path, *members: tuple[str, bytes], form: int = tarfile.PAX_FORMAT, mode: str = "w") -> str:
    """An archive of Python's tarfile."""
    with tarfile.open(path, mode, format=form) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return str(path)


def found_by_webdataset(path: str) -> list[dict[str, Any]]:
    with open(path, "rb") as file:
        found = list(group_by_keys(tar_file_expander([{"url": path, "stream": file}])))
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in found]


# ── round trips ─────────────────────────────────────────────────────────────────────────────────────────────


@given(datasets(), st.sampled_from(["a.tar", "a.tar.gz", "a.tgz"]))
@settings(deadline=None)
def test_samples_come_back_as_they_were(made: tuple[Schema, list[dict[str, Any]]], name: str) -> None:
    schema, samples = made
    assert why_unsupported(schema) == ""
    with tempfile.TemporaryDirectory() as folder:
        stream = penstock.open(write_samples(Path(folder, name), samples, schema))
        found = list(stream)
        assert len(found) == len(samples)
        for one, other in zip(samples, found, strict=True):
            assert_same(one, other)
            assert list(other) == list(schema)


def test_keys_are_kept_where_samples_have_them(tmp_path: Path) -> None:
    samples = [
        {"__key__": f"folder/{name}", "jpg": b"\xff", "cls": np.int64(number)} for number, name in enumerate("abc")
    ]
    samples.append({"__key__": "x" * 300, "jpg": b"", "cls": np.int64(-1)})
    path = str(write_samples(tmp_path / "a.tar", samples))
    assert list(penstock.open(path)) == samples
    assert list(penstock.open(path, fields=["cls", "__key__"])) == [
        {"cls": s["cls"], "__key__": s["__key__"]} for s in samples
    ]
    with tarfile.open(path) as archive:
        assert archive.getnames()[:3] == ["folder/a.jpg", "folder/a.cls", "folder/b.jpg"]


def test_bytes_are_not_given_a_suffix_that_holds_something_else(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"'x\.npy' would not hold bytes; choose another extension for 'x'"):
        tar_source.TarWriter(str(tmp_path / "a.tar"), {"x": Field("bytes")}, extensions={"x": "npy"})


@pytest.mark.parametrize("key", ["", "a.b", "__x__/a", "a/.b", "\0", "\ud800", "same", "/etc/a", "../a", "a/../../b"])
def test_keys_that_name_nothing_are_refused(tmp_path: Path, key: str) -> None:
    writer = tar_source.TarWriter(str(tmp_path / "a.tar"), {"__key__": Field("text"), "x": Field("text")})
    writer.write({"__key__": "same", "x": ""})
    with pytest.raises(SourceError, match="cannot name a sample"):
        writer.write({"__key__": key, "x": ""})
    writer.close()


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({}, "no fields"),
        ({"a/b": Field("text")}, "part of a path"),
        ({"a\nb": Field("text")}, "part of a path"),
        ({"\ud800": Field("text")}, "part of a path"),
        ({"é" * 50: Field("text")}, "longer than 80 bytes"),
        ({"x": Field("text"), "x.txt": Field("text")}, "give one member"),
        ({"x": Field("text"), "X": Field("text")}, "give one member"),
        ({"a;b": Field("text")}, "of a choice of members"),
        ({"__key__": Field("bytes"), "x": Field("text")}, "has to be text"),
        ({"x": Field("array", "datetime64[ns]", (1,))}, "datetime64"),
    ],
)
def test_what_cannot_come_back_is_not_written(tmp_path: Path, schema: Schema, why: str) -> None:
    assert why in why_unsupported(schema)
    with pytest.raises(SourceError, match="cannot be written"):
        tar_source.TarWriter(str(tmp_path / "a.tar"), schema)


def test_a_sample_of_another_schema_is_not_written(tmp_path: Path) -> None:
    writer = tar_source.TarWriter(str(tmp_path / "a.tar"), {"x": Field("array", "int8", (2,)), "t": Field("text")})
    with pytest.raises(SourceError, match=r"'x' is int8\[3\], and has to be int8\[2\]"):
        writer.write({"x": np.zeros(3, np.int8), "t": ""})
    with pytest.raises(SourceError, match="UTF-8"):
        writer.write({"x": np.zeros(2, np.int8), "t": "\ud800"})
    writer.close()


def test_the_same_samples_make_the_same_archive(tmp_path: Path) -> None:
    sample = {"x": np.arange(3), "t": "a"}
    for suffix in (".tar", ".tar.gz"):
        one, other = (write_samples(tmp_path / f"{name}{suffix}", [sample]).read_bytes() for name in "ab")
        assert one == other


# ── .npy ────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    npst.arrays(st.sampled_from([*DTYPES, "complex64", ">i4", ">f8"]), npst.array_shapes(min_dims=0, min_side=0)),
    st.booleans(),
)
@settings(deadline=None)
def test_npy_is_numpys(array: np.ndarray, is_fortran: bool) -> None:
    file = io.BytesIO()
    np.save(file, np.asarray(array, order="F" if is_fortran else "C"))
    found = decode_npy(file.getvalue())
    assert found.tobytes() == array.astype(array.dtype.newbyteorder("=")).tobytes()
    assert found.shape == array.shape
    again = np.load(io.BytesIO(encode_npy(array)))
    assert again.tobytes() == found.tobytes()
    assert (again.dtype, again.shape) == (found.dtype, found.shape)


@pytest.mark.parametrize("value", [np.array([{}], object), np.array([(1, 2)], "i4,i4"), np.array(["a"])])
def test_npy_holds_numbers_only(value: np.ndarray) -> None:
    file = io.BytesIO()
    np.save(file, value, allow_pickle=True)
    with pytest.raises(ValueError, match="no array of numbers"):
        decode_npy(file.getvalue())


@pytest.mark.parametrize(
    "shape",
    ["(9999999999999,)", "(99999999999999999999999, 0)", "(1,) * 3", f"({'1,' * 99})", "(9" + "9" * 5000 + ",)"],
)
def test_shapes_of_npy_take_no_memory(shape: str) -> None:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    with pytest.raises(ValueError, match=r"\.npy"):
        decode_npy(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)


# ── archives of others, and ours for them ───────────────────────────────────────────────────────────────────


@pytest.fixture
def theirs(tmp_path: Path) -> str:
    path = tmp_path / "theirs.tar"
    with webdataset.TarWriter(str(path)) as writer:
        for number in range(20):
            writer.write(
                {
                    "__key__": f"train/{number:04d}",
                    "jpg": bytes([255, number]),
                    "cls": number,
                    "txt": f"caption é {number}",
                    "json": {"n": [number]},
                    "npy": np.full((2, number), number, np.float32),
                    "seg.npy": np.array(number),
                    "pyd": [1],
                }
            )
    return str(path)


def test_what_webdataset_writes_is_read(theirs: str) -> None:
    found = list(penstock.open(theirs))
    for number, sample in enumerate(found):
        assert type(sample.pop("pyd")) is bytes
        expected = {
            "__key__": f"train/{number:04d}",
            "jpg": bytes([255, number]),
            "cls": number,
            "txt": f"caption é {number}",
            "json": json.dumps({"n": [number]}),
            "npy": np.full((2, number), number, np.float32),
            "seg.npy": np.int64(number),
        }
        assert_same(expected, sample)
    assert len(found) == 20
    assert next(iter(penstock.open(theirs, parse_json=True)))["json"] == {"n": [0]}


def test_samples_are_those_that_webdataset_finds(theirs: str) -> None:
    assert list(penstock.open(theirs, decode=False)) == found_by_webdataset(theirs)


def test_webdataset_reads_our_archives(tmp_path: Path) -> None:
    samples = [
        {"x": np.full((2, n), n, np.int16), "label": np.int64(-n), "text": f"é{n}", "image": b"\xff"} for n in range(5)
    ]
    schema = {**schema_of(samples[0]), "x": Field("array", "int16", (2, None))}
    path = write_samples(tmp_path / "a.tar", samples, schema, extensions={"image": "jpg"})
    found = [Decoder([])(sample) for sample in found_by_webdataset(path)]
    assert [sample["__key__"] for sample in found] == [f"{n:09d}" for n in range(5)]
    for one, other in zip(samples, found, strict=True):
        np.testing.assert_array_equal(one["x"], other["x.npy"])
        assert one["label"] == other["label.cls"]
        assert one["text"] == other["text"]
        assert one["image"] == other["image.jpg"]
    assert [sample["image"] for sample in penstock.open(path)] == [b"\xff"] * 5


NAMES = [
    "a.jpg",
    "a.x.JPG",
    "a.cls",
    "b/a.jpg",
    "b/.hidden",
    "b/c.tar.gz",
    "__meta__",
    "__m__/x.jpg",
    "./d.txt",
    "é.jpg",
]
NAMES += [f"{'long' * 30}/{number}.{'suffix' * number}" for number in range(1, 30, 7)]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_archives_of_tarfile_give_what_webdataset_finds(tmp_path: Path, form: int, mode: str) -> None:
    names = [name for name in NAMES if form != tarfile.USTAR_FORMAT or len(name) < 180]
    path = archived(tmp_path / "a.tar", *((name, name.encode() * 3) for name in names), form=form, mode=mode)
    expected = [one for one in found_by_webdataset(path) if one["__key__"] != "b/"]  # a hidden file has this key there
    assert list(penstock.open(path, decode=False)) == expected


def with_links(path: Path, *kinds: tuple[str, bytes]) -> Path:
    """An archive of members without data, and of "../../a.txt" behind them."""
    with tarfile.open(path, "w") as archive:
        for name, kind in kinds:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
        info = tarfile.TarInfo("../../a.txt")
        info.size = 2
        archive.addfile(info, io.BytesIO(b"ok"))
    return path


def test_members_without_a_suffix_are_named(tmp_path: Path) -> None:
    path = archived(tmp_path / "a.tar", ("images/0001", b"x"), ("images/0002", b"y"), ("__meta__/a", b""))
    with pytest.raises(RecordError, match=r"images/0001 .*: 2 members have no suffix.*rename them, as in 0001\.jpg"):
        list(penstock.open(path))
    path = archived(tmp_path / "b.tar", ("README", b"x"), ("0001.txt", b"y"))
    with pytest.warns(UserWarning, match=r"left out: 'README' \.\.\. of .*b\.tar: 1 members have no suffix"):
        assert list(penstock.open(path)) == [{"__key__": "0001", "txt": "y"}]


def test_folders_and_devices_are_left_out(tmp_path: Path) -> None:
    path = with_links(tmp_path / "a.tar", ("a.d", tarfile.DIRTYPE), ("a.f", tarfile.FIFOTYPE))
    assert list(penstock.open(path)) == [{"__key__": "../../a", "txt": "ok"}]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_sample_with_a_link_is_broken_and_not_without_it(tmp_path: Path, kind: bytes) -> None:
    path = with_links(tmp_path / "a.tar", ("b.txt", tarfile.REGTYPE), ("b.jpg", kind))
    with pytest.warns(UserWarning, match="its member 'b.jpg' is a link to '/etc/passwd', and has no data; make"):
        assert list(penstock.open(path, errors="skip")) == [{"__key__": "../../a", "txt": "ok"}]
    assert [sample["txt"] for sample in penstock.open(path, fields=["txt"])] == ["", "ok"]


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("key", ["b", "a"])
def test_archives_that_were_put_together_are_read_as_tarfile_does_it(tmp_path: Path, mode: str, key: str) -> None:
    parts = [
        archived(tmp_path / f"{number}.tar", (f"{name}.txt", name.encode()), (f"{name}.x", b"x"), mode=mode)
        for number, name in enumerate(["a", key, "c"])
    ]
    path = tmp_path / "all.tar"
    path.write_bytes(b"".join(Path(part).read_bytes() for part in parts))
    with tarfile.open(path, ignore_zeros=True) as archive:
        expected = [archive.extractfile(member).read().decode() for member in archive if member.name.endswith("txt")]
    found = list(penstock.open(path))
    assert [sample["txt"] for sample in found] == expected == ["a", key, "c"]
    assert [sorted(sample) for sample in found] == [["__key__", "txt", "x"]] * 3


def test_what_follows_the_end_and_is_no_archive_is_told(tmp_path: Path) -> None:
    path = archived(tmp_path / "a.tar", ("a.txt", b"a"))
    with open(path, "ab") as file:
        file.write(b"signature")
    with pytest.warns(UserWarning, match="the checksum of its header is wrong"):
        assert list(penstock.open(path, errors="skip")) == [{"__key__": "a", "txt": "a"}]


def test_archives_of_ours_that_were_put_together_are_read_each_by_its_own_schema(tmp_path: Path) -> None:
    parts = [write_samples(tmp_path / f"{number}.tar", [{"x": one}]) for number, one in enumerate([np.int8(1), "b"])]
    (tmp_path / "all.tar").write_bytes(b"".join(part.read_bytes() for part in parts))
    assert list(penstock.open(tmp_path / "all.tar")) == [{"x": np.int8(1)}, {"x": "b"}]


def test_large_sizes_and_pax_sizes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5
    info = tarfile.TarInfo("a.bin")
    info.size = len(data)
    info.pax_headers = {"size": str(len(data)), "comment": "hello"}
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO(data))
    assert list(penstock.open(tmp_path / "a.tar")) == [{"__key__": "a", "bin": data}]


# ── which samples, which fields ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("first", "step"), [(0, 1), (3, 1), (1, 4), (19, 9), (60, 2)])
def test_every_nth_sample(theirs: str, first: int, step: int) -> None:
    stream = penstock.open(theirs, fields=["cls"])
    found = [sample["cls"] for sample in stream.read(stream.shards[0], first, step)]
    assert found == list(range(20))[first::step]


def test_large_members_are_skipped_and_read(tmp_path: Path) -> None:
    big = [bytes([n]) * (READ_NBYTES * n // 2 + n) for n in range(6)]
    for mode in ("w", "w:gz"):
        path = archived(tmp_path / "a.tar", *((f"{n}.bin", value) for n, value in enumerate(big)), mode=mode)
        stream = penstock.open(path)
        for step in (1, 2, 3):
            assert [sample["bin"] for sample in stream.read(stream.shards[0], 0, step)] == big[::step]


def test_fields_are_suffixes(theirs: str) -> None:
    sample = next(iter(penstock.open(theirs, fields={"image": "png;jpg", "y": "cls", "name": "__key__"})))
    assert sample == {"image": b"\xff\x00", "y": 0, "name": "train/0000"}
    with pytest.raises(RecordError, match="record train/0000 at byte 0: it has no member 'png'"):
        next(iter(penstock.open(theirs, fields=["png"])))
    with pytest.raises(RecordError, match="no field 'z'"):
        next(iter(penstock.open(write_samples(Path(theirs).parent / "b.tar", [{"x": "a"}]), fields=["z"])))


def test_pictures_are_decoded_where_that_is_asked_for(tmp_path: Path) -> None:
    pixels = np.arange(3 * 5 * 7, dtype=np.uint8).reshape(3, 5, 7)
    data = image_codec.encode(pixels)
    other = archived(tmp_path / "a.tar", ("a.PNG", data), ("b.png", data[:50]), ("c.bin", data))
    ours = write_samples(tmp_path / "b.tar", [{"image": data, "raw": data}], extensions={"image": "png"})
    with pytest.warns(UserWarning, match="record b at byte 1024: its member 'png' cannot be decoded"):
        first, last = penstock.open(other, decode="images", errors="skip")
    np.testing.assert_array_equal(first["png"], pixels)
    assert last["bin"] == data
    (sample,) = penstock.open(ours, decode="images")
    np.testing.assert_array_equal(sample["image"], pixels)
    assert sample["raw"] == data
    with pytest.raises(OptionError, match="decode='pil'"):
        penstock.open(ours, decode="pil")


@pytest.mark.parametrize("loader", [TorchDataLoader, penstock.DataLoader])
def test_loaders_share_samples_out(theirs: str, loader: Any) -> None:
    stream = penstock.open([theirs, theirs], fields=["cls", "seg.npy"]).shuffle(seed=1)
    batches = list(loader(stream, batch_size=4, num_workers=3))
    assert sorted(torch.cat([batch["cls"] for batch in batches]).tolist()) == sorted([*range(20)] * 2)
    assert batches[0]["seg.npy"].dtype == torch.int64


def test_a_pass_that_is_given_up_leaves_nothing_open(theirs: str) -> None:
    stream = penstock.open([theirs] * 3, fields=["cls"]).shuffle(seed=0, shuffle_block=2)
    assert next(iter(stream))
    stream.close()


def test_remote_archives_are_read(theirs: str, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/archives/a.tar", Path(theirs).read_bytes())
    memory.pipe("/archives/b.tgz", gzip.compress(Path(theirs).read_bytes()))
    big = archived(tmp_path / "c.tar", *((f"{n}.cls", str(n).encode().zfill(READ_NBYTES * 2)) for n in range(3)))
    memory.pipe("/archives/c.tar", Path(big).read_bytes())
    try:
        found = [
            sample["cls"] for sample in penstock.open("memory://archives/*", format="tar", fields=["cls"], decode=False)
        ]
        assert [int(data) for data in found[:40]] == [*range(20)] * 2
        assert len(found) == 43
        stream = penstock.open("memory://archives/c.tar", decode=False)
        assert [sample["__key__"] for sample in stream.read(stream.shards[0], 0, 2)] == ["0", "2"]
    finally:
        memory.rm("/archives", recursive=True)


# ── broken archives ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ([("a.txt", b"1"), ("a.txt", b"2")], "two of its members"),
        ([("a.TXT", b"1"), ("a.txt", b"2")], "the same suffix"),
        ([("a.txt", b"\xff")], "'txt' cannot be decoded"),
        ([("a.cls", b"7.5")], "'cls' cannot be decoded"),
        ([("a.cls", b"9" * 30)], "64 bits"),
        ([("a.cls", b"9" * 5000)], "'cls' cannot be decoded"),
        ([("a.npy", b"\x93NUMPY")], "no .npy file"),
        ([("a.json", b"[" * 100_000)], "'json' cannot be decoded"),
        ([("a.bin", bytes(5000)), ("a.x", bytes(5000))], "8000 are the most"),
    ],
)
def test_a_broken_sample_is_left_out(tmp_path: Path, members: list[tuple[str, bytes]], why: str) -> None:
    path = archived(tmp_path / "a.tar", ("0.txt", b"0"), *members, ("b.txt", b"b"))
    stream = penstock.open(path, errors="skip", parse_json=True, max_record_nbytes=8000 if "8000" in why else 1 << 30)
    with pytest.warns(UserWarning, match=rf"record a at byte 1024: .*{why}"):
        assert [sample["txt"] for sample in stream] == ["0", "b"]
    assert stream.skipped == 1


def changed(path: str, at: int, data: bytes, mends: bool = True) -> None:
    """Write over an archive's bytes, and mend the checksum of the header there."""
    whole = bytearray(Path(path).read_bytes())
    whole[at : at + len(data)] = data
    begin = at - at % 512
    if mends:
        whole[begin + 148 : begin + 156] = b" " * 8
        whole[begin + 148 : begin + 156] = b"%06o\0 " % sum(whole[begin : begin + 512])
    Path(path).write_bytes(whole)


@pytest.mark.parametrize(
    ("at", "data", "why"),
    [
        (1024 + 5, b"x", "the checksum of its header is wrong"),
        (1024 + 124, b"77777777777\0", "8589934591 bytes, and the file"),
        (1024 + 124, b"\x80" + b"\xff" * 11, "bytes, and the file"),
        (1024 + 124, b"\xff" * 12, "no number, or a negative one"),
        (1024 + 124, b"-0000000001\0", "no number, or a negative one"),
        (1024 + 124, b"0_000000001\0", "no number, or a negative one"),
        (1024 + 156, b"S", "it is sparse"),
        (1024 + 156, b"x", "no record at byte 0"),
    ],
)
def test_after_a_broken_header_the_rest_is_lost(tmp_path: Path, at: int, data: bytes, why: str) -> None:
    path = archived(tmp_path / "a.tar", ("0.txt", b"0"), ("a.txt", b"a"), ("b.txt", b"b"))
    changed(path, at, data, mends="checksum" not in why)
    for packed in (False, True):
        if packed:
            Path(path).write_bytes(gzip.compress(Path(path).read_bytes()))
            why = why.replace("bytes, and the file", "")
        with pytest.warns(UserWarning, match=f"at byte 1024: .*{'.' if packed and 'checksum' not in why else why}"):
            assert len(list(penstock.open(path, errors="skip"))) <= 1


def test_sparse_members_of_pax_are_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.bin")
    info.pax_headers = {"GNU.sparse.major": "1"}
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info)
    with pytest.raises(RecordError, match="it is sparse"):
        list(penstock.open(tmp_path / "a.tar"))


def test_huge_pax_headers_are_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.bin")
    info.pax_headers = {"x": "y" * (1 << 21)}
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info)
    with pytest.raises(RecordError, match="bytes of records; 1048576 are the most"):
        list(penstock.open(tmp_path / "a.tar"))


@pytest.mark.parametrize("packed", [False, True])
def test_a_truncated_archive_is_told(theirs: str, packed: bool) -> None:
    whole = Path(theirs).read_bytes()
    end = len(whole.rstrip(b"\0"))
    for cut in (1, 300, 512, 700, 1024, end, end - 300, end // 512 * 512 + 512):
        Path(theirs).write_bytes(gzip.compress(whole[:cut]) if packed else whole[:cut])
        with pytest.raises(RecordError, match="the file"):
            list(penstock.open(theirs))
        stream = penstock.open(theirs)
        with pytest.raises(RecordError, match="the file"):  # not even where nobody wants those samples
            list(stream.read(stream.shards[0], 10_000, 1))
    Path(theirs).write_bytes(gzip.compress(whole)[:300])
    with pytest.raises(RecordError, match="end early"):
        list(penstock.open(theirs))


@pytest.mark.parametrize(
    "text",
    [
        '{"penstock":3,"suffixes":{}}',
        '{"penstock":2}',
        '{"penstock":' + "[" * 9999,
        '{"penstock":2,"suffixes":{"x":1}}',
    ],
)
def test_a_comment_that_makes_no_sense_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.tar").write_bytes(note(text) + END)
    with pytest.raises(RecordError, match=r"its comment|another version"):
        list(penstock.open(tmp_path / "a.tar"))
    assert list(penstock.open(tmp_path / "a.tar", decode=False)) == []


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mends", [False, True])
def test_mutants_give_nothing_but_errors_of_ours(tmp_path: Path, packed: bool, mends: bool) -> None:
    rng = random.Random(1)
    ours = Path(
        write_samples(tmp_path / "o.tar", [{"x": np.ones((2, n), np.int16), "n": n, "t": "é"} for n in (3, 3)])
    ).read_bytes()
    other = Path(
        archived(tmp_path / "t.tar", ("a.json", b"[1]"), ("a.cls", b"7"), (f"{'b' * 120}.npy", encode_npy(np.ones(3))))
    ).read_bytes()
    mutants = tmp_path / "m.tar"
    for whole in itertools.islice(itertools.cycle([ours, other]), 250):
        data = mutated(whole, rng)
        if mends:  # so that what a header says is looked at
            blocks = [bytearray(data[at : at + 512]) for at in range(0, len(data), 512)]
            for block in blocks:
                if block[257:262] == b"ustar":
                    block[148:156] = b" " * 8
                    block[148:156] = b"%06o\0 " % sum(block)
            data = b"".join(blocks)
        mutants.write_bytes(mutated(gzip.compress(data), rng) if packed else data)
        drawing = iter(penstock.open(mutants, parse_json=True))
        for _ in range(50):
            try:
                next(drawing)
            except SourceError:
                pass
            except StopIteration:
                break
        else:
            pytest.fail("it does not end")


def test_a_sample_of_very_many_empty_members_is_too_large(tmp_path: Path) -> None:
    path = archived(tmp_path / "a.tar", *((f"a.{number}", b"") for number in range(100)), ("b.bin", b"1"))
    with pytest.raises(RecordError, match=r"10752 bytes; 10240 are the most \(max_record_nbytes\)"):
        next(iter(penstock.open(path, max_record_nbytes=10 << 10)))
    stream = penstock.open(path, max_record_nbytes=10 << 10, errors="skip")
    with pytest.warns(UserWarning, match="are the most"):
        assert [sample["__key__"] for sample in stream] == ["b"]
