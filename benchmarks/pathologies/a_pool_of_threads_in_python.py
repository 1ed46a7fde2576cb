"""Every sample hands its texts to eight threads, which take turns at Python's lock."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, interpret, one_core


class Pooled(Sized):
    pool: ThreadPoolExecutor | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(8)
        return torch.tensor(list(self.pool.map(interpret, [1] * 8)))


class Direct(Sized):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([interpret(1) for _ in range(8)])


def main():
    one_core()
    return DataLoader(Pooled(), batch_size=8, num_workers=2), lambda batch: compute(2)


def fixed():
    one_core()
    return DataLoader(Direct(), batch_size=8, num_workers=2), lambda batch: compute(2)
