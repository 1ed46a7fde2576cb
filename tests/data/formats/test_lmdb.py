"""LMDB: read without its C library, as that and the usual writers wrote it; and damaged files do no harm."""

from __future__ import annotations

import os
import pickle
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from sample_files import assert_same, datasets, write_samples

import penstock
from penstock.core.errors import RecordError, SourceError
from penstock.data.formats.lmdb.source import LMDBWriter, concat_files
from penstock.data.schema import Field, Sample, Schema, plain

lmdb = pytest.importorskip("lmdb")


def database(path: Path, entries: dict[bytes, bytes], **options: Any) -> None:
    """Write entries as anybody would."""
    with (
        lmdb.open(str(path), map_size=64 << 20, **options) as environment,
        environment.begin(write=True) as transaction,
    ):
        for key, value in entries.items():
            transaction.put(key, value)


@given(datasets())
def test_samples_come_back_as_they_were(made: tuple[Schema, list[Sample]]) -> None:
    schema, samples = made
    with tempfile.TemporaryDirectory() as folder:
        write_samples(f"{folder}/a.lmdb", samples, schema)
        source = penstock.open(f"{folder}/a.lmdb")
        assert len(source) == len(samples)
        for number, sample in enumerate(samples):
            assert_same({name: plain(value) for name, value in sample.items()}, source[number])
        source.close()


@pytest.mark.parametrize("name", ["a.lmdb", "folder"])
def test_lmdb_reads_what_was_written(tmp_path: Path, name: str) -> None:
    samples = [{"x": np.full(number * 50, number)} for number in range(40)]
    write_samples(tmp_path / name, samples, kind="lmdb", commit_nbytes=4096)
    assert sorted(os.listdir(tmp_path)) == [name]
    with lmdb.open(str(tmp_path / name), subdir=name == "folder", readonly=True, lock=False) as environment:
        assert environment.stat()["entries"] == 40
        with environment.begin() as transaction:
            keys = list(transaction.cursor().iternext(values=False))
    assert keys == [b"%010d" % number for number in range(40)]
    source = penstock.open(tmp_path / name)
    assert [sample["x"].tolist() for sample in source] == [sample["x"].tolist() for sample in samples]
    source.close()


@pytest.mark.parametrize("size", [0, 1, 100, 1900, 2100, 4079, 4080, 4081, 50_000])
@pytest.mark.parametrize("count", [0, 1, 2, 700])
def test_values_of_others_are_read_whatever_their_size(tmp_path: Path, size: int, count: int) -> None:
    entries = {b"%08d" % number: random.Random(number).randbytes(size) for number in range(count)}
    database(tmp_path / "data", entries)
    source = penstock.open(tmp_path / "data")
    assert {sample["key"]: sample["value"] for sample in source} == entries
    source.close()


def test_what_was_deleted_and_written_again_is_read_as_lmdb_does(tmp_path: Path) -> None:
    rng = random.Random(0)
    with lmdb.open(str(tmp_path / "data"), map_size=64 << 20) as environment:
        for _ in range(60):
            with environment.begin(write=True) as transaction:
                for _ in range(50):
                    key = rng.randbytes(rng.randint(1, 100))
                    transaction.put(key, rng.randbytes(rng.choice([3, 300, 3000, 30000])))
                for key in rng.sample(list(transaction.cursor().iternext(values=False)), 20):
                    transaction.delete(key)
        with environment.begin() as transaction:
            entries = list(transaction.cursor())
    source = penstock.open(tmp_path / "data")
    found = [(sample["key"], sample["value"]) for sample in source]
    assert found == sorted(entries, key=lambda entry: (len(entry[0]), entry[0]))
    source.close()


def test_keys_that_are_numbers_come_in_their_order_and_what_tells_of_them_is_left_out(tmp_path: Path) -> None:
    entries = {b"%d" % number: b"v%d" % number for number in range(120)}
    database(tmp_path / "data", {**entries, b"__len__": pickle.dumps(120), b"__keys__": pickle.dumps(["1"])})
    source = penstock.open(tmp_path / "data")
    assert [sample["key"] for sample in source] == list(entries)
    source.close()
    chosen = penstock.open(tmp_path / "data", fields={"image": "value"}).select([3])
    assert list(chosen) == [{"image": b"v3"}]
    chosen.close()


def test_a_single_file_and_a_named_database_are_read(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "a.mdb"), subdir=False, max_dbs=2, map_size=1 << 20) as environment:
        inner = environment.open_db(b"train")
        with environment.begin(write=True) as transaction:
            for number in range(500):
                transaction.put(b"%d" % number, b"x" * number, db=inner)
    source = penstock.open(tmp_path / "a.mdb", database="train")
    assert [len(sample["value"]) for sample in source] == list(range(500))
    source.close()
    with pytest.raises(SourceError, match=r"databases \(train\)"):
        penstock.open(tmp_path / "a.mdb")
    with pytest.raises(SourceError, match=r"no database 'test'; it has train"):
        penstock.open(tmp_path / "a.mdb", database="test")


def test_several_values_for_a_key_are_refused(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "data"), max_dbs=1, map_size=1 << 20) as environment:
        environment.open_db(b"pairs", dupsort=True)
    with pytest.raises(SourceError, match="several values for a key"):
        penstock.open(tmp_path / "data", database="pairs")


def test_fields_are_chosen_and_renamed(tmp_path: Path) -> None:
    write_samples(tmp_path / "a.lmdb", [{"x": np.arange(3), "y": 2, "z": "a"}])
    source = penstock.open(tmp_path / "a.lmdb", fields={"image": "x", "label": "y"})
    assert sorted(source[0]) == ["image", "label"]
    assert list(source.select_fields(["label"])) == [{"label": 2}]
    source.close()


