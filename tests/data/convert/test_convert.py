"""A conversion is exact, resumes after a kill, and replaces nothing without `overwrite`."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from effort import places
from hypothesis import given, settings
from hypothesis import strategies as st
from other_users import NOBODY, needs_root
from PIL import Image
from sample_files import assert_all_same, assert_same, datasets, samples_in, write_samples

from penstock.core.errors import OptionError, RecordError, SourceError, WorkerError
from penstock.data.convert import Conversion, Progress, convert
from penstock.data.convert.canonical_bytes import DatasetChecksum, encode_sample
from penstock.data.convert.partial_folder import PartialFolder
from penstock.data.convert.target import Target
from penstock.data.convert.workers import WorkerPool
from penstock.data.format_registry import format_named
from penstock.data.formats.images.source import ImageFolderWriter
from penstock.data.formats.text.jsonl import JsonLinesWriter
from penstock.data.formats.tfrecord import features
from penstock.data.open import open as open_source
from penstock.data.schema import Field, Sample

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("preloaded_python")]

zarr.config.set({"threading.max_workers": 1})
with tempfile.TemporaryDirectory() as _folder:  # the package's threads stay for as long as the process does
    zarr.create_array(f"{_folder}/a.zarr", data=np.zeros(8), chunks=(2,))


def make_samples(count: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        {
            "x": rng.standard_normal((3, int(rng.integers(0, 9)))).astype(np.float32),
            "y": np.int64(number),
            "t": f"é {number}",
            "b": rng.bytes(int(rng.integers(0, 99))),
        }
        for number in range(count)
    ]


def checksum(samples: list[Sample]) -> str:
    checksum = DatasetChecksum()
    for sample in samples:
        checksum.add(sample)
    return checksum.to_text()


@pytest.fixture
def tfrecord(tmp_path: Path) -> Path:
    return write_samples(tmp_path / "in.tfrecord", make_samples(300))


# ── what comes out ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("workers", [0, 3])
def test_samples_come_out_equal_and_in_order(tmp_path: Path, tfrecord: Path, workers: int) -> None:
    there = convert(tfrecord, tmp_path / "out.lmdb", workers=workers, verify=True)
    back = convert(tmp_path / "out.lmdb", tmp_path / "back.tfrecord", workers=workers)
    assert_all_same(samples_in(tmp_path / "out.lmdb"), make_samples(300))
    assert_all_same(samples_in(tmp_path / "back.tfrecord"), make_samples(300))
    assert there.checksum == back.checksum == checksum(make_samples(300))
    assert (there.samples, there.skipped, there.resumed, there.verified) == (300, 0, 0, True)
    assert there.files == (str(tmp_path / "out.lmdb"),)
    assert sorted(os.listdir(tmp_path)) == ["back.tfrecord", "in.tfrecord", "out.lmdb"]


def test_a_source_that_says_what_it_holds_is_read_once(tmp_path: Path) -> None:
    source = write_samples(tmp_path / "in.hdf5", make_samples(40))
    heard: list[Progress] = []
    convert(source, tmp_path / "out.lmdb", workers=2, progress=heard.append, verify=True)
    assert max(one.samples for one in heard if one.stage == "scanning") == 0
    assert_all_same(samples_in(tmp_path / "out.lmdb"), make_samples(40))


RICH = ("hdf5", "parquet", "arrow", "lmdb", "tar", "jsonl", "tfrecord")
ENDINGS = {"hdf5": ".h5", "images": "", "tokens": ".npy"}


def rng_images(count: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    return [
        {"image": rng.integers(0, 255, (3, 8, 9), np.uint8), "label": np.int64(rng.integers(4))} for _ in range(count)
    ]


def rng_tokens(count: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    return [{"tokens": rng.integers(0, 60_000, int(rng.integers(1, 30))).astype(np.uint16)} for _ in range(count)]


def rng_flat(count: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    return [{"y": number, "t": f'é,\n"{number}', "f": float(rng.standard_normal())} for number in range(count)]


@pytest.mark.parametrize(
    ("samples", "kinds"),
    [
        (make_samples(24), (*RICH, "zarr")),
        (rng_flat(24), (*RICH, "csv")),
        (rng_tokens(24), (*RICH, "tokens")),
        (rng_images(24), (*RICH, "images")),
    ],
    ids=["rich", "flat", "tokens", "images"],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_samples_go_from_any_format_to_any_other_and_come_back_equal(
    tmp_path: Path, samples: list[Sample], kinds: tuple[str, ...], seed: int
) -> None:
    order = list(kinds)
    random.Random(seed).shuffle(order)
    at, format = write_samples(tmp_path / "in.tfrecord", samples), "tfrecord"
    for number, kind in enumerate(order):
        ending = ENDINGS.get(kind, f".{kind}")
        out = tmp_path / f"{number}{ending}"
        done = convert(at, out, format=format, to=kind, workers=0, verify=True)
        assert (done.samples, done.checksum) == (24, checksum(samples)), kind
        sharded = tmp_path / f"{number}s{ending}"
        done = convert(at, sharded, format=format, to=kind, workers=0, verify=True, shards=2)
        assert (len(done.files), done.checksum) == (2, checksum(samples)), kind
        at, format = out, kind


def test_companions_of_files_get_their_names_too(tmp_path: Path) -> None:
    source = write_samples(tmp_path / "in.tfrecord", rng_tokens(50))
    convert(source, tmp_path / "out.npy", shards=2, workers=0)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "in.tfrecord",
        "out-000000.idx.npy",
        "out-000000.npy",
        "out-000001.idx.npy",
        "out-000001.npy",
    ]
    (tmp_path / "other.idx.npy").write_bytes(b"precious")
    with pytest.raises(SourceError, match=r"other\.idx\.npy exists; move it away"):
        convert(source, tmp_path / "other.npy", workers=0)
    assert not (tmp_path / "other.npy").exists()
    (tmp_path / "other.idx.npy").unlink()
    assert convert(source, tmp_path / "other.npy", workers=0).samples == 50


def test_a_source_is_warned_of_once_however_often_it_is_opened(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "pictures" / name / "0.png")
    with pytest.warns(UserWarning, match="cat and dog") as warned:
        convert(tmp_path / "pictures", tmp_path / "out.tar", workers=0, verify=True)
    assert len(warned) == 1


def test_encoded_pictures_are_copied_as_they_are(tmp_path: Path) -> None:
    convert(write_samples(tmp_path / "in.tfrecord", rng_images(9)), tmp_path / "pictures", to="images", workers=0)
    done = convert(tmp_path / "pictures", tmp_path / "out.tar", fields=["encoded", "label"], workers=0, verify=True)
    assert done.samples == 9
    sample = next(iter(open_source(str(tmp_path / "out.tar"))))
    assert sample["encoded"].startswith(b"\x89PNG")


@pytest.mark.parametrize(("sizes", "shape"), [([4] * 5, (3, 4, 6)), ([4, 4, 5], (3, None, None))])
def test_pictures_of_one_size_become_one_array(tmp_path: Path, sizes: list[int], shape: tuple[int | None, ...]) -> None:
    pictures = [{"image": np.full((3, height, 6), number, np.uint8)} for number, height in enumerate(sizes)]
    writer = ImageFolderWriter(str(tmp_path / "pictures"), {"image": Field("array", "uint8", (3, None, 6))})
    for picture in pictures:
        writer.write(picture)
    writer.close()
    convert(tmp_path / "pictures", tmp_path / "out.h5", workers=0)
    source = open_source(tmp_path / "out.h5")
    assert source.schema["image"].shape == shape
    assert len(source) == len(sizes)
    source.close()


def test_many_files_come_in_and_many_go_out(tmp_path: Path) -> None:
    samples = make_samples(101)
    for number, first in enumerate(range(0, 101, 25)):
        write_samples(tmp_path / f"in-{number}.tfrecord", samples[first : first + 25])
    done = convert(str(tmp_path / "in-{0..4}.tfrecord"), tmp_path / "out.tfrecord", shards=3, workers=2)
    assert done.files == tuple(str(tmp_path / f"out-00000{number}.tfrecord") for number in range(3))
    assert [len(samples_in(name)) for name in done.files] == [33, 34, 34]
    assert_all_same(samples_in(done.files), samples)
    braced = convert(tmp_path / "in-*.tfrecord", tmp_path / "o-{a,b}.tfrecord", workers=0)
    assert braced.files == (str(tmp_path / "o-a.tfrecord"), str(tmp_path / "o-b.tfrecord"))
    assert_all_same(samples_in(braced.files), samples)


def test_files_are_about_as_large_as_they_may_be(tmp_path: Path, tfrecord: Path) -> None:
    done = convert(tfrecord, tmp_path / "out.tfrecord", shard_size="10KiB", workers=0)
    sizes = [os.path.getsize(name) for name in done.files]
    assert len(sizes) > 3
    assert 6 << 10 < min(sizes) <= max(sizes) < 30 << 10  # with what a record has beside its values
    assert_all_same(samples_in(done.files), make_samples(300))


def test_workers_read_for_a_file_that_they_are_too_many_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.data.convert.conversion._READ_NBYTES", 1000)
    source, read = write_samples(tmp_path / "in.hdf5", make_samples(90)), list[str]()
    run_in_order = WorkerPool.run_in_order
    monkeypatch.setattr(WorkerPool, "run_in_order", lambda *words: read.append(words[1]) or run_in_order(*words))
    done = convert(source, tmp_path / "out.tfrecord", workers=2, verify=True)
    assert (done.samples, done.checksum, read) == (90, checksum(make_samples(90)), ["reading part"])
    assert_all_same(samples_in(tmp_path / "out.tfrecord"), make_samples(90))


def test_fields_are_chosen_and_renamed(tmp_path: Path, tfrecord: Path) -> None:
    convert(tfrecord, tmp_path / "out.lmdb", fields={"label": "y"}, workers=0, verify=True)
    assert samples_in(tmp_path / "out.lmdb")[7] == {"label": 7}


def test_several_sources_follow_each_other(tmp_path: Path) -> None:
    one, other = (
        write_samples(tmp_path / "1.tfrecord", make_samples(5)),
        write_samples(tmp_path / "2.tfrecord", make_samples(4, seed=1)),
    )
    convert([one, other], tmp_path / "out.tfrecord", workers=0)
    assert_all_same(samples_in(tmp_path / "out.tfrecord"), make_samples(5) + make_samples(4, seed=1))


def test_progress_begins_at_nothing_and_ends_with_all(tmp_path: Path, tfrecord: Path) -> None:
    heard: list[Progress] = []
    convert(tfrecord, tmp_path / "out.lmdb", workers=2, progress=heard.append)
    assert {one.stage for one in heard} == {"scanning", "writing"}
    written = [one for one in heard if one.stage == "writing"]
    assert (written[0].samples, written[-1].samples, written[-1].total) == (0, 300, 300)
    assert [one.samples for one in written] == sorted(one.samples for one in written)


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_replaced_unless_told_and_then_at_the_end(
    tmp_path: Path, tfrecord: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.tfrecord"
    out.write_bytes(b"precious")
    with pytest.raises(SourceError, match="exists; --overwrite"):
        convert(tfrecord, out, workers=0)
    assert out.read_bytes() == b"precious"
    with monkeypatch.context() as patch:
        patch.setattr(Target, "publish", _refuse)
        with pytest.raises(SourceError, match="no room"):
            convert(tfrecord, out, workers=0, overwrite=True)
    assert out.read_bytes() == b"precious"
    convert(tfrecord, out, workers=0, overwrite=True)
    assert_all_same(samples_in(out), make_samples(300))


def _refuse(*_: object, **__: object) -> None:
    raise SourceError("no room")


def test_a_numbered_set_is_replaced_as_a_whole(tmp_path: Path, tfrecord: Path) -> None:
    convert(tfrecord, tmp_path / "out.tfrecord", shards=5, workers=0)
    other = tmp_path / "out-extra.tfrecord"
    other.write_bytes(b"")
    with pytest.raises(SourceError, match=r"out-000000.tfrecord exists"):
        convert(tfrecord, tmp_path / "out.tfrecord", shards=2, workers=0)
    convert(tfrecord, tmp_path / "out.tfrecord", shards=2, workers=0, overwrite=True)
    assert sorted(name.name for name in tmp_path.glob("out*")) == [
        "out-000000.tfrecord",
        "out-000001.tfrecord",
        "out-extra.tfrecord",
    ]


def test_a_device_or_pipe_is_never_replaced_nor_a_link_to_one(tmp_path: Path, tfrecord: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "link.csv").symlink_to(tmp_path / "pipe.csv")
    (tmp_path / "stdout.csv").symlink_to("/proc/self/fd/1")  # as /dev/stdout is
    before = sorted(os.listdir(tmp_path))
    for name in ("pipe.csv", "link.csv", "stdout.csv"):
        with pytest.raises(SourceError, match=f"{name} is neither a file nor a folder"):
            convert(tfrecord, tmp_path / name, fields=["y"], overwrite=True, workers=0)
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "pipe.csv").is_fifo()


def test_braces_that_name_a_file_twice_are_refused(tmp_path: Path, tfrecord: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for names in ("{x,x}", "{x,./x}", "{a,b}/x", "{1,11}{1,}x"):
        with pytest.raises(SourceError, match="more than once"):
            convert(tfrecord, f"{tmp_path}/{names}.csv", fields=["y"], workers=0)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "in.tfrecord"]


def test_a_folder_is_never_replaced(tmp_path: Path, tfrecord: Path) -> None:
    (tmp_path / "home.lmdb").mkdir()
    (tmp_path / "home.lmdb" / "letter").write_text("dear")
    with pytest.raises(SourceError, match="is a folder, and folders are not replaced"):
        convert(tfrecord, tmp_path / "home.lmdb", workers=0, overwrite=True)


def test_a_source_is_not_written_over_nor_into(tmp_path: Path, tfrecord: Path) -> None:
    with pytest.raises(SourceError, match="is in the source"):
        convert(tmp_path, tmp_path / "out.lmdb", workers=0)
    with pytest.raises(SourceError, match="is in the source"):
        convert(tfrecord, tfrecord, workers=0, overwrite=True)
    write_samples(tmp_path / "out-000001.tfrecord", make_samples(3))
    for source in (str(tmp_path / "*.tfrecord"), str(tmp_path / "{in,out-000001}.tfrecord")):
        with pytest.raises(SourceError, match="is in the source"):
            convert(source, tmp_path / "out.tfrecord", workers=0, shards=3, overwrite=True)
    assert_all_same(samples_in(tfrecord), make_samples(300))


def test_options_that_contradict_each_other_are_told(tmp_path: Path, tfrecord: Path) -> None:
    for wrong in (
        {"dst": "o.tar", "shards": 2, "shard_size": "1MiB"},
        {"dst": "o.tar", "shards": 0},
        {"dst": "o.tar", "shard_size": "much"},
        {"dst": "o-{0..3}.tar", "shards": 2},
        {"dst": "o.tar", "errors": "ignore"},
        {"dst": "o.tar", "workers": -1},
        {"dst": "o.tar", "options": {"x": object()}},
    ):
        with pytest.raises(OptionError):
            convert(tfrecord, **{**wrong, "dst": wrong["dst"]})
    with pytest.raises(SourceError, match="no suffix of a known format"):
        convert(tfrecord, tmp_path / "out")
    with pytest.raises(SourceError, match="there is no folder"):
        convert(tfrecord, tmp_path / "no" / "out.lmdb")
    with pytest.raises(OptionError, match=r"lmdb has no option nonsense=; it has .*commit_nbytes="):
        convert(tfrecord, tmp_path / "out.lmdb", writer_options={"nonsense": 1}, workers=0)
    assert os.listdir(tmp_path) == ["in.tfrecord"]


def test_a_format_that_cannot_hold_the_samples_says_why_and_nothing_is_left(
    tmp_path: Path, tfrecord: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ragged = Field("array", "float32", (3, None))
    format_named("lmdb").load()  # what it imports must not keep what is put here
    monkeypatch.setattr(
        features, "why_unsupported", lambda schema: "no room for float32[3, ?]" if schema["x"] == ragged else ""
    )
    with pytest.raises(SourceError, match=r"no room for float32\[3, \?\]; choose or rename fields with"):
        convert(tfrecord, tmp_path / "out.lmdb", workers=0)
    assert os.listdir(tmp_path) == ["in.tfrecord"]


def test_what_the_first_sample_shows_is_told_before_all_are_looked_through(tmp_path: Path, tfrecord: Path) -> None:
    heard: list[Progress] = []
    with pytest.raises(SourceError, match="CSV holds numbers and text only"):
        convert(tfrecord, tmp_path / "out.csv", workers=0, progress=heard.append)
    assert {one.samples for one in heard} == {0}


def test_sizes_that_differ_late_are_seen(tmp_path: Path) -> None:
    samples = [{"x": np.zeros(3, np.float32), "y": 1.5} for _ in range(50)]
    samples[40]["x"] = np.zeros(4, np.float32)
    source = tmp_path / "in.jsonl"
    writer = JsonLinesWriter(str(source), {"x": Field("array", "float32", (None,)), "y": Field("number", "float64")})
    for sample in samples:
        writer.write(sample)
    writer.close()
    convert(source, tmp_path / "out.h5", workers=0, verify=True)
    assert samples_in(tmp_path / "out.h5")[40]["x"].shape == (4,)


def test_options_of_the_writer_are_those_of_whoever_reads_it(tmp_path: Path) -> None:
    write_samples(tmp_path / "flat.lmdb", rng_flat(30))
    options = {"delimiter": ";"}
    done = convert(tmp_path / "flat.lmdb", tmp_path / "o.csv", writer_options=options, workers=0, verify=True, shards=2)
    assert done.samples == 30


def test_what_no_format_has_room_for_is_told_with_its_field(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"a": 1, "b": {"c": null}}\n')
    with pytest.raises(SourceError, match=r"'b/c'.*choose other fields with fields="):
        convert(tmp_path / "in.jsonl", tmp_path / "out.h5", workers=0)
    assert convert(tmp_path / "in.jsonl", tmp_path / "out.h5", fields=["a"], workers=0).samples == 1


def test_objects_of_python_are_not_converted_and_their_field_is_named(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"x": [1], "tags": [["a"]]})
    pq.write_table(table, tmp_path / "in.parquet")
    for name in ("out.h5", "out.jsonl", "out.parquet"):
        with pytest.raises(SourceError, match=r"field 'tags' is object \(list<string>\).*choose or rename fields with"):
            convert(tmp_path / "in.parquet", tmp_path / name, workers=0)
    assert convert(tmp_path / "in.parquet", tmp_path / "out.h5", fields=["x"], workers=0).samples == 1


def test_nulls_are_broken_records_unless_something_takes_their_place(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pytest.importorskip("pyarrow").table({"x": ["a", None, "c"]}), tmp_path / "in.parquet")
    with pytest.raises(RecordError, match=r"record 1: field 'x': it is null; pass a value to use instead: options="):
        convert(tmp_path / "in.parquet", tmp_path / "out.h5", workers=0)
    assert convert(tmp_path / "in.parquet", tmp_path / "skipped.jsonl", workers=0, errors="skip").skipped == 1
    convert(tmp_path / "in.parquet", tmp_path / "all.jsonl", workers=0, options={"null": {"x": ""}}, verify=True)
    assert [sample["x"] for sample in samples_in(tmp_path / "all.jsonl")] == ["a", "", "c"]


def test_units_go_from_table_to_table(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    long = (pa.timestamp("us", "UTC"), pa.timestamp("ns"), pa.time64("us"), pa.duration("s"))
    columns = {str(type): pa.array(np.arange(3)).view(type) for type in long}
    columns |= {str(type): pa.array(np.arange(3, dtype="i4")).view(type) for type in (pa.date32(), pa.time32("ms"))}
    table = pa.table({**columns, "sizes": pa.array([[1], [2], [3]])})
    pq.write_table(table, tmp_path / "in.parquet")
    convert(tmp_path / "in.parquet", tmp_path / "out.arrow", workers=0, verify=True)
    convert(tmp_path / "out.arrow", tmp_path / "out.parquet", workers=0, verify=True)
    assert pq.read_table(tmp_path / "out.parquet").drop(["sizes"]).equals(table.drop(["sizes"]))


def test_a_format_that_is_only_read_says_so(tmp_path: Path, tfrecord: Path) -> None:
    with pytest.raises(SourceError, match="video is read by penstock, and not written"):
        convert(tfrecord, tmp_path / "out.mp4", workers=0)


def test_samples_that_differ_in_their_fields_are_an_error(tmp_path: Path) -> None:
    write_samples(tmp_path / "1.tfrecord", [{"x": np.float32(1)}])
    write_samples(tmp_path / "2.tfrecord", [{"x": np.float32(1), "y": np.float32(1)}])
    with pytest.raises(SourceError, match="all need the same"):
        convert(tmp_path / "*.tfrecord", tmp_path / "out.lmdb", workers=0)


def test_tokens_are_taken_to_the_last_one(tmp_path: Path) -> None:
    tokens = np.arange(2500, dtype=np.uint16)
    tokens.tofile(tmp_path / "in.bin")
    options: dict[str, Any] = {"dtype": "uint16"}
    convert(tmp_path / "in.bin", tmp_path / "out.npy", workers=0, options=options, verify=True)
    assert np.array_equal(np.load(tmp_path / "out.npy"), tokens)
    convert(tmp_path / "in.bin", tmp_path / "windows.npy", workers=0, options={"length": 1000, "pack": True, **options})
    assert np.array_equal(np.load(tmp_path / "windows.npy"), tokens[:2000])


def test_an_empty_source_of_unknown_fields_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "in.tfrecord").write_bytes(b"")
    with pytest.raises(SourceError, match="no samples"):
        convert(tmp_path / "in.tfrecord", tmp_path / "out.lmdb", workers=0)
    assert os.listdir(tmp_path) == ["in.tfrecord"]


# ── broken records ──────────────────────────────────────────────────────────────────────────────────────────


def broken(path: Path) -> Path:
    """Flip a bit inside of one record's data, near the middle."""
    data = bytearray(path.read_bytes())
    at = data.index("é 20".encode())
    data[at] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_record_stops_with_its_place_or_is_left_out_and_counted(
    tmp_path: Path, tfrecord: Path, workers: int
) -> None:
    broken(tfrecord)
    with pytest.raises(RecordError, match=r"in\.tfrecord: record 20 at byte \d+"):
        convert(tfrecord, tmp_path / "out.lmdb", workers=workers)
    done = convert(tfrecord, tmp_path / "b.lmdb", workers=workers, errors="skip", verify=True)
    samples = make_samples(300)
    del samples[20]
    assert (done.samples, done.skipped, done.checksum) == (299, 1, checksum(samples))
    assert_all_same(samples_in(tmp_path / "b.lmdb"), samples)


