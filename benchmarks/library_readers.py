"""Short programs that read samples by a library's own calls, the fast way, and penstock beside them: for `readers`."""

from __future__ import annotations

import csv
import io
import json
import shutil
import struct
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import penstock
from penstock.data.chunk_shuffle import ChunkShuffle

BATCH = 128
SIDE = 64
Pass = Callable[[], Iterable[Any]]
"""Makes all samples once, one by one or in batches."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table, with its files."""

    samples: int
    ours: Pass
    library: dict[str, Pass]
    """By what it is called; the first is the one that penstock is held to."""

    unit: str = "samples/CPU s"
    compares_all: bool = True
    """Whether every sample is compared; else the first."""

    notes: list[str] = field(default_factory=list)


def _batches(order: Sequence[int]) -> list[list[int]]:
    order = [int(index) for index in order]
    return [order[at : at + BATCH] for at in range(0, len(order), BATCH)]


def _by_batches(source: Any, order: Sequence[int]) -> Pass:
    batches = _batches(order)

    def one_pass() -> Iterator[list[Any]]:
        bulk = source.__getitems__
        for batch in batches:
            yield bulk(batch) if bulk else [source[index] for index in batch]

    return one_pass


def _pictures(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 32, (count, 3, SIDE, SIDE), dtype=np.uint8)


def _random(count: int) -> list[int]:
    found: list[int] = np.random.default_rng(0).permutation(count).tolist()
    return found


def _by_chunks(source: Any) -> list[int]:
    return list(ChunkShuffle(source.chunk_starts, seed=0))


# ── HDF5 ────────────────────────────────────────────────────────────────────────────────────────────────────


def _hdf5_file(folder: Path, times: int, **options: Any) -> tuple[str, int]:
    import h5py

    count, path = 1024 * times, str(folder / "train.h5")
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=_pictures(count), **options)
        file.create_dataset("label", data=np.arange(count))
    return path, count


def _hdf5_slices(path: str, rows: int) -> Iterator[dict[str, Any]]:
    import h5py

    with h5py.File(path) as file:
        x, label = file["x"], file["label"]
        for start in range(0, len(x), rows):
            for one, number in zip(x[start : start + rows], label[start : start + rows], strict=True):
                yield {"x": one, "label": number}


def _hdf5_map(path: str, order: Sequence[int]) -> Iterator[list[dict[str, Any]]]:
    import h5py

    with h5py.File(path) as file:
        x, label = (
            np.memmap(path, one.dtype, "r", one.id.get_offset(), one.shape) for one in (file["x"], file["label"])
        )
    for batch in _batches(order):
        yield [{"x": one, "label": number} for one, number in zip(x[batch], label[batch], strict=True)]


def _hdf5_chunks(path: str, order: Sequence[int], rows: int) -> Iterator[list[dict[str, Any]]]:
    import h5py

    held: dict[int, Any] = {}
    with h5py.File(path) as file:
        x, labels = file["x"], file["label"][:]
        for batch in _batches(order):
            samples = []
            for index in batch:
                number, at = divmod(index, rows)
                if number not in held:
                    held[number] = x[number * rows : (number + 1) * rows]
                samples.append({"x": held[number][at].copy(), "label": labels[index]})
            yield samples


def hdf5(folder: Path, times: int, *, batches: bool, **options: Any) -> Case:
    """Pictures of 64x64 and a label, contiguous or in chunks."""
    path, count = _hdf5_file(folder, times, **options)
    source = penstock.open(path)
    rows = options.get("chunks", (64,))[0]
    if not batches:
        library: dict[str, Pass] = {"h5py slices": partial(_hdf5_slices, path, rows)}
        return Case(samples=count, ours=_fresh(source), library=library)
    order = _by_chunks(source) if options else _random(count)
    library = {"h5py's chunks, held": partial(_hdf5_chunks, path, order, rows)}
    if not options:
        library = {"np.memmap at get_offset": partial(_hdf5_map, path, order)}
    return Case(samples=count, ours=_fresh(source, _by_batches(source, order)), library=library)


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────


