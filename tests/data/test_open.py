"""What `penstock.open` makes of a path."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from sample_files import samples_in, write_samples

import penstock
from penstock.core.errors import OptionError, SourceError
from penstock.data.format import Format
from penstock.data.format_registry import FORMATS, format_named, format_of_path
from penstock.data.inspect import inspect
from penstock.data.select_format import guess_format, select_format
from penstock.data.storage.storage import Storage


def lines(path: Path, *numbers: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"x": number, "y": -number}) + "\n" for number in numbers))
    return path


def read(*words: object, **options: object) -> list[int]:
    return [int(sample["x"]) for sample in penstock.open(*words, **options)]


def test_a_file_a_folder_wildcards_braces_and_lists_are_opened(tmp_path: Path) -> None:
    lines(tmp_path / "train-0.jsonl", 1, 2)
    lines(tmp_path / "train-1.jsonl", 3)
    assert read(tmp_path / "train-0.jsonl") == [1, 2]
    assert read(tmp_path) == read(f"{tmp_path}/") == [1, 2, 3]
    assert read(f"{tmp_path}/*.jsonl") == read(f"{tmp_path}/train-{{0..1}}.jsonl") == [1, 2, 3]
    assert read([tmp_path / "train-1.jsonl", tmp_path / "train-0.jsonl"]) == [3, 1, 2]


def test_fields_are_chosen_and_renamed(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", 7)
    assert [*next(iter(penstock.open(path, fields={"left": "y"})))] == ["left"]
    assert [*next(iter(penstock.open(path, fields=["y"])))] == ["y"]


def test_an_unknown_suffix_needs_a_format(tmp_path: Path) -> None:
    path = lines(tmp_path / "notes.txt", 1)
    with pytest.raises(SourceError, match=r"has no known suffix .* pass format="):
        penstock.open(path)
    assert read(path, format="jsonl") == [1]


def test_a_folder_of_several_formats_is_not_guessed(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", 1)
    (tmp_path / "b.csv").write_text("x\n1\n")
    with pytest.raises(SourceError, match=r"holds 1 of (jsonl|csv), 1 of (jsonl|csv)"):
        penstock.open(tmp_path)
    assert read(tmp_path, format="jsonl") == [1]


@pytest.mark.parametrize(
    ("path", "options", "error", "words"),
    [
        ("nothing.jsonl", {}, SourceError, "no file|cannot be opened"),
        (".", {}, SourceError, "no file with a known suffix"),
        (".", {"format": "parquet"}, SourceError, "holds no parquet"),
        ("a.jsonl", {"format": "excel"}, SourceError, "no format 'excel'; there are images, hdf5"),
        ("a.jsonl", {"size": 3}, OptionError, "jsonl has no option size=; it has .*dtypes="),
        (
            "a.jsonl",
            {"distributed": "yes"},
            OptionError,
            "distributed must be True, False, a process group .*not 'yes'",
        ),
        ("a.jsonl", {"errors": "ignore"}, OptionError, "neither 'raise' nor 'skip'"),
        ("a.jsonl", {"storage": penstock.Storage(), "cache": "copies"}, OptionError, "give the storage its cache"),
        ("a.jsonl", {"fields": ["z"]}, SourceError, "no field 'z'; it has 'x', 'y'"),
        ("a.jsonl", {"fields": "x"}, OptionError, r"fields='x' names no fields; write them as in \['image'\]"),
        ("a.jsonl", {"fields": {}}, OptionError, "names no fields"),
        ("nothing", {}, SourceError, "there is no file '.*nothing'"),
    ],
)
def test_what_cannot_be_opened_raises_the_reason(
    tmp_path: Path, path: str, options: dict[str, object], error: type[Exception], words: str
) -> None:
    if path == "a.jsonl":
        lines(tmp_path / path, 1)
    with pytest.raises(error, match=words):
        list(penstock.open(tmp_path / path, **options))


@pytest.mark.parametrize(
    ("files", "format"),
    [
        (["data.mdb", "lock.mdb"], "lmdb"),
        ([".zgroup", "x/0"], "zarr"),
        (["zarr.json"], "zarr"),
        (["cat/1.jpg", "dog/2.PNG", "notes.csv"], "images"),
        (["_noise_/1.jpg", "_noise_/_2.jpg", "_notes.csv"], "images"),
        (["run/1.mp4", "walk/2.mkv"], "video"),
        (["b.tar", "a.tar", "README"], "tar"),
        (["x/1.parquet", ".hidden/2.csv"], "parquet"),
        (["a.lmdb/data.mdb", "a.lmdb/lock.mdb", "b.lmdb/data.mdb", "b.lmdb/lock.mdb"], "lmdb"),
        (["a.zarr/x/c/0", "a.zarr/zarr.json", "b.zarr/zarr.json"], "zarr"),
    ],
)
def test_a_folder_is_known_by_its_files(tmp_path: Path, files: list[str], format: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found, paths = guess_format(str(tmp_path), Storage())
    assert found.name == format
    assert paths == [str(tmp_path)] or paths == sorted(paths)
    assert select_format(tmp_path, format, Storage()) == (found, paths)


def test_each_suffix_selects_its_format() -> None:
    for one in FORMATS:
        assert all(format_of_path(f"s3://bucket/train{suffix.upper()}") is one for suffix in one.suffixes)


@pytest.mark.parametrize("paths", [[], None, 3, b"a.jsonl"])
def test_what_is_no_path_is_refused(paths: object) -> None:
    with pytest.raises((SourceError, OptionError), match=r"neither a path|an empty list"):
        penstock.open(paths)  # type: ignore[arg-type]


@pytest.mark.parametrize("errors", ["raise", "skip"])
@pytest.mark.parametrize("format", [one for one in FORMATS if one.name != "zarr"], ids=lambda one: one.name)
def test_a_path_that_is_not_there_is_an_error_when_it_is_opened(tmp_path: Path, format: Format, errors: Any) -> None:
    name = f"gone{format.suffixes[0]}"
    for path in (str(tmp_path / name), f"file://{tmp_path}/{name}", f"memory://gone/{name}"):
        with pytest.raises(SourceError, match="gone"):
            penstock.open(path, errors=errors)


@pytest.mark.parametrize("format", ["csv", "tar", "tfrecord", "jsonl", "images"])
def test_one_path_of_several_that_is_not_there_is_an_error_when_they_are_opened(tmp_path: Path, format: str) -> None:
    suffix = format_named(format).suffixes[0]
    (tmp_path / f"0{suffix}").write_bytes(b"")
    for path in (f"{tmp_path}/{{0..1}}{suffix}", (str(tmp_path / f"{n}{suffix}") for n in range(2))):
        with pytest.raises(SourceError, match=f"1{suffix}"):
            penstock.open(path)
    memory = fsspec.filesystem("memory")
    memory.pipe(f"/some/0{suffix}", b"")
    try:
        with pytest.raises(SourceError, match=f"1{suffix}"):
            penstock.open(f"memory://some/{{0..1}}{suffix}", format=format)
    finally:
        memory.rm("/some", recursive=True)


def test_folders_of_folders_are_one_source(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        write_samples(tmp_path / name / "data.mdb", [{"x": np.int64(1)}, {"x": np.int64(2)}])
        (tmp_path / name / "lock.mdb").write_bytes(b"")
    for options in ({}, {"format": "lmdb"}):
        assert [sample["x"] for sample in samples_in(tmp_path, **options)] == [1, 2, 1, 2]


def test_a_remote_folder_is_opened_with_a_given_format() -> None:
    files = fsspec.filesystem("memory")
    for name in ("a", "b"):
        files.pipe(f"/a-format-is-said/{name}.jsonl", b'{"x": 1}\n')
        files.pipe(f"/a-format-is-said/{name}.csv", b"x\n2\n")
    assert read("memory://a-format-is-said/", format="jsonl") == [1, 1]
    assert read("memory://a-format-is-said/", format="csv") == [2, 2]
    with pytest.raises(SourceError, match="holds no parquet"):
        penstock.open("memory://a-format-is-said/", format="parquet")
    files.pipe("/a-format-is-said/export", b"x\n3\n")
    assert read("memory://a-format-is-said/export", format="csv") == [3]
    assert (
        inspect("memory://a-format-is-said/export", format="csv").files,
        inspect("memory://a-format-is-said/", format="csv").files,
    ) == (1, 2)
    files.rm("/a-format-is-said", recursive=True)


def test_linked_folders_are_read_and_a_link_to_a_folder_around_it_ends(tmp_path: Path) -> None:
    lines(tmp_path / "set" / "a" / "1.jsonl", 1)
    lines(tmp_path / "disk2" / "2.jsonl", 2)
    for link in ("b", "c"):
        (tmp_path / "set" / link).symlink_to(tmp_path / "disk2")
    (tmp_path / "set" / "a" / "round").symlink_to(tmp_path / "set")
    for options in ({}, {"format": "jsonl"}):
        assert read(tmp_path / "set", **options) == [1, 2, 2]


def test_a_link_to_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", 1)
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(SourceError, match=r"b.jsonl.* cannot be opened"):
        read(tmp_path)


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines(tmp_path / "a.jsonl", 1)
    (tmp_path / "b").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> object:
        if path == str(tmp_path / "b"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SourceError, match=r"b cannot be listed: Permission denied"):
        read(tmp_path)


@pytest.mark.parametrize("options", [{}, {"format": "jsonl"}])
def test_several_folders_are_read_one_after_another(tmp_path: Path, options: dict[str, str]) -> None:
    lines(tmp_path / "d1" / "b.jsonl", 2)
    lines(tmp_path / "d1" / "a.jsonl", 1)
    lines(tmp_path / "d2" / "in" / "c.jsonl", 3)
    lines(tmp_path / "e.jsonl", 4)
    assert read([tmp_path / "d2", tmp_path / "d1", tmp_path / "e.jsonl"], **options) == [3, 1, 2, 4]
    assert read(f"{tmp_path}/d*", **options) == read(f"{tmp_path}/d{{1,2}}", **options) == [1, 2, 3]


def test_several_folders_of_other_formats_are_read_too(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for suffix in (".parquet", ".tar", ".h5", ".lmdb"):
            (tmp_path / suffix / name).mkdir(parents=True)
            write_samples(tmp_path / suffix / name / f"x{suffix}", [{"x": np.int64(1)}, {"x": np.int64(2)}])
    for suffix in (".parquet", ".tar", ".h5", ".lmdb"):
        assert len(samples_in(f"{tmp_path}/{suffix}/*")) == 4, suffix


def test_several_remote_folders_are_read_one_after_another() -> None:
    files = fsspec.filesystem("memory")
    for name in ("a", "b"):
        files.pipe(f"/several-folders/{name}/1.jsonl", b'{"x": 1}\n')
    assert read("memory://several-folders/{a,b}") == [1, 1]
    assert read("memory://several-folders/{a,b}/", format="jsonl") == [1, 1]
    files.rm("/several-folders", recursive=True)


def test_each_of_several_folders_has_files_of_the_same_format(tmp_path: Path) -> None:
    lines(tmp_path / "d1" / "a.jsonl", 1)
    (tmp_path / "d2").mkdir()
    with pytest.raises(SourceError, match=r"the folder .*d2 has no file with a known suffix"):
        penstock.open([tmp_path / "d1", tmp_path / "d2"])
    with pytest.raises(SourceError, match=r"the folder .*d2 holds no jsonl"):
        penstock.open([tmp_path / "d1", tmp_path / "d2"], format="jsonl")
    (tmp_path / "d2" / "b.csv").write_text("x\n1\n")
    with pytest.raises(SourceError, match=r".*d1 is jsonl, and .*d2 is csv; name paths of one format"):
        penstock.open([tmp_path / "d1", tmp_path / "d2"])


@pytest.mark.parametrize("options", [{}, {"format": "jsonl"}])
def test_names_that_begin_with_an_underscore_are_left_out_of_a_folder_with_a_warning(
    tmp_path: Path, options: dict[str, str]
) -> None:
    folder = tmp_path / "_raw"
    for number, name in enumerate(("a.jsonl", "_year=2026/b.jsonl", "_temporary/0/c.jsonl", "d/_e.jsonl")):
        lines(folder / name, number)
    (folder / "_SUCCESS").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"left out: 2 of the files in .*_raw, as .*: .*_temporary/0/c.jsonl \.\.\."):
        assert read(folder, fields=["x"], **options) == [1, 0]
    assert read([folder / "d" / "_e.jsonl", *folder.glob("_temporary/0/*.jsonl")]) == [3, 2]


def test_what_lies_remotely_in_a_folder_that_begins_with_an_underscore_is_left_out() -> None:
    files = fsspec.filesystem("memory")
    files.pipe({"/underscores/a.jsonl": b'{"x": 1}\n', "/underscores/_temporary/b.jsonl": b'{"x": 2}\n'})
    with pytest.warns(UserWarning, match="left out: 1 of the files"):
        assert read("memory://underscores/") == [1]
    files.rm("/underscores", recursive=True)


def test_a_given_format_reads_files_without_a_known_suffix_in_a_folder(tmp_path: Path) -> None:
    for number, name in enumerate(("a.json", "in/b", ".hidden", "_SUCCESS", "in/_c.json", "d.csv")):
        lines(tmp_path / name, number)
    assert read(tmp_path, format="jsonl") == [0, 1]
    lines(tmp_path / "e.jsonl", 6)
    assert read(tmp_path, format="jsonl") == [6]  # its own suffix says more


def test_shards_of_tensorflow_are_known_by_the_suffix_before_their_number(tmp_path: Path) -> None:
    for shard in (0, 1):
        write_samples(tmp_path / f"{shard}.tfrecord", [{"x": np.int64(shard)}])
        (tmp_path / f"{shard}.tfrecord").rename(tmp_path / f"x.tfrecord-0000{shard}-of-00002")
    (tmp_path / "features.json").write_text("{}")
    assert read(tmp_path) == read(tmp_path, format="tfrecord") == read(f"{tmp_path}/x.tfrecord-*") == [0, 1]
    assert read(tmp_path / "x.tfrecord-00001-of-00002") == [1]


@pytest.mark.parametrize("options", [{}, {"format": "parquet"}])
@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("_delta_log/00000000000000000000.json", r"a Delta Lake table, as _delta_log/.* pass .*file_uris"),
        ("metadata/00001-ab.metadata.json", r"an Iceberg table, as metadata/.*plan_files"),
        (".hoodie/hoodie.properties", r"a Hudi table, as \.hoodie/ shows.* write Parquet files"),
        ("year=2026/ab-0_0-22-26_20260101000000000.parquet", r"a Hudi table, as year=2026/ab.* write Parquet files"),
    ],
)
def test_a_folder_of_parquet_whose_log_says_which_files_count_is_refused(
    tmp_path: Path, log: str, words: str, options: dict[str, str]
) -> None:
    (tmp_path / "year=2026").mkdir()
    write_samples(tmp_path / "year=2026" / "a.parquet", [{"x": np.int64(1)}])
    assert read(tmp_path, **options) == [1]
    (tmp_path / log).parent.mkdir(exist_ok=True)
    (tmp_path / log).write_bytes(b"{}")
    with pytest.raises(SourceError, match=words):
        penstock.open(tmp_path, **options)
    assert read(f"{tmp_path}/year=2026/a.p*", **options) == [1]


def test_a_partition_of_a_delta_lake_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "_delta_log").mkdir()
    (tmp_path / "year=2026" / "month=1").mkdir(parents=True)
    write_samples(tmp_path / "year=2026" / "month=1" / "a.parquet", [{"x": np.int64(1)}])
    with pytest.raises(SourceError, match="holds a Delta Lake table"):
        penstock.open(tmp_path / "year=2026" / "month=1")


def test_a_remote_delta_lake_table_is_refused() -> None:
    files = fsspec.filesystem("memory")
    files.pipe({"/delta/in/a.parquet": b"", "/delta/in/_delta_log/0.json": b"{}"})
    with pytest.raises(SourceError, match=r"holds a Delta Lake table, as in/_delta_log/0\.json shows"):
        penstock.open("memory://delta/")
    files.rm("/delta", recursive=True)


@pytest.mark.parametrize("suffix", ["tar", "csv", "jsonl", "tfrecord"])
@pytest.mark.parametrize("head", [b"BZh91AY&SY", b"\x28\xb5\x2f\xfd"])
def test_what_is_packed_and_broken_is_named(tmp_path: Path, suffix: str, head: bytes) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(head + bytes(100))
    with pytest.raises(SourceError, match="the packed data are broken"):
        list(penstock.open(path))


@pytest.mark.parametrize("suffix", ["tar", "csv", "jsonl", "tfrecord"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12345\n", "git lfs pull"),
        (b"\xfd7zXZ\0" + bytes(100), "packed by xz"),
        (b"PK\3\4\x14\0" + bytes(100), "is a zip archive; unpack it"),
    ],
)
def test_a_file_that_is_no_data_is_named_as_what_it_is(
    tmp_path: Path, suffix: str, content: bytes, reason: str
) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=reason):
        list(penstock.open(path))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12345\n"


@pytest.mark.parametrize("name", [format.name for format in FORMATS if format.name != "zarr"])
def test_a_pointer_of_git_lfs_is_named_as_one_by_every_format(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"a{format_named(name).suffixes[0]}"
    path.write_text(POINTER)
    with pytest.raises(SourceError, match=rf"{path}.* is a pointer of Git LFS, .*git lfs pull"):
        list(penstock.open(path))


def test_a_pointer_of_git_lfs_is_no_encoded_image_and_no_database(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_text(POINTER)
    (tmp_path / "data.mdb").write_text(POINTER)
    for path, fields in ((tmp_path / "a.jpg", ["encoded"]), (tmp_path, None)):
        with pytest.raises(SourceError, match="is a pointer of Git LFS"):
            list(penstock.open(path, fields=fields))


@pytest.mark.parametrize(
    "names",
    [
        ["train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"],
        ["a/train.jsonl", "a/Val.jsonl"],
        ["x-train2017/dev.jsonl", "x-test/dev.jsonl"],
    ],
)
def test_a_folder_of_several_splits_is_read_as_one_with_a_warning(tmp_path: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        lines(tmp_path / name, number)
    with pytest.warns(UserWarning, match=r"several splits, which are read as one: \w+ \(.*\), \w+ \(.*jsonl\)"):
        assert sorted(read(tmp_path)) == [0, 1]
    assert read(tmp_path / names[0]) == [0]


@pytest.mark.parametrize("names", [["train-0.jsonl", "train-1.jsonl"], ["contest.jsonl", "train.jsonl"]])
def test_a_folder_of_one_split_is_read_without_a_warning(tmp_path: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        lines(tmp_path / name, number)
    assert read(tmp_path) == [*range(len(names))]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_hive_partitions_of_text_are_named_as_left_out(tmp_path: Path, suffix: str) -> None:
    for year in (2025, 2026):
        folder = tmp_path / "set" / f"year={year}" / f"x={year}"
        folder.mkdir(parents=True)
        (folder / f"a{suffix}").write_text(f"x\n{year}\n" if suffix == ".csv" else f'{{"x": {year}}}\n')
    with pytest.warns(UserWarning, match=r"left out: .* state 'year', which the files do not hold; .* by map\(\), or"):
        assert read(tmp_path / "set") == [2025, 2026]
    assert read(tmp_path / "set", fields=["x"]) == [2025, 2026]
    assert read(tmp_path / "set" / "year=2026") == [2026]
    with pytest.raises(SourceError, match="'year'"):
        read(tmp_path / "set", fields=["x", "year"])


def test_several_revisions_in_the_cache_of_the_hub_are_refused(tmp_path: Path) -> None:
    snapshots = tmp_path / "datasets--a--b" / "snapshots"
    one, other = snapshots / ("0" * 40), snapshots / ("f" * 40)
    lines(one / "train.jsonl", 1)
    lines(tmp_path / "datasets--c--d" / "snapshots" / ("1" * 40) / "train.jsonl", 2)
    assert read(tmp_path) == [1, 2]
    other.mkdir()
    (other / "train.jsonl").symlink_to(one / "train.jsonl")
    for folder in (tmp_path, tmp_path / "datasets--a--b", snapshots):
        with pytest.raises(SourceError, match=f"several revisions of a repository, .* open one of them, as in {other}"):
            penstock.open(folder)
    assert read(other) == [1]


def test_files_that_one_pattern_matches_have_one_format_and_remotely_the_others_are_folders(tmp_path: Path) -> None:
    np.arange(40, dtype=np.uint16).tofile(tmp_path / "a.bin")  # to which any other file could be added
    options = {"length": 4, "dtype": "uint16"}
    for name, words in (
        ("vocabulary", "has no known suffix .* pass format="),
        ("labels.csv", r"is tokens, and .* is csv"),
    ):
        (tmp_path / name).write_text("x" * 40)
        for paths in (f"{tmp_path}/*", [tmp_path / "a.bin", tmp_path / name]):
            with pytest.raises(SourceError, match=words):
                penstock.open(paths, **options)
        (tmp_path / name).unlink()
    files = fsspec.filesystem("memory")
    files.pipe({"/one-pattern/a.jsonl": b'{"x": 1}\n', "/one-pattern/b/c.jsonl": b'{"x": 2}\n'})
    assert read("memory://one-pattern/*") == [1, 2]
    files.rm("/one-pattern", recursive=True)
