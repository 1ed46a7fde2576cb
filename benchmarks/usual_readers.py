"""How people read these formats today: the datasets of tutorials and documentations, for torch's DataLoader."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class PillowFolder(Dataset[tuple[Tensor, int]]):
    """Class folders of pictures: Pillow decodes, resizes the shorter side and crops the middle, as torchvision does."""

    def __init__(self, folder: Path, size: int) -> None:
        classes = sorted(path.name for path in folder.iterdir())
        self.files = [
            (str(file), label) for label, name in enumerate(classes) for file in sorted((folder / name).iterdir())
        ]
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        path, label = self.files[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        scale = self.size / min(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
        left, top = (image.width - self.size) // 2, (image.height - self.size) // 2
        image = image.crop((left, top, left + self.size, top + self.size))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous(), label


class H5(Dataset[tuple[Tensor, int]]):
    """An HDF5 file, opened by each worker when it is first asked."""

    def __init__(self, path: Path, length: int) -> None:
        self.path = path
        self.length = length
        self.file: Any = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.file is None:
            import h5py

            self.file = h5py.File(self.path)
        return torch.from_numpy(self.file["image"][index]), int(self.file["label"][index])


class ParquetRows(IterableDataset[dict[str, Any]]):
    """Row groups shared out over workers, each turned into rows of Python objects."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import pyarrow.parquet as pq

        file = pq.ParquetFile(self.path)
        for group in range(*_mine(file.num_row_groups)):
            table = file.read_row_group(group)
            for row in table.to_pylist():
                yield {"image": torch.tensor(row["image"], dtype=torch.uint8), "label": row["label"]}


class Lmdb(Dataset[Tensor]):
    """Arrays as bytes, one transaction for each sample."""

    def __init__(self, path: Path, length: int, shape: tuple[int, ...]) -> None:
        self.path = path
        self.length = length
        self.shape = shape
        self.env: Any = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if self.env is None:
            import lmdb

            self.env = lmdb.open(str(self.path), readonly=True, lock=False, readahead=False, subdir=False)
        with self.env.begin() as transaction:
            data = transaction.get(b"%08d" % index)
        return torch.from_numpy(np.frombuffer(data, np.uint8).reshape(self.shape).copy())


class JsonLines(Dataset[dict[str, Any]]):
    """All lines in a list, parsed one by one."""

    def __init__(self, path: Path) -> None:
        self.lines = path.read_text().splitlines()

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = json.loads(self.lines[index])
        return {"vector": torch.tensor(row["vector"]), "label": row["label"]}


class CsvRows(IterableDataset[dict[str, Any]]):
    """csv.DictReader; each worker takes every n-th row."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        who, among = (info.id, info.num_workers) if info is not None else (0, 1)
        with self.path.open(newline="") as file:
            for number, row in enumerate(csv.DictReader(file)):
                if number % among == who:
                    yield {name: float(value) for name, value in row.items()}


class Windows(Dataset[Tensor]):
    """Windows of a memory map of tokens, as nanoGPT and its like read them."""

    def __init__(self, path: Path, length: int) -> None:
        self.tokens = np.memmap(path, np.uint16, "r")
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> Tensor:
        at = index * self.length
        return torch.from_numpy(self.tokens[at : at + self.length].astype(np.int64))


class Clips(Dataset[Tensor]):
    """Clips of a video: opened, sought and decoded anew for each."""

    def __init__(self, paths: list[Path], clips: int, frames: int) -> None:
        self.paths = paths
        self.clips = clips
        self.frames = frames

    def __len__(self) -> int:
        return len(self.paths) * self.clips

    def __getitem__(self, index: int) -> Tensor:
        import av

        with av.open(str(self.paths[index // self.clips])) as container:
            stream = container.streams.video[0]
            first = index % self.clips * self.frames
            container.seek(int(first / stream.average_rate / stream.time_base), stream=stream)
            pictures: list[np.ndarray] = []
            for frame in container.decode(stream):
                if round(frame.time * stream.average_rate) >= first:
                    pictures.append(frame.to_ndarray(format="rgb24"))
                if len(pictures) == self.frames:
                    break
        return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


class Ragged(Dataset[Tensor]):
    """Token sequences of many lengths."""

    def __init__(self, sequences: list[np.ndarray]) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.sequences[index])


def padded(samples: list[Tensor]) -> Tensor:
    """Collate sequences with torch's own padding."""
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def webdataset(pattern: str, names: tuple[str, ...], after: Callable[[Any], Any] | None = None) -> Any:
    """Return WebDataset's pipeline over shards."""
    import webdataset as wds

    pipeline = wds.WebDataset(pattern, shardshuffle=False).decode().to_tuple(*names)
    return pipeline.map(after) if after is not None else pipeline


def tfrecords(path: Path, description: dict[str, str], after: Callable[[Any], Any]) -> Any:
    """Return the `tfrecord` package's dataset over one file, shared out by its index."""
    from tfrecord.torch.dataset import TFRecordDataset

    return TFRecordDataset(str(path), f"{path}.index", description, transform=after)


def has_hugging_face() -> bool:
    """Say whether Hugging Face's datasets is installed."""
    return importlib.util.find_spec("datasets") is not None


def save_hugging_face(folder: Path, pictures: np.ndarray) -> None:
    """Save pictures and labels as Hugging Face's datasets does."""
    import datasets

    features = datasets.Features(
        {"image": datasets.Array3D(pictures.shape[1:], "uint8"), "label": datasets.Value("int64")}
    )
    columns = {"image": list(pictures), "label": range(len(pictures))}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(folder)


def hugging_face(folder: Path) -> Any:
    """Return what was saved, as torch tensors."""
    import datasets

    return datasets.load_from_disk(folder).with_format("torch")


def _mine(count: int) -> tuple[int, int, int]:
    info = get_worker_info()
    return (info.id, count, info.num_workers) if info is not None else (0, count, 1)