def _table(count: int) -> Any:
    """Pictures as bytes, with their shape in the column's metadata, and a label."""
    import pyarrow as pa

    pictures = _pictures(count)
    data = [None, pa.py_buffer(pictures)]
    x = pa.FixedSizeBinaryArray.from_buffers(pa.binary(pictures[0].nbytes), count, data)
    shape = pa.field("x", x.type, metadata={"penstock.array": f"uint8[3, {SIDE}, {SIDE}]"})
    return pa.table([x, np.arange(count)], schema=pa.schema([shape, pa.field("label", pa.int64())]))


def _columns(table: Any) -> tuple[np.ndarray, np.ndarray]:
    x = table.column("x").combine_chunks()
    values = np.frombuffer(x.buffers()[1], np.uint8, len(x) * x.type.byte_width, x.offset * x.type.byte_width)
    return values.reshape(len(x), 3, SIDE, SIDE), table.column("label").to_numpy()


def _rows(tables: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for table in tables:
        for one, number in zip(*_columns(table), strict=True):
            yield {"x": one, "label": number}


def _group_rows(read: Callable[[int], Any], starts: Sequence[int], order: Sequence[int]) -> Iterator[list[Any]]:
    held: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    rows = starts[1]
    for batch in _batches(order):
        samples = []
        for index in batch:
            number, at = divmod(index, rows)
            if number not in held:
                held[number] = _columns(read(number))
            x, label = held[number]
            samples.append({"x": x[at], "label": label[at]})
        yield samples


def parquet(folder: Path, times: int, *, batches: bool) -> Case:
    """Pictures of 64x64 and a label, in row groups of 256 rows."""
    import pyarrow.parquet as pq

    count, path = 2048 * times, str(folder / "train.parquet")
    pq.write_table(_table(count), path, row_group_size=256, use_dictionary=False)
    source = penstock.open(path)

    def groups() -> Iterator[Any]:
        with pq.ParquetFile(path) as file:
            for number in range(file.num_row_groups):
                yield file.read_row_group(number, use_threads=False)

    if not batches:
        return Case(samples=count, ours=_fresh(source), library={"row groups to NumPy": lambda: _rows(groups())})
    order = _by_chunks(source)
    file = pq.ParquetFile(path)
    read = partial(file.read_row_group, use_threads=False)
    library: dict[str, Pass] = {"row groups, held": partial(_group_rows, read, source.chunk_starts, order)}
    return Case(samples=count, ours=_fresh(source, _by_batches(source, order)), library=library)


def _fresh(source: Any, one_pass: Pass | None = None) -> Pass:
    """Let go of what the pass before has unpacked, as the library's program does."""

    def run() -> Iterable[Any]:
        source.close()
        return (one_pass or partial(iter, source))()

    return run


def arrow(folder: Path, times: int) -> Case:
    """The same as an Arrow stream with batches of 64 rows, opened and read."""
    import pyarrow as pa

    count, path = 2048 * times, str(folder / "train.arrow")
    table = _table(count)
    with pa.ipc.new_stream(path, table.schema) as sink:
        sink.write_table(table, max_chunksize=64)

    def library() -> Iterator[Any]:
        with pa.memory_map(path) as mapped:
            yield from _rows(pa.Table.from_batches([batch]) for batch in pa.ipc.open_stream(mapped))

    return Case(samples=count, ours=lambda: penstock.open(path), library={"open_stream on a map": library})


def arrow_messages(folder: Path, times: int) -> Case:
    """Batches of 4 rows: what opening a stream of them takes, when every one is looked at."""
    import pyarrow as pa

    count, path = 4096 * times, str(folder / "train.arrow")
    table = _table(count)
    with pa.ipc.new_stream(path, table.schema) as sink:
        sink.write_table(table, max_chunksize=4)

    def ours() -> Iterator[int]:
        yield len(penstock.open(path))

    def library() -> Iterator[int]:
        with pa.memory_map(path) as mapped:
            yield sum(batch.num_rows for batch in pa.ipc.open_stream(mapped))

    return Case(samples=count // 4, ours=ours, library={"open_stream on a map": library}, unit="batches/CPU s")


# ── LMDB ────────────────────────────────────────────────────────────────────────────────────────────────────


def _lmdb_file(folder: Path, count: int, nbytes: int) -> str:
    import lmdb

    path = str(folder / "train.lmdb")
    data = np.random.default_rng(0).bytes(1 << 20)
    with (
        lmdb.open(path, subdir=False, map_size=1 << 31, sync=False) as environment,
        environment.begin(write=True) as transaction,
    ):
        for number in range(count):
            start = number * 997 % 1_000_000
            transaction.put(b"%08d" % number, data[start : start + nbytes], append=True)
    return path


def lmdb(folder: Path, times: int, *, batches: bool, nbytes: int) -> Case:
    """Values of some bytes."""
    import lmdb as library

    count = 5_000 * times
    path = _lmdb_file(folder, count, nbytes)
    source = penstock.open(path)
    order = _random(count)
    other = shutil.copy(path, str(folder / "copy.lmdb"))  # the package opens no file twice in a process
    opened = library.open(other, readonly=True, lock=False, subdir=False)

    def in_order() -> Iterator[dict[str, bytes]]:
        with opened.begin() as transaction:
            for key, value in transaction.cursor():
                yield {"key": key, "value": value}

    def gets() -> Iterator[list[dict[str, bytes]]]:
        for batch in _batches(order):
            with opened.begin() as transaction:
                keys = [b"%08d" % index for index in batch]
                yield [{"key": key, "value": transaction.get(key)} for key in keys]

    if batches:
        return Case(samples=count, ours=_by_batches(source, order), library={"lmdb's get": gets})
    return Case(samples=count, ours=partial(iter, source), library={"lmdb's cursor": in_order})


def lmdb_opening(folder: Path, times: int) -> Case:
    """100 000 values: how often they can be opened, and counted."""
    import lmdb as library

    path = _lmdb_file(folder, 100_000, 1000)

    def ours() -> Iterator[int]:
        yield len(penstock.open(path))

    def theirs() -> Iterator[int]:
        with library.open(path, readonly=True, lock=False, subdir=False) as opened:
            yield opened.stat()["entries"]

    return Case(samples=1, ours=ours, library={"lmdb.open and stat": theirs}, unit="openings/CPU s")


# ── text ────────────────────────────────────────────────────────────────────────────────────────────────────


def jsonl(folder: Path, times: int) -> Case:
    """Objects with a list of 32 numbers and a label."""
    import pyarrow.json as pajson

    count, path = 8192 * times, folder / "train.jsonl"
    vectors = np.random.default_rng(0).normal(size=(count, 32)).round(6).tolist()
    with path.open("w") as file:
        for number, vector in enumerate(vectors):
            file.write(json.dumps({"x": vector, "label": number}) + "\n")
    source = penstock.open(str(path))

    def lines() -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            for line in file:
                row = json.loads(line)
                row["x"] = np.array(row["x"])
                yield row

    def table() -> Iterator[dict[str, Any]]:
        found = pajson.read_json(path, pajson.ReadOptions(use_threads=False))
        for batch in found.to_batches():
            x, labels = batch.column("x"), batch.column("label").to_numpy()
            values, ends = x.values.to_numpy(), x.offsets.to_numpy()
            for row in range(batch.num_rows):
                yield {"x": values[ends[row] : ends[row + 1]], "label": labels[row]}

    return Case(samples=count, ours=partial(iter, source), library={"json.loads": lines, "pyarrow.json": table})


def csv_rows(folder: Path, times: int) -> Case:
    """Rows of 16 numbers."""
    count, path = 16384 * times, folder / "train.csv"
    table = np.random.default_rng(0).normal(size=(count, 16)).round(6)
    np.savetxt(path, table, "%.6f", delimiter=",", header=",".join(f"x{at}" for at in range(16)), comments="")
    source = penstock.open(str(path))

    def rows() -> Iterator[dict[str, float]]:
        with path.open(newline="") as file:
            reader = csv.reader(file)
            names = next(reader)
            for row in reader:
                yield dict(zip(names, map(float, row), strict=True))

    return Case(samples=count, ours=partial(iter, source), library={"csv.reader and float": rows})


# ── TFRecord ────────────────────────────────────────────────────────────────────────────────────────────────


def _messages() -> tuple[Any, Any]:
    """Return protobuf's classes of tf.train.Example and SequenceExample."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="bench.proto", package="bench", syntax="proto3")
    repeated, optional, kinds = 3, 1, descriptor_pb2.FieldDescriptorProto

    def message(name: str, *fields: tuple[str, int, int, int, str]) -> Any:
        made = file.message_type.add(name=name)
        for one, number, label, kind, of in fields:
            made.field.add(name=one, number=number, label=label, type=kind, type_name=of or None)  # type: ignore[arg-type]
        return made

    def entries(owner: str, name: str, value: str) -> None:
        made = message(owner, (name, 1, repeated, kinds.TYPE_MESSAGE, f".bench.{owner}.Entry"))
        entry = made.nested_type.add(name="Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=1, type=kinds.TYPE_STRING)
        entry.field.add(name="value", number=2, label=1, type=kinds.TYPE_MESSAGE, type_name=f".bench.{value}")

    message("BytesList", ("value", 1, repeated, kinds.TYPE_BYTES, ""))
    message("FloatList", ("value", 1, repeated, kinds.TYPE_FLOAT, ""))
    message("Int64List", ("value", 1, repeated, kinds.TYPE_INT64, ""))
    lists = (("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List"))
    message(
        "Feature", *((one, at, optional, kinds.TYPE_MESSAGE, f".bench.{of}") for at, (one, of) in enumerate(lists, 1))
    )
    entries("Features", "feature", "Feature")
    message("FeatureList", ("feature", 1, repeated, kinds.TYPE_MESSAGE, ".bench.Feature"))
    entries("FeatureLists", "feature_list", "FeatureList")
    message("Example", ("features", 1, optional, kinds.TYPE_MESSAGE, ".bench.Features"))
    message(
        "SequenceExample",
        ("context", 1, optional, kinds.TYPE_MESSAGE, ".bench.Features"),
        ("feature_lists", 2, optional, kinds.TYPE_MESSAGE, ".bench.FeatureLists"),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made = (pool.FindMessageTypeByName(f"bench.{name}") for name in ("Example", "SequenceExample"))
    example, sequence = map(message_factory.GetMessageClass, made)
    return example, sequence


def _frames(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while head := file.read(12):
            yield file.read(struct.unpack_from("<Q", head)[0])
            file.seek(4, io.SEEK_CUR)


def _write_frames(path: Path, records: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        for record in records:
            file.write(struct.pack("<QI", len(record), 0) + record + bytes(4))


def tf_example(folder: Path, times: int) -> Case:
    """256 floats and a label."""
    count, path = 4096 * times, folder / "train.tfrecord"
    example, _ = _messages()
    values = np.random.default_rng(0).normal(size=(count, 256)).astype(np.float32)

    def record(number: int) -> bytes:
        made = example()
        made.features.feature["x"].float_list.value.extend(values[number].tolist())
        made.features.feature["label"].int64_list.value.append(number)
        return bytes(made.SerializeToString(deterministic=True))

    _write_frames(path, map(record, range(count)))
    source = penstock.open(str(path), check=False)

    def parsed() -> Iterator[dict[str, Any]]:
        for raw in _frames(path):
            feature = example.FromString(raw).features.feature
            x = np.array(feature["x"].float_list.value, np.float32)
            yield {"x": x, "label": feature["label"].int64_list.value[0]}

    return Case(samples=count, ours=partial(iter, source), library={"protobuf (upb)": parsed})


def sequence_example(folder: Path, times: int) -> Case:
    """32 steps of 16 floats and an integer each, and a label."""
    count, path = 512 * times, folder / "train.tfrecord"
    _, sequence = _messages()
    values = np.random.default_rng(0).normal(size=(count, 32, 16)).astype(np.float32)

    def record(number: int) -> bytes:
        made = sequence()
        made.context.feature["label"].int64_list.value.append(number)
        for step in values[number]:
            made.feature_lists.feature_list["x"].feature.add().float_list.value.extend(step.tolist())
        for step in range(32):
            made.feature_lists.feature_list["step"].feature.add().int64_list.value.append(step)
        return bytes(made.SerializeToString(deterministic=True))

    _write_frames(path, map(record, range(count)))
    source = penstock.open(str(path), check=False)

    def parsed() -> Iterator[dict[str, Any]]:
        for raw in _frames(path):
            found = sequence.FromString(raw)
            lists = found.feature_lists.feature_list
            yield {
                "label": found.context.feature["label"].int64_list.value[0],
                "x": np.array([one.float_list.value for one in lists["x"].feature], np.float32),
                "step": np.array([one.int64_list.value[0] for one in lists["step"].feature]),
            }

    return Case(samples=count, ours=partial(iter, source), library={"protobuf (upb)": parsed})


# ── Zarr and tar ────────────────────────────────────────────────────────────────────────────────────────────


def zarr(folder: Path, times: int) -> Case:
    """Pictures of 64x64 and a label, in chunks of 64 rows."""
    import zarr as library

    count, path = 1024 * times, str(folder / "train.zarr")
    root = library.open_group(path, mode="w")
    for name, one in (("x", _pictures(count)), ("label", np.arange(count))):
        root.create_array(name, shape=one.shape, chunks=(64, *one.shape[1:]), dtype=one.dtype)[:] = one
    source = penstock.open(path)

    def slices() -> Iterator[dict[str, Any]]:
        group = library.open_group(path, mode="r")
        x, label = group["x"], group["label"]
        for start in range(0, count, 64):
            for one, number in zip(x[start : start + 64], label[start : start + 64], strict=True):
                yield {"x": one, "label": number}

    return Case(samples=count, ours=_fresh(source), library={"zarr's slices": slices})


def tar(folder: Path, times: int) -> Case:
    """Members of 100 bytes: their headers count."""
    count, path = 4096 * times, str(folder / "train.tar")
    with tarfile.open(path, "w") as archive:
        for number in range(count):
            info = tarfile.TarInfo(f"{number:06}.bin")
            info.size = 100
            archive.addfile(info, io.BytesIO(bytes([number % 256]) * 100))
    source = penstock.open(path)

    def members() -> Iterator[dict[str, Any]]:
        with tarfile.open(path, "r|") as archive:
            for info in archive:
                file = archive.extractfile(info)
                if file is not None:
                    yield {"__key__": info.name.partition(".")[0], "bin": file.read()}

    return Case(samples=count, ours=partial(iter, source), library={"tarfile": members})


CASES: dict[str, Callable[[Path, int], Case]] = {
    "HDF5 gzip, in order": partial(hdf5, batches=False, chunks=(64, 3, SIDE, SIDE), compression="gzip"),
    "HDF5 gzip, batches": partial(hdf5, batches=True, chunks=(64, 3, SIDE, SIDE), compression="gzip"),
    "HDF5 contiguous, in order": partial(hdf5, batches=False),
    "HDF5 contiguous, batches": partial(hdf5, batches=True),
    "Parquet, in order": partial(parquet, batches=False),
    "Parquet, batches": partial(parquet, batches=True),
    "Arrow stream, in order": arrow,
    "Arrow stream, opening": arrow_messages,
    "LMDB of 1 kB, in order": partial(lmdb, batches=False, nbytes=1000),
    "LMDB of 1 kB, batches": partial(lmdb, batches=True, nbytes=1000),
    "LMDB of 12 KiB, in order": partial(lmdb, batches=False, nbytes=12288),
    "LMDB of 12 KiB, batches": partial(lmdb, batches=True, nbytes=12288),
    "LMDB, opening": lmdb_opening,
    "JSONL": jsonl,
    "CSV": csv_rows,
    "tf.Example": tf_example,
    "SequenceExample": sequence_example,
    "Zarr, in order": zarr,
    "tar": tar,
}
