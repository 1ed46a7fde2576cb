"""How those who know a format well read it: whole chunks, row groups and batches at once, and loaders of its own.

Each returns something whose passes are epochs of batches of the files that `benchmarks.sources` writes, in the
configuration that its documentation recommends. What it needs is imported inside, where it runs.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info

from benchmarks.adapters import Epochs, OpenLoader
from benchmarks.workloads import Workload

SIDE = 64
SHAPE = (3, SIDE, SIDE)


@dataclass(frozen=True, kw_only=True)
class SkilledReader:
    """A reader that can be sent to a process of its own."""

    name: str
    format: str
    needs: str
    """A module."""

    opens: Callable[[Path, int], Any]
    """Given the folder and a number of workers, the loader."""

    folder: Path = Path()
    workers: int = 2

    def why_unavailable(self) -> str | None:
        """Return why it cannot run here, or None."""
        package = self.needs.partition(".")[0]
        is_there = importlib.util.find_spec(package) and importlib.util.find_spec(self.needs)
        return None if is_there else f"{self.needs} is not installed"

    def supports(self, workload: Workload) -> bool:
        """Return False: it reads its own files only."""
        return False

    @contextmanager
    def open(self, *_: Any, **__: Any) -> Iterator[Epochs]:
        """Open it."""
        torch.set_num_threads(1)
        with OpenLoader(self.opens(self.folder, self.workers)) as epochs:
            yield epochs


# ── a batch in one go, in torch's DataLoader ────────────────────────────────────────────────────────────────


def _whole_batches(dataset: Dataset[Any], sampler: Any, workers: int) -> Any:
    """Return torch's loader of batches that the dataset makes itself: the sampler's items are their indices."""
    return DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=workers, persistent_workers=True)


def _shuffled(dataset: Any, batch_size: int) -> Any:
    return BatchSampler(RandomSampler(dataset), batch_size, drop_last=False)


class _Chunks(Sampler[slice]):
    """The slices of a dataset's chunks, in random order."""

    def __init__(self, count: int, chunk: int) -> None:
        self._slices = [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]

    def __len__(self) -> int:
        return len(self._slices)

    def __iter__(self) -> Iterator[slice]:
        return (self._slices[number] for number in torch.randperm(len(self)).tolist())


