"""What is loaded: samples that lie in memory, samples made from them, and the batches that they are asked in.

Everything is drawn from fixed seeds, and every dataset can be pickled, so that any process can hold the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

SEED = 20_24
POOL_NBYTES = 38 << 20  # more than the last-level cache of the machines that this is run on, or near it


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A dataset and how an epoch of it is cut into batches."""

    name: str
    dataset: Dataset[Any]
    batch_size: int
    batches: int

    @property
    def samples(self) -> int:
        """How many samples an epoch has."""
        return self.batch_size * self.batches


class Pool(Dataset[Tensor]):
    """Samples that lie in memory: sample `i` is a view of row `i` modulo the pool's size, made without a copy."""

    def __init__(self, shape: tuple[int, ...], dtype: type[np.float32 | np.uint8 | np.int64], length: int) -> None:
        rows = max(1, POOL_NBYTES // (int(np.prod(shape)) * np.dtype(dtype).itemsize))
        draw = np.random.default_rng(SEED)
        self.pool: np.ndarray = (
            draw.random((rows, *shape), dtype=np.float32)
            if dtype is np.float32
            else draw.integers(0, 256, (rows, *shape), dtype=dtype)
        )
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return torch.from_numpy(self.pool[index % len(self.pool)])


class Named(Dataset[dict[str, Any]]):
    """A picture, a mask and a label, as a dict."""

    def __init__(self, length: int) -> None:
        self.images = Pool((3, 112, 112), np.uint8, length)
        self.masks = Pool((1, 56, 56), np.float32, length)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index], "mask": self.masks[index], "label": index % 10}


class Labelled(Dataset[tuple[Tensor, int]]):
    """The samples of another dataset, each with a label."""

    def __init__(self, inner: Pool) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inner[index], index % 10


class Copied(Dataset[Tensor]):
    """The samples of another dataset, each in memory of its own, as a decoder would hand them out."""

    def __init__(self, inner: Pool) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Tensor:
        return self.inner[index].clone()


class Slow(Dataset[Tensor]):
    """Another dataset whose samples take `ordinary_s` of CPU each, and one in a hundred of them `TIMES_SLOWER` as long.

    The slow ones sleep through the rest of that time, or burn CPU all the while.
    """

    TIMES_SLOWER = 100

    def __init__(self, inner: Copied, *, ordinary_s: float, burn: bool) -> None:
        self.inner = inner
        self.ordinary_s = ordinary_s
        self.burn = burn
        self.slow = frozenset(Random(SEED).sample(range(len(inner)), round(len(inner) / 100)))

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Tensor:
        until = time.thread_time() + self.ordinary_s  # CPU of this thread: a crowded core makes no sample cheaper
        sample = self.inner[index]
        if index in self.slow:
            rest_s = (self.TIMES_SLOWER - 1) * self.ordinary_s
            if self.burn:
                until += rest_s
            else:
                time.sleep(rest_s)
        while time.thread_time() < until:
            pass
        return sample


class Integers(Dataset[int]):
    """Sample `i` is the Python int `i`: nothing but the loader's own cost is left."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index


def images(batches: int, batch_size: int = 64) -> Workload:
    """Float images: 3x224x224 float32, 588 KiB each, 36.8 MiB for a batch of 64."""
    dataset = Pool((3, 224, 224), np.float32, batch_size * batches)
    return Workload(name="float images", dataset=dataset, batch_size=batch_size, batches=batches)


def clips(batches: int, batch_size: int = 16) -> Workload:
    """Video clips: 16x3x112x112 uint8, 588 KiB each, 9.2 MiB for a batch of 16."""
    dataset = Pool((16, 3, 112, 112), np.uint8, batch_size * batches)
    return Workload(name="uint8 clips", dataset=dataset, batch_size=batch_size, batches=batches)


def labelled_clips(batches: int, batch_size: int = 16) -> Workload:
    """Video clips, as `clips`, with labels: one large tensor and a small one."""
    dataset = Labelled(Pool((16, 3, 112, 112), np.uint8, batch_size * batches))
    return Workload(name="clips and labels", dataset=dataset, batch_size=batch_size, batches=batches)


def in_dicts(batches: int, batch_size: int = 64) -> Workload:
    """Dicts of three: uint8 images of 3x112x112, float32 masks of 1x56x56, labels; 3.1 MiB for a batch of 64."""
    return Workload(name="dict of three", dataset=Named(batch_size * batches), batch_size=batch_size, batches=batches)


def tokens(batches: int, batch_size: int = 64) -> Workload:
    """Token sequences: 2048 int64, 16 KiB each, 1 MiB for a batch of 64."""
    dataset = Pool((2048,), np.int64, batch_size * batches)
    return Workload(name="tokens", dataset=dataset, batch_size=batch_size, batches=batches)


def integers(batches: int, batch_size: int = 128) -> Workload:
    """Tiny items: Python ints, 1 KiB for a batch of 128."""
    return Workload(name="integers", dataset=Integers(batch_size * batches), batch_size=batch_size, batches=batches)


IN_MEMORY: dict[str, Callable[[int], Workload]] = {"float images": images, "uint8 clips": clips, "tokens": tokens}


def in_memory(*, quick: bool) -> Iterator[Workload]:
    """Yield the three workloads of the transport rows, in epochs that take torch's two workers about a second."""
    for name, batches in (("float images", 100), ("uint8 clips", 250), ("tokens", 1200)):
        yield IN_MEMORY[name](batches * 2 // 5 if quick else batches)


def copied(workload: Workload) -> Workload:
    """Return `workload` with every sample in memory of its own."""
    assert isinstance(workload.dataset, Pool)
    return Workload(
        name=f"{workload.name}, each a copy",
        dataset=Copied(workload.dataset),
        batch_size=workload.batch_size,
        batches=workload.batches,
    )
