"""Samples that are read together are those that are read one by one, in any order, of any format that does so."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from penstock.core.errors import RecordError
from penstock.data.formats.tfrecord.example import field, parse_feature_lists, varint_of
from penstock.data.source import Source

COUNT = 300


def hdf5(path: Path, **options: Any) -> Source:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path / "a.h5", "w") as file:
        x = file.create_dataset("x", (COUNT, 3, 4), ">f4", **options)
        x[:200] = np.random.default_rng(0).normal(size=(200, 3, 4))
        file["flag"] = np.arange(COUNT) % 3 == 0
        file["wide"] = np.arange(COUNT * 600).reshape(COUNT, 600)
        file["pair"] = np.array([(at, at / 2) for at in range(COUNT)], [("a", "i4"), ("b", "f8")])
        file["name"] = np.array([f"n{at}" for at in range(COUNT)], "S4")
    return penstock.open(path / "a.h5")


def table() -> Any:
    pa = pytest.importorskip("pyarrow")
    lists = [np.arange(at % 4, dtype=np.int32) for at in range(COUNT)]
    return pa.table(
        {
            "x": pa.FixedSizeListArray.from_arrays(np.arange(COUNT * 5.0), 5),
            "label": pa.array(range(COUNT)),
            "name": [None if at % 50 == 7 else f"ä{at}" for at in range(COUNT)],
            "raw": [b"b" * (at % 5) for at in range(COUNT)],
            "ragged": pa.array(lists, pa.list_(pa.int32())),
            "kind": pa.array([f"k{at % 3}" for at in range(COUNT)]).dictionary_encode(),
        }
    )


def parquet(path: Path) -> Source:
    made = table()
    import pyarrow.parquet as pq

    pq.write_table(made, path / "a.parquet", row_group_size=64)
    return penstock.open(path / "a.parquet")


def arrow(path: Path) -> Source:
    made = table()
    import pyarrow as pa

    with pa.ipc.new_file(path / "a.arrow", made.schema) as sink:
        sink.write_table(made, max_chunksize=50)
    return penstock.open(path / "a.arrow")


def lmdb(path: Path, sizes: Callable[[int], int] = lambda at: 10 + at * 7 % 900) -> Source:
    library = pytest.importorskip("lmdb")
    with (
        library.open(str(path / "a.lmdb"), subdir=False, map_size=1 << 26) as environment,
        environment.begin(write=True) as transaction,
    ):
        for at in range(COUNT):
            transaction.put(b"%d" % at, bytes([at % 256]) * sizes(at))
        transaction.put(b"__len__", b"300")
    return penstock.open(path / "a.lmdb")


OPENED: dict[str, Callable[[Path], Source]] = {
    "hdf5 contiguous": hdf5,
    "hdf5 chunks": lambda path: hdf5(path, chunks=(32, 3, 4)),
    "hdf5 gzip": lambda path: hdf5(path, chunks=(32, 2, 4), compression="gzip", shuffle=True),
    "parquet": parquet,
    "arrow": arrow,
    "lmdb": lmdb,
    "lmdb, long values": lambda path: lmdb(path, lambda at: 9 if at % 7 else 5000),
}


@pytest.fixture(params=sorted(OPENED))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    opened = OPENED[request.param](tmp_path)
    assert opened.reads_batches
    return opened


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert list(one) == list(other)
        for name, value in one.items():
            assert type(value) is type(other[name]), name
            np.testing.assert_array_equal(value, other[name])
            if isinstance(value, np.ndarray | np.generic):
                assert value.dtype == other[name].dtype
            if isinstance(value, np.ndarray):
                assert value.flags.writeable == other[name].flags.writeable, name


@pytest.mark.parametrize("cold", [False, True])
def test_a_batch_has_the_samples_that_are_read_one_by_one(source: Source, cold: bool) -> None:
    shuffled = np.random.default_rng(1).permutation(COUNT).tolist()
    for indices in (list(range(20, 180)), shuffled, [5, 250, 5, 5, 64], [-1, 3, -COUNT], []):
        expected = [source[index] for index in indices]
        bulk = source.__getitems__
        assert bulk is not None
        if cold:
            source.close()
        assert_same(bulk(indices), expected)
        if cold:
            source.close()
        with source.fetching(indices):
            assert_same([source[index] for index in indices], expected)
    source.close()


def test_iterating_gives_the_samples_in_order_and_resumes_at_each(source: Source) -> None:
    expected = [source[index] for index in range(COUNT)]
    assert_same(list(source), expected)
    assert_same(list(source.stream()), expected)
    passing = iter(source)
    for _ in range(130):
        next(passing)
    state, copied = source.state_dict(), pickle.loads(pickle.dumps(source))
    assert state["position"] == copied.state_dict()["position"] == 130
    copied.load_state_dict(state)
    assert_same(list(copied), expected[130:])
    source.close()


def test_loaders_give_what_they_give_of_single_samples(source: Source) -> None:
    name = next(name for name, value in source[0].items() if not isinstance(value, np.ndarray | str))

    def collate(samples: list[Any]) -> list[Any]:
        return [sample[name] for sample in samples]

    order = np.random.default_rng(2).permutation(COUNT)[:90].tolist()
    expected = [source[index][name] for index in order]
    for wrapped in (source, source.select(range(COUNT)).map(lambda sample: dict(sample))):
        for loader in (TorchDataLoader, penstock.DataLoader):
            made = loader(wrapped, batch_size=32, sampler=order, collate_fn=collate)
            assert [one for batch in made for one in batch] == expected
    source.close()


def test_samples_of_a_batch_share_no_memory_that_may_be_written_to(tmp_path: Path) -> None:
    source = hdf5(tmp_path)
    with source.fetching([4, 4, 5]):
        first, again, other = source[4], source[4], source[5]
    first["x"][:] = 77
    assert not (again["x"] == 77).any()
    assert not (other["x"] == 77).any()
    source.close()


class Counted(Source):
    """Reads batches; sample 3 is broken."""

    where = "counted"
    reads_batches = True

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __len__(self) -> int:
        return 6

    def read(self, index: int) -> Any:
        if index == 3:
            raise RecordError("counted", -1, index, "broken")
        return {"x": torch.tensor(index)}

    def read_many(self, indices: np.ndarray) -> list[Any]:
        self.batches.append(indices.tolist())
        return super().read_many(indices)


def test_a_broken_sample_is_named_and_the_others_of_its_batch_are_read() -> None:
    source = Counted()
    bulk = source.__getitems__
    assert bulk is not None
    with pytest.raises(RecordError, match="3") as caught:
        bulk([1, 3])
    assert "sample 3 of counted" in caught.value.__notes__[0]
    loader = penstock.DataLoader(source, batch_size=6, errors="skip")
    (batch,) = loader
    assert batch["x"].tolist() == [0, 1, 2, 4, 5]
    passing = iter(source)
    assert [int(next(passing)["x"]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RecordError, match="broken"):
        next(passing)


def test_what_is_read_ahead_is_given_once_and_to_its_own_source_alone() -> None:
    source, other = Counted(), Counted()
    with source.fetching([0, 1]), other.fetching([2]):
        assert int(other[2]["x"]) == 2
        assert int(source[1]["x"]) == 1
    assert (source.batches, other.batches) == ([[0, 1]], [[2]])
    with source.fetching([0]):
        assert source[0] is not source[0]


def test_steps_that_are_alike_are_parsed_as_those_that_are_not() -> None:
    def steps(values: list[list[int]], kind: int) -> bytes:
        lists = [
            field(kind, field(1, b"".join(map(varint_of, step)) if kind == 3 else np.float32(step).tobytes()))
            for step in values
        ]
        entry = field(1, b"x") + field(2, b"".join(field(1, one) for one in lists))
        return field(2, field(1, entry))

    for kind in (2, 3):
        for values in ([[1, 2], [3, 4]], [[5], [6], [7]], [[1, 2], [3]], [[1], [300]], [[200, 1], [1, 200]]):
            found = parse_feature_lists(steps(values, kind))["x"]
            assert [np.asarray(step).tolist() for step in found] == values
