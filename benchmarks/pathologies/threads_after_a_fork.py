"""Workers that are forked from a process whose threads have computed, and compute with several threads themselves."""

import torch
from torch.utils.data import DataLoader
from work import Sized, compute


def use_threads(worker: int) -> None:
    torch.set_num_threads(4)


class Products(Sized):
    def __getitem__(self, index: int) -> torch.Tensor:
        matrix = torch.full((384, 384), 1e-3)
        return (matrix @ matrix)[:16]


def main():
    torch.set_num_threads(4)
    torch.ones(1 << 22).sum()
    loader = DataLoader(Products(), batch_size=8, num_workers=2, worker_init_fn=use_threads)
    return loader, lambda batch: compute(1)
