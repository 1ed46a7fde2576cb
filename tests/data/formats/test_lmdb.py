"""LMDB: read as it and the usual writers wrote it, in any process; truncated files are errors."""

from __future__ import annotations

import os
import pickle
import random
import struct
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from sample_files import assert_same, datasets, write_samples

import penstock
from penstock.core.errors import RecordError, SourceError, WorkerKilledError
from penstock.data.formats.lmdb.source import _MAGIC, _PREFIX, LMDBWriter
from penstock.data.formats.tfrecord.example import serialize_example
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


def test_a_length_is_left_out_when_keys_are_compared_from_their_ends(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "a.mdb"), subdir=False, max_dbs=1, map_size=1 << 20) as environment:
        inner = environment.open_db(b"train", reverse_key=True)  # b"1z" is the last one
        with environment.begin(write=True) as transaction:
            for key in (b"0z", b"1z", b"__len__"):
                transaction.put(key, b"2", db=inner)
    source = penstock.open(tmp_path / "a.mdb", database="train")
    assert [sample["key"] for sample in source] == [b"0z", b"1z"]
    source.close()


WORDS = (b"keys", b"len", b"length", b"meta")


@pytest.mark.parametrize("others", [(b"a", b"cat", b"zoo"), (b"a", b"zoo", b"__len__"), ()])
def test_words_that_elsewhere_describe_samples_are_samples_among_words(tmp_path: Path, others: tuple[bytes]) -> None:
    database(tmp_path / "data", {key: b"of " + key for key in (*others, *WORDS)})
    with closing(penstock.open(tmp_path / "data")) as source:
        assert {sample["key"] for sample in source} == {*others, *WORDS} - {b"__len__"}
        assert len(source) == len(list(source))


@pytest.mark.parametrize("form", [b"%d", b"%05d", b"%08d_image.jpg"])
def test_words_are_left_out_where_keys_begin_with_digits(tmp_path: Path, form: bytes) -> None:
    keys = [form % number for number in range(30)]
    database(tmp_path / "data", {**dict.fromkeys(keys, b"x"), **dict.fromkeys(WORDS, b"y"), b"__len__": b"?"})
    with closing(penstock.open(tmp_path / "data")) as source:
        assert [sample["key"] for sample in source] == keys


def test_a_batch_takes_the_numbers_that_a_single_sample_takes(tmp_path: Path) -> None:
    database(tmp_path / "data", {b"%04d" % number: b"v%d" % number for number in range(9)})
    source = penstock.open(tmp_path / "data")
    for numbers in ([8, 0, 0], [-1, 3], (2, 1), np.array([5, -9]), [np.int64(4), True], range(9), []):
        assert source.__getitems__(numbers) == [source[number] for number in numbers]
    for wrong in ([0, 9], [-10]):
        with pytest.raises(IndexError):
            source.__getitems__(wrong)
    source.close()


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


def test_several_files_are_one_source(tmp_path: Path) -> None:
    numbers = [np.arange(number) for number in range(30)]
    schema = {"x": Field("array", "int64", (None,))}
    parts = [str(tmp_path / f"{part}.lmdb") for part in range(3)]
    for part, path in enumerate(parts):
        write_samples(path, [{"x": one} for one in numbers[part * 10 : part * 10 + 10]], schema)
    source = penstock.open(str(tmp_path / "{0,1,2}.lmdb"))
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


def test_a_value_of_which_parsing_takes_more_than_the_limit_is_refused(tmp_path: Path) -> None:
    record = serialize_example({"x": [b""] * (1 << 20)})
    database(tmp_path / "data", {b"0": _PREFIX.pack(_MAGIC, zlib.crc32(record)) + record})
    with (
        closing(penstock.open(tmp_path / "data", max_record_nbytes=32 << 20)) as source,
        pytest.raises(RecordError, match=r"parsing it may take \d+ bytes; 33554432 are the most"),
    ):
        source[0]


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\0" * 10_000, bytes(range(256)) * 64])
def test_what_is_no_database_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.lmdb").write_bytes(data)
    with pytest.raises(SourceError, match=r"a\.lmdb"):
        penstock.open(tmp_path / "a.lmdb")


