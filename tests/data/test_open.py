"""What `penstock.open` makes of a path."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import numpy as np
import pytest
from sample_files import samples_in, write_samples

import penstock
from penstock.core.errors import OptionError, SourceError
from penstock.data.format_registry import FORMATS, format_of_path
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
        inspect("memory://a-format-is-said/export", format="csv", seconds=0).files,
        inspect("memory://a-format-is-said/", format="csv", seconds=0).files,
    ) == (1, 2)
    files.rm("/a-format-is-said", recursive=True)


@pytest.mark.parametrize("suffix", ["tar", "csv", "jsonl", "tfrecord"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12345\n", "git lfs pull"),
        (b"BZh91AY&SY" + bytes(100), "packed by bzip2"),
        (b"\xfd7zXZ\0" + bytes(100), "packed by xz"),
    ],
)
def test_a_file_that_is_no_data_is_named_as_what_it_is(
    tmp_path: Path, suffix: str, content: bytes, reason: str
) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=reason):
        list(penstock.open(path))