def test_a_truncated_file_is_converted_as_far_as_it_goes(tmp_path: Path, tfrecord: Path) -> None:
    os.truncate(tfrecord, os.path.getsize(tfrecord) // 2)
    with pytest.raises(RecordError):
        convert(tfrecord, tmp_path / "out.lmdb", workers=0)
    done = convert(tfrecord, tmp_path / "b.lmdb", workers=0, errors="skip", verify=True)
    assert done.skipped == 1
    assert_all_same(samples_in(tmp_path / "b.lmdb"), make_samples(300)[: done.samples])


# ── verify ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("change", [lambda all: [all[1], all[0], *all[2:]], lambda all: [all[1], *all[1:]]])
def test_verify_finds_samples_that_are_swapped_and_samples_that_differ(
    tmp_path: Path, tfrecord: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    close = JsonLinesWriter.close

    def damaged(writer: JsonLinesWriter) -> None:
        close(writer)
        (file,) = tmp_path.glob("out.jsonl.partial/new-*/data.jsonl")
        file.write_text("".join(change(file.read_text().splitlines(keepends=True))))

    with monkeypatch.context() as patch:
        patch.setattr(JsonLinesWriter, "close", damaged)
        with pytest.raises(SourceError, match="samples that were read of the result differ from those of the source"):
            convert(tfrecord, tmp_path / "out.jsonl", workers=0, verify=True)
    assert not (tmp_path / "out.jsonl").exists()
    assert convert(tfrecord, tmp_path / "out.jsonl", workers=0, verify=True).resumed == 0


# ── kills ───────────────────────────────────────────────────────────────────────────────────────────────────

_CALLS = ("fsync", "mkdir", "rename", "replace", "remove", "unlink", "rmdir", "truncate")


def killed_at(call: int, *args: Any, **options: Any) -> bool:
    """Convert in a fork that is killed just before its `call`-th change of the file system; False if it has fewer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    left = [call]

    def counted(function: Any) -> Any:
        def wrapped(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return wrapped

    try:
        for name in _CALLS:
            setattr(os, name, counted(getattr(os, name)))
        convert(*args, **options)
    finally:
        os._exit(0)


@pytest.mark.parametrize(
    ("name", "options"),
    [("out.tfrecord", {"shards": 3}), ("out.lmdb", {}), ("out.tfrecord", {"overwrite": True})],
)
def test_a_conversion_resumes_after_a_kill_at_any_moment(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    source = write_samples(tmp_path / "in.tfrecord", make_samples(12))
    expected = checksum(make_samples(12))
    rng = random.Random(0)
    for call in places(1000, f"{name}, {options}"):
        folder = tmp_path / str(call)
        folder.mkdir()
        if "overwrite" in options:
            (folder / name).write_bytes(b"old")
        is_killed = killed_at(call + 1, source, folder / name, workers=0, **options)
        killed_at(rng.randrange(1, 30), source, folder / name, workers=0, **options)  # and the one that goes on, too
        partial = folder / f"{name}.partial"
        if partial.exists() and not (partial / "state.json").exists() and len(list(folder.iterdir())) > 1:
            shutil.rmtree(partial)  # it was about to go, and all is done
        if partial.exists():
            proven = _kept_samples(partial)
            done = convert(source, folder / name, workers=0, **options)
            assert done.checksum == expected
            assert proven is None or done.resumed == proven, call
        assert_all_same(samples_in(tuple(sorted(str(file) for file in folder.iterdir()))), make_samples(12))
        assert not partial.exists()
        if not is_killed:
            break
    assert call >= 20


def _kept_samples(partial: Path) -> int | None:
    """Return how many samples are in files that have their names; None where all is done."""
    state = partial / "state.json"
    if not state.exists() or "finished" in json.loads(state.read_text()):
        return None
    return sum(json.loads(one.read_text())["checksum"]["samples"] for one in partial.glob("file-*/written.json"))


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A source that takes a second or two."""
    rng = np.random.default_rng(0)
    samples = [{"x": rng.standard_normal(3000).astype(np.float32), "y": np.int64(number)} for number in range(3000)]
    return write_samples(tmp_path / "in.tfrecord", samples)


def command(*words: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "convert", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_files(partial: Path, count: int, running: subprocess.Popen[str]) -> None:
    """Wait until so many files are complete."""
    while running.poll() is None and len(list(partial.glob("file-*"))) < count:
        time.sleep(0.005)


def test_workers_exit_with_a_killed_conversion_and_the_next_one_resumes(tmp_path: Path, large: Path) -> None:
    out, partial = tmp_path / "out.lmdb", tmp_path / "out.lmdb.partial"
    for count in (1, 5):
        running = command(large, out, "--workers", 2, "--quiet", "--shards", 12)
        wait_for_files(partial, count, running)
        running.kill()
        running.communicate()
    done = command(large, out, "--workers", 2, "--json", "--shards", 12)
    text, _ = done.communicate()
    found = json.loads(text)
    assert found["resumed"] > 0
    assert found["samples"] == 3000
    assert found["checksum"] == checksum(samples_in(large))
    assert [int(sample["y"]) for sample in samples_in(tuple(found["files"]))] == list(range(3000))


def test_an_interrupt_prints_one_line_on_how_to_resume(tmp_path: Path, large: Path) -> None:
    out, partial = tmp_path / "out.lmdb", tmp_path / "out.lmdb.partial"
    running = command(large, out, "--workers", 2, "--shards", 12)
    wait_for_files(partial, 1, running)
    os.killpg(running.pid, signal.SIGINT)
    _, errors = running.communicate()
    assert running.returncode == 130
    assert errors.splitlines()[-1] == "penstock: interrupted; run the same command again to resume"
    assert not list(tmp_path.glob("out-*"))


def test_a_conversion_of_another_source_or_with_other_options_is_not_resumed(
    tmp_path: Path, tfrecord: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Target, "publish", _refuse)
        with pytest.raises(SourceError, match="no room"):
            convert(tfrecord, tmp_path / "out.lmdb", workers=0, fields=["x", "y"])
    with pytest.raises(SourceError, match=r"unfinished conversion with another fields .*remove the folder"):
        convert(tfrecord, tmp_path / "out.lmdb", workers=0, fields=["x"])
    os.utime(tfrecord, ns=(1, 1))
    with pytest.raises(SourceError, match=r"unfinished conversion with another source_files"):
        convert(tfrecord, tmp_path / "out.lmdb", workers=0, fields=["x", "y"])


def test_two_conversions_to_one_target_exclude_each_other(
    tmp_path: Path, tfrecord: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.data.convert import partial_folder

    monkeypatch.setattr(partial_folder, "_ORPHANS_S", 0.1)
    first = PartialFolder(str(tmp_path / "out.lmdb.partial"), {})
    try:
        with pytest.raises(SourceError, match="another conversion is running"):
            convert(tfrecord, tmp_path / "out.lmdb", workers=0)
    finally:
        first.close()


def test_a_dead_worker_is_reported_with_its_signal(tmp_path: Path) -> None:
    pool = WorkerPool(1, lambda samples, nbytes: None)
    try:
        with pytest.raises(
            WorkerError, match="a worker was killed by SIGKILL while killing itself, task 1; the kernel kills"
        ):
            pool.run("killing itself, task", [do_nothing, kill_itself])
    finally:
        pool.close()


def do_nothing(context: object) -> None:
    return


def kill_itself(context: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def unfinished(tfrecord: Path, out: Path) -> Path:
    """Begin a conversion that a failure ends after a segment, and return its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartialFolder, "update", fail_at_the_end(PartialFolder.update))
        with pytest.raises(SourceError, match="No space left"):
            convert(tfrecord, out, workers=0, shards=3)
    return Path(f"{out}.partial")


def fail_at_the_end(update: Any) -> Any:
    def full(folder: PartialFolder, **values: Any) -> None:
        if "finished" in values:
            raise OSError(28, "No space left on device")
        update(folder, **values)

    return full


def test_the_folder_of_a_conversion_is_this_users_alone_and_the_result_is_as_ever(
    tmp_path: Path, tfrecord: Path
) -> None:
    before = os.umask(0o022)
    try:
        partial = unfinished(tfrecord, tmp_path / "out.tfrecord")
        assert partial.stat().st_mode & 0o777 == 0o700
        done = convert(tfrecord, tmp_path / "out.tfrecord", workers=0, shards=3)
    finally:
        os.umask(before)
    assert done.resumed == 300
    assert {Path(file).stat().st_mode & 0o777 for file in done.files} == {0o644}


def _give(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)


FOREIGN = [
    pytest.param(_give, "belongs to another user", id="folder", marks=needs_root),
    pytest.param(lambda path: path.chmod(0o777), "other users", id="writable"),
    pytest.param(lambda path: path.chmod(0o755), "other users have access", id="readable"),
    pytest.param(lambda path: _give(path / "file-000001"), "belongs to another user", id="file", marks=needs_root),
    pytest.param(lambda path: _give(path / "file-000001" / "data.tfrecord"), "belongs", id="data", marks=needs_root),
    pytest.param(lambda path: _give(path / "state.json"), "belongs to another user", id="state", marks=needs_root),
    pytest.param(lambda path: (path / "new-1").symlink_to("/etc"), "neither a file nor a folder", id="link"),
    pytest.param(lambda path: os.mkfifo(path / "new-1"), "neither a file nor a folder", id="pipe"),
]


@pytest.mark.parametrize(("change", "reason"), FOREIGN)
def test_a_folder_that_another_user_may_have_made_is_not_resumed_and_left_as_it_is(
    tmp_path: Path, tfrecord: Path, change: Callable[[Path], None], reason: str
) -> None:
    partial = unfinished(tfrecord, tmp_path / "out.tfrecord")
    change(partial)
    before = sorted(path for path in partial.rglob("*"))
    with pytest.raises(SourceError, match=reason):
        convert(tfrecord, tmp_path / "out.tfrecord", workers=0, shards=3)
    assert sorted(path for path in partial.rglob("*")) == before
    assert not list(tmp_path.glob("out-*"))


@pytest.mark.parametrize("name", ["lock", "state.json", "new-PID-state.json", "file-000000"])
@pytest.mark.parametrize("is_hard", [False, True])
def test_a_file_elsewhere_is_not_overwritten_through_a_link_in_that_folder(
    tmp_path: Path, tfrecord: Path, name: str, is_hard: bool
) -> None:
    (tmp_path / "mine").write_text("kept")
    partial = tmp_path / "out.lmdb.partial"
    partial.mkdir(0o700)
    link = partial / name.replace("PID", str(os.getpid()))
    link.hardlink_to(tmp_path / "mine") if is_hard else link.symlink_to(tmp_path / "mine")
    with pytest.raises(SourceError, match=r"is a link|hard link|neither a file nor"):
        convert(tfrecord, tmp_path / "out.lmdb", workers=0)
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path: Path, tfrecord: Path) -> None:
    (tmp_path / "mine").mkdir(0o700)
    (tmp_path / "mine" / "kept").touch()
    (tmp_path / "out.lmdb.partial").symlink_to("mine")
    with pytest.raises(SourceError, match="other users have access"):
        convert(tfrecord, tmp_path / "out.lmdb", workers=0)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["kept"]


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path: Path, tfrecord: Path) -> None:
    (tmp_path / "out.lmdb.partial").write_text("a file in its place")
    (tmp_path / "out.lmdb.partial").chmod(0o600)
    with pytest.raises(SourceError, match="where the conversion works, cannot be created"):
        convert(tfrecord, tmp_path / "out.lmdb", workers=0)


def test_a_state_that_cannot_be_written_ends_the_conversion_and_the_error_has_what_is_kept(
    tmp_path: Path, tfrecord: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = PartialFolder.update

    def full(folder: PartialFolder, **values: Any) -> None:
        if "finished" in values:
            raise OSError(28, "No space left on device")
        update(folder, **values)

    with monkeypatch.context() as patch:
        patch.setattr(PartialFolder, "update", full)
        with pytest.raises(SourceError, match=r"could not be finished: .* No space left") as caught:
            convert(tfrecord, tmp_path / "out.lmdb", workers=0)
    assert caught.value.__notes__ == [
        f"300 samples are kept in {tmp_path}/out.lmdb.partial; when the cause is fixed, repeat the call to resume"
    ]
    assert convert(tfrecord, tmp_path / "out.lmdb", workers=0).resumed == 300


def test_a_program_need_not_guard_its_main(tmp_path: Path, tfrecord: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from penstock.data.convert import convert\n"
        f"print(convert({str(tfrecord)!r}, {str(tmp_path / 'out.lmdb')!r}, workers=2).samples)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("300\n", "")


def test_a_conversion_resumes_after_a_full_disk(
    tmp_path: Path, tfrecord: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.data.convert import partial_folder

    synced = []

    def full(path: str) -> None:
        synced.append(path)
        if sum("file-" in one for one in synced) > 6:  # of each its file, the record, and its folder
            raise OSError(28, "No space left on device", path)

    with monkeypatch.context() as patch:
        patch.setattr(partial_folder, "sync", full)
        with pytest.raises(SourceError, match=r"No space left.*free some room on it, and repeat the command to resume"):
            convert(tfrecord, tmp_path / "out.tfrecord", shards=4, workers=0)
    assert not list(tmp_path.glob("*.partial/new-*"))
    assert convert(tfrecord, tmp_path / "out.tfrecord", shards=4, workers=0).resumed == 150


def test_a_conversion_is_frozen() -> None:
    assert Conversion.__dataclass_params__.frozen  # type: ignore[attr-defined]


# ── the canonical form ──────────────────────────────────────────────────────────────────────────────────────


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_samples_have_equal_encodings_if_and_only_if_they_are_equal(data: st.DataObject) -> None:
    _, drawn = data.draw(datasets())
    for one in drawn:
        turned = dict(reversed(list(one.items())))
        assert encoded(one) == encoded({name: _swapped(value) for name, value in turned.items()})
        for other in drawn:
            if encoded(one) == encoded(other):
                assert_same(one, other)
    checksums = [DatasetChecksum(), DatasetChecksum()]
    for checksum, samples in zip(checksums, (drawn, drawn[::-1]), strict=True):
        for sample in samples:
            checksum.add(sample)
    assert checksums[0].to_text() == checksums[1].to_text()
    assert (checksums[0].order == checksums[1].order) == (list(map(encoded, drawn)) == list(map(encoded, drawn[::-1])))


def encoded(sample: Sample) -> bytes:
    return b"".join(encode_sample(sample))


def _swapped(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return np.asfortranarray(value.astype(value.dtype.newbyteorder(">")))
    return value


def test_all_nans_are_encoded_equally_and_zeros_with_their_sign() -> None:
    odd = np.array([0x7FC00001, 0xFFC00000], np.uint32).view(np.float32)
    assert encoded({"x": odd}) == encoded({"x": np.full(2, np.nan, np.float32)})
    assert encoded({"x": np.float32(0.0)}) != encoded({"x": np.float32(-0.0)})
    assert encoded({"x": np.complex64(complex(np.nan, 1))}) == encoded({"x": np.complex64(complex(np.nan, 1))})
    assert encoded({"x": 1}) != encoded({"y": 1})


def test_checksums_of_parts_make_that_of_the_whole() -> None:
    samples = make_samples(7)
    parts, whole = [DatasetChecksum(), DatasetChecksum()], DatasetChecksum()
    for number, sample in enumerate(samples):
        parts[number // 4].add(sample)
        whole.add(sample)
    assert DatasetChecksum.total(parts) == whole
    assert DatasetChecksum.total(parts[::-1]).order != whole.order