def test_a_broken_value_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    write_samples(tmp_path / "a.lmdb", [{"x": np.full(2000, number + 1000)} for number in range(8)])
    data = (tmp_path / "a.lmdb").read_bytes()
    at = data.index(np.full(2000, 1003).tobytes())
    (tmp_path / "a.lmdb").write_bytes(data[: at + 500] + b"!" + data[at + 501 :])
    source = penstock.open(tmp_path / "a.lmdb")
    with pytest.raises(RecordError, match=r"record b'0000000003': its CRC-32"):
        source[3]
    assert int(source[4]["x"][0]) == 1004
    source.close()


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (b"", "no field 'x'"),
        (b"\xff" * 20, "Example"),
        (serialize_example({"__penstock__": [b'{"x":["array","int8",[2]]}'], "x": [b"abc"]}), "3 bytes for the shape"),
        (serialize_example({"__penstock__": [b'{"x":["array","object",[2]]}'], "x": [b"ab"]}), "impossible one"),
    ],
)
def test_a_value_whose_checksum_is_right_is_not_believed(tmp_path: Path, record: bytes, words: str) -> None:
    database(tmp_path / "data", {b"0": b"PSK\x01" + struct.pack("<I", zlib.crc32(record)) + record})
    source = penstock.open(tmp_path / "data", fields=["x"])
    with pytest.raises(RecordError, match=words):
        source[0]
    source.close()


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    database(tmp_path / "data", {b"%05d" % number: b"x" * (number * 37 % 5000) for number in range(60)})
    whole = (tmp_path / "data" / "data.mdb").read_bytes()
    for nbytes in [*range(0, len(whole), 1499), len(whole) - 1]:
        (tmp_path / "a.lmdb").write_bytes(whole[:nbytes])
        with pytest.raises(SourceError, match=r"a\.lmdb") as first:
            penstock.open(tmp_path / "a.lmdb")
        with pytest.raises(SourceError, match=r"a\.lmdb") as again:
            penstock.open(tmp_path / "a.lmdb")
        assert str(again.value) == str(first.value)


def test_a_file_that_lacks_only_pages_that_were_never_written_is_read(tmp_path: Path) -> None:
    samples = [b"%05d" % number for number in range(64)]
    with lmdb.open(str(tmp_path / "data"), map_size=64 << 20) as environment:
        for key in [*samples[:60], b"long", None, *samples[60:]]:
            with environment.begin(write=True) as transaction:
                if key is None:
                    transaction.delete(b"long")
                else:
                    transaction.put(key, b"x" * (100_000 if key == b"long" else 300))
        last = environment.info()["last_pgno"]
    os.truncate(tmp_path / "data" / "data.mdb", last * 4096)  # the end of the value that was deleted
    source = penstock.open(tmp_path / "data")
    assert [sample["key"] for sample in source] == samples
    source.close()


def test_a_file_that_is_cut_off_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    database(tmp_path / "data", {b"%05d" % number: b"x" * 3000 for number in range(60)})
    source = penstock.open(tmp_path / "data")
    assert len(source[59]["value"]) == 3000
    os.truncate(tmp_path / "data" / "data.mdb", 40_000)
    for read in (lambda: source[59], lambda: source.__getitems__([59]), lambda: list(source)):
        with pytest.raises(SourceError, match="truncated: it had"):
            read()
    source.close()


