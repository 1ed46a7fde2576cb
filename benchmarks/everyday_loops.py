"""The loops of `benchmarks.everyday`: what people load first, most of it small, cheap and in memory.

Everything is drawn from a fixed seed. Datasets are classes of this module, so that any start method can pickle them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, TensorDataset, random_split

SEED = 20_26


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One everyday loop: a dataset, made when it is measured, and the other arguments of the DataLoader."""

    name: str
    make: Callable[[], Any]
    arguments: dict[str, Any] = field(default_factory=dict)


class Made(Dataset[Any]):
    """`length` samples, each made by `make(index)`."""

    def __init__(self, length: int, make: Callable[[int], Any]) -> None:
        self.length = length
        self.make = make

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Bulk(Made):
    """The same, asked for all samples of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.make(index) for index in indices]


class Streamed(IterableDataset[Any]):
    """The same as a stream; each of several workers gets its share."""

    def __init__(self, length: int, make: Callable[[int], Any]) -> None:
        self.length = length
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return map(self.make, range(first, self.length, step))


class Digits(Dataset[tuple[Tensor, int]]):
    """As torchvision's MNIST with ToTensor: bytes become floats from 0 to 1, sample by sample."""

    def __init__(self, length: int) -> None:
        draw = np.random.default_rng(SEED)
        self.data = draw.integers(0, 256, (length, 28, 28), np.uint8)
        self.targets = draw.integers(0, 10, length)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(self.data[index]).unsqueeze(0).to(torch.float32).div(255)
        return image, int(self.targets[index])


class Vocabulary(Dataset[int]):
    """Each sample reads attributes of the dataset some thousand times, as tokenizers in plain Python do."""

    def __init__(self, length: int) -> None:
        self.length, self.reads = length, 2000
        self.words, self.offset = list(range(1000)), 7

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        total = 0
        for place in range(self.reads):
            total += self.words[(index + place) % 1000] * self.offset
        return total


class Point(NamedTuple):
    """A sample with named fields."""

    x: Tensor
    y: int


# ── how samples are made ────────────────────────────────────────────────────────────────────────────────────


def _row(rows: Any, index: int) -> Any:
    return rows[index]


def _numpy_pair(rows: np.ndarray, index: int) -> tuple[np.ndarray, np.int64]:
    return rows[index], np.int64(index % 10)


def _tokens(rows: Tensor, index: int) -> dict[str, Any]:
    row = rows[index]
    return {"input_ids": row, "attention_mask": row, "labels": index % 2}


def _token_lists(rows: list[list[int]], index: int) -> dict[str, Any]:
    return {"input_ids": rows[index % len(rows)], "label": index % 2}


def _sequence(rows: Tensor, index: int) -> tuple[Tensor, list[Tensor], float]:
    return rows[index], [rows[index], rows[index]], index / 2


def _point(rows: Tensor, index: int) -> Point:
    return Point(rows[index], index % 10)


def _nested(rows: np.ndarray, index: int) -> dict[str, Any]:
    return {"observation": {"state": rows[index], "step": index}, "action": (rows[index], index % 4)}


def _ragged(rows: Tensor, index: int) -> Tensor:
    return rows[: 16 + index * 7 % 113]


def _text(index: int) -> str:
    return f"a sentence with number {index}"


def _text_and_label(index: int) -> tuple[str, int]:
    return _text(index), index % 2


def _itself(index: int) -> int:
    return index


def _image(pool: Tensor, index: int) -> tuple[Tensor, int]:
    return pool[index % len(pool)], index % 1000


def _augmented(pool: Tensor, index: int) -> tuple[Tensor, int]:
    image = pool[index % len(pool)]
    return image.flip(-1).to(torch.float32).div_(255), index % 1000


def _dear(index: int) -> Tensor:
    """About a millisecond of work."""
    noise = np.random.default_rng(index).random(1 << 14)
    return torch.from_numpy(np.abs(np.fft.rfft(noise)).astype(np.float32))


def _padded(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True)


def _stacked(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])


# ── what they are made of ───────────────────────────────────────────────────────────────────────────────────


def _as_they_are(samples: list[Any]) -> list[Any]:
    return samples


class Runs:
    """A batch_sampler of the program's own: batches of `size` neighbours, in a random order."""

    def __init__(self, length: int, size: int) -> None:
        self.length, self.size = length, size

    def __len__(self) -> int:
        return self.length // self.size

    def __iter__(self) -> Iterator[list[int]]:
        for run in torch.randperm(len(self)).tolist():
            yield list(range(run * self.size, (run + 1) * self.size))


def _floats(rows: int, width: int) -> Tensor:
    return torch.rand(rows, width, generator=torch.Generator().manual_seed(SEED))


def _integers(rows: int, width: int) -> Tensor:
    return torch.randint(0, 30_000, (rows, width), generator=torch.Generator().manual_seed(SEED))