class _H5Chunks(Dataset[tuple[Tensor, Tensor]]):
    """A chunk is a batch, read in one slice and shuffled inside."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None

    def __getitem__(self, rows: slice) -> tuple[Tensor, Tensor]:
        if self._file is None:
            import h5py

            self._file = h5py.File(self._path)
        order = torch.randperm(rows.stop - rows.start)
        images, labels = (torch.from_numpy(self._file[name][rows]) for name in ("image", "label"))
        return images[order], labels[order]


def _h5_chunks(folder: Path, workers: int) -> Any:
    import h5py

    path = folder / "train.h5"
    with h5py.File(path) as file:
        count = len(file["label"])
    return _whole_batches(_H5Chunks(path), _Chunks(count, 64), workers)


class _H5Map(Dataset[tuple[Tensor, Tensor]]):
    """A contiguous dataset as a map of its bytes; a batch is one gather."""

    def __init__(self, path: Path) -> None:
        import h5py

        with h5py.File(path) as file:
            self._maps = [
                np.memmap(path, file[name].dtype, "r", file[name].id.get_offset(), file[name].shape)
                for name in ("image", "label")
            ]

    def __len__(self) -> int:
        return len(self._maps[0])

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        images, labels = (torch.from_numpy(one[indices]) for one in self._maps)
        return images, labels


def _h5_map(folder: Path, workers: int) -> Any:
    dataset = _H5Map(folder / "train.h5")
    return _whole_batches(dataset, _shuffled(dataset, 64), workers)


class _RowGroups(IterableDataset[dict[str, Tensor]]):
    """Row groups in random order, dealt out to the workers; each becomes NumPy at once, is shuffled, and cut."""

    def __init__(self, path: Path, batch_size: int) -> None:
        self._path = path
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        import pyarrow.parquet as pq

        info = get_worker_info()
        who, among = (info.id, info.num_workers) if info is not None else (0, 1)
        file = pq.ParquetFile(self._path)
        for group in np.random.default_rng(0).permutation(file.num_row_groups)[who::among].tolist():
            table = file.read_row_group(group).combine_chunks()
            images = table["image"].chunk(0).flatten().to_numpy().reshape(table.num_rows, -1)
            labels = table["label"].to_numpy()
            order = np.random.default_rng(group).permutation(table.num_rows)
            for start in range(0, len(order), self._batch_size):
                rows = order[start : start + self._batch_size]
                yield {"image": torch.from_numpy(images[rows]), "label": torch.from_numpy(labels[rows])}


def _row_groups(folder: Path, workers: int) -> Any:
    dataset = _RowGroups(folder / "train.parquet", 64)
    return DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=True)


class _LmdbBatches(Dataset[Tensor]):
    """A batch is one transaction and one buffer."""

    def __init__(self, path: Path) -> None:
        import lmdb

        self._path, self._env = str(path), None
        with lmdb.open(self._path, readonly=True, lock=False, subdir=False) as env:
            self._count = int(env.stat()["entries"])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, indices: list[int]) -> Tensor:
        if self._env is None:
            import lmdb

            self._env = lmdb.open(self._path, readonly=True, lock=False, readahead=False, subdir=False)
        with self._env.begin(buffers=True) as reading:
            data = b"".join([reading.get(b"%08d" % index) for index in indices])
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(len(indices), *SHAPE)


def _lmdb_batches(folder: Path, workers: int) -> Any:
    dataset = _LmdbBatches(folder / "train.lmdb")
    return _whole_batches(dataset, _shuffled(dataset, 64), workers)


class _Windows(Dataset[Tensor]):
    """A batch is one gather from a memory map."""

    def __init__(self, path: Path, length: int) -> None:
        self._tokens = np.memmap(path, np.uint16, "r").reshape(-1, length)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, indices: list[int]) -> Tensor:
        return torch.from_numpy(self._tokens[indices].astype(np.int64))


def _windows(folder: Path, workers: int) -> Any:
    dataset = _Windows(folder / "train.bin", 1024)
    return _whole_batches(dataset, _shuffled(dataset, 64), workers)


class _Table(IterableDataset[dict[str, Tensor]]):
    """A text file parsed by pyarrow, block by block, in one worker: several would each have to parse all of it."""

    def __init__(self, path: Path, batch_size: int) -> None:
        self._path = path
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for table in self._tables():
            columns = {name: _numpy(table[name].combine_chunks()) for name in table.column_names}
            for start in range(0, table.num_rows, self._batch_size):
                rows = slice(start, start + self._batch_size)
                yield {name: torch.from_numpy(column[rows].copy()) for name, column in columns.items()}

    def _tables(self) -> Iterator[Any]:
        import pyarrow as pa
        from pyarrow import csv, json

        if self._path.suffix == ".jsonl":
            table = json.read_json(self._path)
            per = 8 * self._batch_size
            yield from (table.slice(start, per) for start in range(0, table.num_rows, per))
        else:
            for batch in csv.open_csv(self._path):
                yield pa.Table.from_batches([batch])


def _numpy(column: Any) -> np.ndarray:
    if hasattr(column, "flatten") and column.type.num_fields:
        flat: np.ndarray = column.flatten().to_numpy(zero_copy_only=False)
        return flat.reshape(len(column), -1)
    whole: np.ndarray = column.to_numpy(zero_copy_only=False)
    return whole


def _table(name: str, folder: Path, workers: int) -> Any:
    dataset = _Table(folder / name, 128)
    return DataLoader(dataset, batch_size=None, num_workers=min(1, workers), persistent_workers=workers > 0)


# ── loaders of their own ────────────────────────────────────────────────────────────────────────────────────


def _hugging_face(folder: Path, workers: int) -> Any:
    import datasets

    dataset = datasets.load_from_disk(folder / "train").with_format("torch")
    return _whole_batches(dataset, _shuffled(dataset, 64), workers)  # type: ignore[arg-type]


def _hugging_face_parquet(folder: Path, workers: int) -> Any:
    import datasets

    files = {"train": str(folder / "train.parquet")}
    dataset = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(folder / "cache"))
    dataset = dataset.with_format("torch")
    return _whole_batches(dataset, _shuffled(dataset, 64), workers)  # type: ignore[arg-type]


def _lit_data(folder: Path, workers: int) -> Any:
    import litdata

    kept = folder / "litdata"
    if not kept.exists():
        from penstock.data.open import open as open_files

        source = open_files(sorted((folder / "train").glob("*.arrow")))
        os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"
        litdata.optimize(
            fn=source.__getitem__,
            inputs=list(range(len(source))),
            output_dir=str(kept),
            chunk_bytes="64MB",
            num_workers=1,
        )
    dataset = litdata.StreamingDataset(str(kept), shuffle=True, drop_last=False)
    return litdata.StreamingDataLoader(dataset, batch_size=64, num_workers=workers, persistent_workers=True)


def _web_dataset(folder: Path, workers: int) -> Any:
    import webdataset as wds

    pattern = str(folder / "train-{0..7}.tar")
    dataset = wds.WebDataset(pattern, shardshuffle=False).decode().to_tuple("npy", "cls").batched(64)
    return wds.WebLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=True)


def _grain(folder: Path, workers: int) -> Any:
    import grain.python as grain

    windows = np.memmap(folder / "train.bin", np.uint16, "r").reshape(-1, 1024)
    dataset = grain.MapDataset.source(windows).shuffle(seed=0).map(_as_int64).batch(64)
    made = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0))
    return made.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers)) if workers else made


def _as_int64(window: np.ndarray) -> np.ndarray:
    return window.astype(np.int64)


def _tf_examples(folder: Path, workers: int) -> Any:
    import tensorflow as tf

    described = {
        "vector": tf.io.FixedLenFeature([256], tf.float32),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }
    made = tf.data.TFRecordDataset(str(folder / "train.tfrecord")).batch(128)
    made = made.map(lambda batch: tf.io.parse_example(batch, described), num_parallel_calls=workers)
    return _tf_epochs(made, workers)


def _tf_images(folder: Path, workers: int) -> Any:
    import tensorflow as tf

    files = sorted((folder / "train").glob("*/*.jpg"))
    labels = [int(file.parent.name.removeprefix("class")) for file in files]

    def decode(path: Any, label: Any) -> tuple[Any, Any]:
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        sides = tf.cast(tf.shape(image)[:2], tf.float32)
        wanted = tf.cast(tf.round(sides * 224 / tf.reduce_min(sides)), tf.int32)
        image = tf.image.resize(image, wanted, antialias=True)
        image = tf.image.resize_with_crop_or_pad(image, 224, 224)
        return tf.transpose(tf.cast(tf.round(image), tf.uint8), (2, 0, 1)), label

    made = tf.data.Dataset.from_tensor_slices((list(map(str, files)), labels)).shuffle(len(files))
    return _tf_epochs(made.map(decode, num_parallel_calls=workers).batch(64), workers)


class _TfEpochs:
    """A tf.data.Dataset whose epochs are NumPy arrays, which are views of TensorFlow's tensors."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset.as_numpy_iterator())