def test_a_file_is_read_by_several_sources_and_by_processes_that_are_forked_meanwhile(tmp_path: Path) -> None:
    database(tmp_path / "data", {b"%05d" % number: b"%d" % number for number in range(60)})
    source, other = penstock.open(tmp_path / "data"), penstock.open(tmp_path / "data")
    passing = iter(source)
    assert next(passing)["value"] == b"0" == other[0]["value"]
    child = os.fork()
    if not child:
        os._exit(0 if [source[5]["value"], *(one["value"] for one in other)][:2] == [b"5", b"0"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    source.close()
    assert [one["value"] for one in passing] == [b"%d" % number for number in range(1, 60)]
    other.close()


def test_a_file_that_the_program_has_open_itself_is_refused_with_the_reason(tmp_path: Path) -> None:
    database(tmp_path / "data", {b"a": b"b"})
    with (
        lmdb.open(str(tmp_path / "data"), readonly=True, lock=False),
        pytest.raises(SourceError, match=r"already open in this process.*close it there"),
    ):
        penstock.open(tmp_path / "data")


def test_a_pass_in_order_resumes_where_its_state_was_taken(tmp_path: Path) -> None:
    database(tmp_path / "data", {b"%05d" % number: b"%d" % number for number in range(60)})
    source = penstock.open(tmp_path / "data")
    passing = iter(source)
    for _ in range(17):
        next(passing)
    state = source.state_dict()
    passing.close()
    source.load_state_dict(state)
    assert next(iter(source))["value"] == b"17"
    source.close()


def test_a_database_between_values_is_refused(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "data"), max_dbs=2, map_size=1 << 20) as environment:
        environment.open_db(b"5")
        with environment.begin(write=True) as transaction:
            for number in (1, 2, 8, 9):
                transaction.put(b"%d" % number, b"x" * 48)
    source = penstock.open(tmp_path / "data")
    with pytest.raises(SourceError, match=r"databases \(5\)"):
        source[0]
    source.close()


def test_a_worker_that_lmdb_crashes_is_survived_and_the_file_is_named(tmp_path: Path) -> None:
    database(tmp_path / "data", {b"%05d" % number: b"x" * 5000 for number in range(60)})
    file = tmp_path / "data" / "data.mdb"
    data = bytearray(file.read_bytes())
    leaf = data.rindex(b"00059") - 8
    data[leaf : leaf + 4] = (len(data) - 1).to_bytes(4, "little")  # the bytes of the last value: more than follow
    file.write_bytes(data)
    source = penstock.open(tmp_path / "data")
    loader = penstock.DataLoader(source, batch_size=10, num_workers=1, errors="skip")
    assert sum(len(batch["key"]) for batch in loader) == 59
    assert loader.statistics().quarantined == (59,)
    loader = penstock.DataLoader(source, batch_size=10, num_workers=1)
    with pytest.raises(WorkerKilledError, match=r"making sample 59 of .*data\.mdb"):
        list(loader)
    source.close()


def test_damaged_files_are_checked_without_lmdb_and_give_nothing_but_errors_and_samples(tmp_path: Path) -> None:
    database(tmp_path / "data", {b"%05d" % number: b"x" * (number * 37 % 5000) for number in range(100)})
    good = (tmp_path / "data" / "data.mdb").read_bytes()
    rng, refused = random.Random(0), 0
    for _ in range(200):
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
            source = penstock.open(tmp_path / "a.lmdb", check=True)
        except SourceError:
            refused += 1
            continue
        assert all(len(sample["value"]) < 1 << 20 for sample in source)
        source.close()
    assert refused > 100


def test_keys_that_are_numbers_are_not_listed_and_one_that_is_missing_between_is_an_error(tmp_path: Path) -> None:
    entries = {b"%03d" % number: b"v%d" % number for number in range(120)}
    del entries[b"050"]
    database(tmp_path / "other", {**entries, b"049b": b"x", b"num-samples": b"120"})
    with closing(penstock.open(tmp_path / "other")) as source:
        assert source[49]["value"] == b"v49"
        with pytest.raises(RecordError, match=r"record b'050': it is missing.*check=True lists those"):
            source[50]
        assert {sample["key"] for sample in source} == {*entries, b"049b"}  # in sequence it is what the file has
    with closing(penstock.open(tmp_path / "other", check=True)) as source:
        assert {sample["key"] for sample in source} == {*entries, b"049b"}


@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 99, 100, 101, 1001])
def test_unpadded_numbers_without_gaps_are_not_listed(tmp_path: Path, count: int) -> None:
    database(tmp_path / "data", {b"%d" % number: b"x" for number in range(count)})
    with closing(penstock.open(tmp_path / "data")) as source:
        assert source._files[0]._keys is not None


GAPS = [
    {*range(130)} - {57},
    {*range(15)} - {3},
    {*range(130)} - {128},
    {*range(130)} - {57, 80, 125},
    {*range(1000)} - {*range(400, 800)},
    {*range(0, 240, 2)},
    {0, *random.Random(3).sample(range(1000), 500)},
]


@pytest.mark.parametrize("numbers", GAPS)
def test_numbers_with_gaps_are_all_read_by_the_keys_that_there_are(tmp_path: Path, numbers: set[int]) -> None:
    database(tmp_path / "data", {b"%d" % number: b"v%d" % number for number in numbers})
    expected = [{"key": b"%d" % number, "value": b"v%d" % number} for number in sorted(numbers)]
    with closing(penstock.open(tmp_path / "data")) as source:
        assert len(source) == len(numbers)
        assert list(source) == expected
        assert source[-1] == expected[-1]


def test_keys_that_end_with_nul_are_kept(tmp_path: Path) -> None:
    database(tmp_path / "data", {b"a\0": b"1", b"b\0": b"2"})
    with closing(penstock.open(tmp_path / "data")) as source:
        assert [sample["key"] for sample in source.__getitems__([1, 0])] == [b"b\0", b"a\0"]


def test_a_loader_lists_keys_before_its_workers_start(tmp_path: Path) -> None:
    database(tmp_path / "data", {b"key %d" % number: b"x" for number in range(20)})
    source = penstock.open(tmp_path / "data")
    assert source._files[0]._keys is None
    loader = penstock.DataLoader(source, batch_size=4, num_workers=1)
    assert sum(len(batch["key"]) for batch in loader) == 20
    assert source._files[0]._keys is not None
    source.close()