def _bytes(rows: int, *shape: int) -> Tensor:
    return torch.randint(0, 256, (rows, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(SEED))


def _tensors(length: int = 20_000) -> TensorDataset:
    return TensorDataset(_floats(length, 32), torch.arange(length) % 10)


def _half_of_tensors() -> Dataset[Any]:
    return random_split(_tensors(), [0.5, 0.5], torch.Generator().manual_seed(SEED))[0]


def _joined_tensors() -> ConcatDataset[Any]:
    return ConcatDataset([_tensors(8_000), _tensors(12_000)])


def _array() -> np.ndarray:
    return _floats(20_000, 32).numpy()


LOOPS = (
    Loop(name="TensorDataset, shuffled", make=_tensors, arguments={"batch_size": 64, "shuffle": True}),
    Loop(name="TensorDataset, in order", make=_tensors, arguments={"batch_size": 256}),
    Loop(name="random_split of tensors", make=_half_of_tensors, arguments={"batch_size": 64, "shuffle": True}),
    Loop(name="ConcatDataset of tensors", make=_joined_tensors, arguments={"batch_size": 64, "shuffle": True}),
    Loop(name="a tensor", make=lambda: _floats(20_000, 32), arguments={"batch_size": 64, "shuffle": True}),
    Loop(name="an array", make=_array, arguments={"batch_size": 64, "shuffle": True}),
    Loop(name="a list of integers", make=lambda: list(range(40_000)), arguments={"batch_size": 64, "shuffle": True}),
    Loop(name="a list of floats", make=lambda: _floats(1, 40_000)[0].tolist(), arguments={"batch_size": 64}),
    Loop(name="MNIST-like", make=lambda: Digits(6_000), arguments={"batch_size": 64, "shuffle": True}),
    Loop(
        name="NumPy rows",
        make=lambda: Made(10_000, partial(_numpy_pair, _array())),
        arguments={"batch_size": 64, "shuffle": True},
    ),
    Loop(
        name="dicts of tokens",
        make=lambda: Made(8_000, partial(_tokens, _integers(8_000, 128))),
        arguments={"batch_size": 32, "shuffle": True},
    ),
    Loop(
        name="dicts of lists",
        make=lambda: Made(800, partial(_token_lists, _integers(100, 64).tolist())),
        arguments={"batch_size": 16, "shuffle": True},
    ),
    Loop(
        name="sequences",
        make=lambda: Made(8_000, partial(_sequence, _floats(8_000, 16))),
        arguments={"batch_size": 32, "shuffle": True},
    ),
    Loop(
        name="named tuples",
        make=lambda: Made(8_000, partial(_point, _floats(8_000, 16))),
        arguments={"batch_size": 32, "shuffle": True},
    ),
    Loop(name="nested", make=lambda: Made(8_000, partial(_nested, _array())), arguments={"batch_size": 32}),
    Loop(
        name="integers",
        make=lambda: Made(40_000, _itself),
        arguments={"batch_size": 128, "shuffle": True},
    ),
    Loop(name="strings", make=lambda: Made(20_000, _text), arguments={"batch_size": 64, "shuffle": True}),
    Loop(
        name="strings and labels",
        make=lambda: Made(20_000, _text_and_label),
        arguments={"batch_size": 64, "shuffle": True},
    ),
    Loop(
        name="__getitems__",
        make=lambda: Bulk(20_000, partial(_row, _floats(20_000, 32))),
        arguments={"batch_size": 64, "shuffle": True},
    ),
    Loop(
        name="ragged, collate_fn",
        make=lambda: Made(6_000, partial(_ragged, _integers(1, 128)[0])),
        arguments={"batch_size": 32, "shuffle": True, "collate_fn": _padded},
    ),
    Loop(
        name="collate_fn that stacks",
        make=lambda: Digits(6_000),
        arguments={"batch_size": 64, "shuffle": True, "collate_fn": _stacked},
    ),
    Loop(
        name="lists, not collated",
        make=lambda: Made(800, partial(_token_lists, _integers(100, 64).tolist())),
        arguments={"batch_size": 16, "shuffle": True, "collate_fn": _as_they_are},
    ),
    Loop(
        name="a batch_sampler",
        make=lambda: Made(8_000, partial(_row, _floats(8_000, 32))),
        arguments={"batch_sampler": Runs(8_000, 50)},
    ),
    Loop(
        name="a stream of rows",
        make=lambda: Streamed(10_000, partial(_row, _floats(10_000, 32))),
        arguments={"batch_size": 64},
    ),
    Loop(name="a stream of integers", make=lambda: Streamed(40_000, _itself), arguments={"batch_size": 128}),
    Loop(
        name="batch_size=None",
        make=lambda: Made(6_000, partial(_row, _floats(6_000, 32))),
        arguments={"batch_size": None},
    ),
    Loop(
        name="batch_size=None, a stream",
        make=lambda: Streamed(6_000, partial(_row, _floats(6_000, 32))),
        arguments={"batch_size": None},
    ),
    Loop(
        name="batch_size=1",
        make=lambda: Made(4_000, partial(_point, _floats(4_000, 16))),
        arguments={"batch_size": 1, "shuffle": True},
    ),
    Loop(
        name="tiny batches",
        make=lambda: Made(6_000, partial(_tokens, _integers(6_000, 16))),
        arguments={"batch_size": 2, "shuffle": True},
    ),
    Loop(
        name="large batches of rows",
        make=lambda: Made(32_768, partial(_row, _floats(32_768, 64))),
        arguments={"batch_size": 4096, "shuffle": True},
    ),
    Loop(
        name="images, floats",
        make=lambda: Made(320, partial(_image, _floats(64, 3 * 224 * 224).view(64, 3, 224, 224))),
        arguments={"batch_size": 32, "shuffle": True},
    ),
    Loop(
        name="images, bytes",
        make=lambda: Made(1024, partial(_image, _bytes(128, 3, 224, 224))),
        arguments={"batch_size": 64, "shuffle": True},
    ),
    Loop(
        name="images, augmented",
        make=lambda: Made(256, partial(_augmented, _bytes(64, 3, 224, 224))),
        arguments={"batch_size": 32, "shuffle": True},
    ),
    Loop(name="attributes read often", make=lambda: Vocabulary(400), arguments={"batch_size": 16}),
    Loop(name="dear samples", make=lambda: Made(256, _dear), arguments={"batch_size": 16, "shuffle": True}),
)
"""In the order of the table."""