def test_arrays_may_be_written_to(tmp_path: Path) -> None:
    write_samples(tmp_path / "a.lmdb", [{"x": np.arange(3)}])
    source = penstock.open(tmp_path / "a.lmdb")
    source[0]["x"] += 1
    assert source[0]["x"].tolist() == [0, 1, 2]
    source.close()


def test_files_are_joined_and_several_are_one_source(tmp_path: Path) -> None:
    numbers = [np.arange(number) for number in range(30)]
    schema = {"x": Field("array", "int64", (None,))}
    parts = [str(tmp_path / f"{part}.lmdb") for part in range(3)]
    for part, path in enumerate(parts):
        write_samples(path, [{"x": one} for one in numbers[part * 10 : part * 10 + 10]], schema)
    concat_files(parts, str(tmp_path / "all.lmdb"))
    for source in (penstock.open(tmp_path / "all.lmdb"), penstock.open(str(tmp_path / "{0,1,2}.lmdb"))):
        assert [sample["x"].tolist() for sample in source] == [one.tolist() for one in numbers]
        source.close()


def test_threads_forks_and_pickles_read_the_same(tmp_path: Path) -> None:
    write_samples(tmp_path / "a.lmdb", [{"x": np.full(2000, number)} for number in range(64)])
    source = penstock.open(tmp_path / "a.lmdb")
    with ThreadPoolExecutor(4) as pool:
        assert [int(one["x"][0]) for one in pool.map(source.read, range(64))] == list(range(64))
    other = pickle.loads(pickle.dumps(source))
    assert int(other[5]["x"][9]) == 5
    other.close()
    loader = penstock.DataLoader(source, batch_size=8, num_workers=2, shuffle=True)
    assert sorted(torch.cat([batch["x"][:, 0] for batch in loader]).tolist()) == list(range(64))
    source.close()


def test_a_path_that_exists_is_not_written_to(tmp_path: Path) -> None:
    write_samples(tmp_path / "a.lmdb", [{"x": 1}])
    with pytest.raises(SourceError, match="exists"):
        LMDBWriter(str(tmp_path / "a.lmdb"), {"x": Field("number", "int64")})


def test_a_sample_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    writer = LMDBWriter(str(tmp_path / "a.lmdb"), {"x": Field("array", "int64", (3,))})
    with pytest.raises(SourceError, match=r"int64\[4\], and has to be int64\[3\]"):
        writer.write({"x": np.arange(4)})
    with pytest.raises(SourceError, match="fields"):
        writer.write({"y": np.arange(3)})
    writer.close()


def test_a_value_above_the_limit_is_refused(tmp_path: Path) -> None:
    database(tmp_path / "data", {b"a": b"x" * 1000})
    source = penstock.open(tmp_path / "data", max_record_nbytes=999)
    with pytest.raises(RecordError, match="1000 bytes are more than max_record_nbytes=999"):
        source[0]
    source.close()


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\0" * 10_000, bytes(range(256)) * 64])
def test_what_is_no_database_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.lmdb").write_bytes(data)
    with pytest.raises(SourceError, match=r"a\.lmdb"):
        penstock.open(tmp_path / "a.lmdb")


def test_a_broken_value_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    write_samples(tmp_path / "a.lmdb", [{"x": np.full(2000, number)} for number in range(8)])
    source = penstock.open(tmp_path / "a.lmdb")
    data = bytearray((tmp_path / "a.lmdb").read_bytes())
    at = int(source._files[0].index().places[3])
    data[at + 500] ^= 1
    (tmp_path / "a.lmdb").write_bytes(data)
    with pytest.raises(RecordError, match=rf"record b'0000000003' at byte {at}: its CRC-32"):
        source[3]
    assert int(source[4]["x"][0]) == 4
    source.close()


def test_a_truncated_file_gives_what_it_has(tmp_path: Path) -> None:
    write_samples(tmp_path / "a.lmdb", [{"x": np.full(2000, number)} for number in range(8)])
    source = penstock.open(tmp_path / "a.lmdb")
    os.truncate(tmp_path / "a.lmdb", int(source._files[0].index().places[5]) + 100)
    with pytest.raises(RecordError, match="truncated"):
        source[5]
    assert int(source[4]["x"][0]) == 4
    source.close()


def test_mutated_files_give_nothing_but_errors_and_samples(tmp_path: Path) -> None:
    database(tmp_path / "data", {b"%05d" % number: b"x" * (number * 37 % 5000) for number in range(300)})
    good = (tmp_path / "data" / "data.mdb").read_bytes()
    rng, refused = random.Random(0), 0
    for _ in range(400):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            page = rng.randrange(len(good) // 4096) if rng.random() < 0.5 else rng.randrange(4)
            at = page * 4096 + int(rng.random() ** 3 * 4096)
            match rng.randrange(4):
                case 0:
                    bad[at : at + 1] = bytes([rng.randrange(256)])
                case 1:
                    bad[at : at + 8] = rng.randrange(2**64).to_bytes(8, "little")
                case 2:
                    bad[at : at + 2] = rng.randrange(40).to_bytes(2, "little")
                case _:
                    del bad[rng.randrange(len(bad)) :]
        (tmp_path / "a.lmdb").write_bytes(bad)
        try:
            source = penstock.open(tmp_path / "a.lmdb")
        except SourceError:
            refused += 1
            continue
        for number in range(len(source)):
            try:
                assert len(source[number]["value"]) < 1 << 20
            except SourceError:
                refused += 1
        source.close()
    assert refused > 100