def _tf_epochs(dataset: Any, workers: int) -> _TfEpochs:
    import tensorflow as tf

    options = tf.data.Options()
    options.threading.private_threadpool_size = workers
    return _TfEpochs(dataset.prefetch(2).with_options(options))


def _dali_images(folder: Path, workers: int) -> Any:
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @pipeline_def  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        encoded, label = fn.readers.file(file_root=str(folder / "train"), random_shuffle=True, name="files")
        image = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
        image = fn.resize(image, resize_shorter=224.0, interp_type=types.INTERP_TRIANGULAR, antialias=True)
        return fn.transpose(fn.crop(image, crop=(224, 224)), perm=[2, 0, 1]), label

    made = pipeline(batch_size=64, num_threads=workers, device_id=None, seed=0)
    made.build()
    return DALIGenericIterator(made, ["image", "label"], reader_name="files", auto_reset=True)


def _torchcodec_clips(folder: Path, workers: int) -> Any:
    dataset = _Clips([folder / f"{number}.mp4" for number in range(8)], 10, 16)
    return DataLoader(dataset, 8, shuffle=True, num_workers=workers, persistent_workers=True)


class _Clips(Dataset[Tensor]):
    """Clips of videos whose decoders stay open."""

    def __init__(self, paths: list[Path], clips: int, frames: int) -> None:
        self._paths, self._clips, self._frames = paths, clips, frames
        self._decoders: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._paths) * self._clips

    def __getitem__(self, index: int) -> Tensor:
        from torchcodec.decoders import VideoDecoder

        number, clip = divmod(index, self._clips)
        if number not in self._decoders:
            self._decoders[number] = VideoDecoder(str(self._paths[number]), num_ffmpeg_threads=1)
        first = clip * self._frames
        data: Tensor = self._decoders[number].get_frames_in_range(first, first + self._frames).data
        return data


def _reader(format: str, name: str, needs: str, opens: Callable[[Path, int], Any]) -> SkilledReader:
    return SkilledReader(name=name, format=format, needs=needs, opens=opens)


READERS = (
    _reader("images", "DALI, on the CPU", "nvidia.dali", _dali_images),
    _reader("images", "tf.data", "tensorflow", _tf_images),
    _reader("hdf5 gzip", "h5py, a chunk a batch", "h5py", _h5_chunks),
    _reader("hdf5 whole", "np.memmap at get_offset, a gather a batch", "h5py", _h5_map),
    _reader("parquet", "pyarrow, row groups to NumPy", "pyarrow", _row_groups),
    _reader("parquet", "Hugging Face datasets, whole batches", "datasets", _hugging_face_parquet),
    _reader("arrow", "Hugging Face datasets, whole batches", "datasets", _hugging_face),
    _reader("arrow", "litdata, in its own format", "litdata", _lit_data),
    _reader("lmdb", "lmdb, a transaction a batch", "lmdb", _lmdb_batches),
    _reader("tar", "WebDataset, batched in the workers", "webdataset", _web_dataset),
    _reader("tfrecord", "tf.data, parse_example of a batch", "tensorflow", _tf_examples),
    _reader("jsonl", "pyarrow.json, in one worker", "pyarrow", partial(_table, "train.jsonl")),
    _reader("csv", "pyarrow.csv, in one worker", "pyarrow", partial(_table, "train.csv")),
    _reader("tokens", "np.memmap, a gather a batch", "numpy", _windows),
    _reader("tokens", "Grain", "grain", _grain),
    _reader("video", "torchcodec, decoders held", "torchcodec", _torchcodec_clips),
)
