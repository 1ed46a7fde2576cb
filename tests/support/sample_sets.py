"""Datasets that several test modules use; importable by spawned workers."""

from __future__ import annotations

import collections
import ctypes
import faulthandler
import multiprocessing
import multiprocessing.synchronize
import random
import sys
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

Pair = collections.namedtuple("Pair", ["left", "right"])


class Numbered(Dataset):
    """Sample i is an image filled with i, and i; `delay_s` makes it slow."""

    def __init__(self, size: int, shape: tuple[int, ...] = (3, 40, 40), delay_s: float = 0.0) -> None:
        self.size, self.shape, self.delay_s = size, shape, delay_s

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.delay_s:
            time.sleep(self.delay_s)
        return torch.full(self.shape, float(index)), index


class Augmented(Numbered):
    """Draws from every random state that a worker has."""

    def __getitem__(self, index: int) -> dict[str, object]:
        return {
            "torch": torch.rand(5),
            "numpy": np.random.rand(3),
            "random": random.random(),
            "large": torch.rand(self.shape),
            "index": index,
        }


class Aware(Numbered):
    """Says which worker made it, and with what seed."""

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        info = get_worker_info()
        return (info.id, info.seed, torch.initial_seed()) if info else (-1, -1, -1)


class Stream(IterableDataset):
    """Numbers shared out among workers, each with a tensor."""

    def __init__(self, size: int, delay_s: float = 0.0) -> None:
        self.size, self.delay_s = size, delay_s

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, self.size, step):
            if self.delay_s:
                time.sleep(self.delay_s)
            yield torch.full((60, 60), float(index)), index


class Bulk(Numbered):
    """Makes a whole batch in one call."""

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        return [self[index] for index in indices]


class Raising(Numbered):
    """Cannot read every tenth sample."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index % 10 == 3:
            raise OSError(f"sample {index} is corrupt")
        return super().__getitem__(index)


class Deadly(Numbered):
    """Sample 37 is a segmentation fault."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 37:
            faulthandler.disable()  # pytest's would print where, which nobody needs
            ctypes.string_at(0)
        return super().__getitem__(index)


class Hanging(Numbered):
    """Sample 5 takes a minute."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 5:
            time.sleep(60)
        return super().__getitem__(index)


class Growing(Numbered):
    """Pairs of samples of a size of their own."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((100 + (index // 2) * 7919 % 9000,), float(index // 2))


class Arrays(Dataset):
    """Holds a large array, and counts how often it is pickled."""

    pickled = 0

    def __init__(self) -> None:
        self.images = torch.arange(64 * 3 * 64 * 64, dtype=torch.float32).view(64, 3, 64, 64)

    def __getstate__(self) -> dict[str, object]:
        Arrays.pickled += 1
        return self.__dict__

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index % 64], index


class Unpicklable(Numbered):
    """Holds a transform that spawn cannot take along."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.transform = lambda sample: sample


class Nested(Numbered):
    """Has one of everything that default_collate knows."""

    def __getitem__(self, index: int) -> dict[str, object]:
        return {
            "image": torch.full((40, 50), float(index)),
            "array": np.full((30, 30), index, np.int16),
            "pair": Pair(torch.full((64, 64), index), float(index)),
            "mixed": [index, str(index), b"x" * index, (np.float32(index), True)],
            "half": torch.full((33,), index, dtype=torch.bfloat16),
        }


class Imported(Dataset):
    """Says whether the process that makes it has imported penstock.device."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return str("penstock.device" in sys.modules)


class Gate(multiprocessing.synchronize.Lock):
    """A lock of a program's own: multiprocessing pickles it only while it starts a process."""

    def __init__(self) -> None:
        super().__init__(ctx=multiprocessing.get_context("spawn"))


class Opened(Dataset):
    """Opened by its own method in each worker; what workers count, and the scale, are tensors."""

    def __init__(self, gate: Any) -> None:
        self.opened_by = -1
        self.reads, self.scale = torch.zeros(8, dtype=torch.int64), torch.ones(()).share_memory_()
        self.gate = gate

    def __len__(self) -> int:
        return 8

    def open(self, worker: int) -> None:
        self.opened_by = worker

    def __getitem__(self, index: int) -> tuple[int, float]:
        with self.gate:
            self.reads[index] += 1
        return self.opened_by, index * float(self.scale)

    def collate(self, samples: list[tuple[int, float]]) -> tuple[int, list[tuple[int, float]]]:
        return self.opened_by, samples
