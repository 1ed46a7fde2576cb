"""A large array in the dataset, and workers that are spawned: it is pickled for each."""

import numpy as np
import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Table(Sized):
    def __init__(self) -> None:
        super().__init__(100_000)
        self.rows = np.ones((400, 50_000), np.float32)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.rows[index % 400][:256])


def main():
    one_core()
    loader = DataLoader(Table(), batch_size=16, num_workers=1, multiprocessing_context="spawn")
    return loader, lambda batch: compute(20)
