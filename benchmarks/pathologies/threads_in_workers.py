"""Workers that compute with several threads each."""

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


def use_threads(worker: int) -> None:
    torch.set_num_threads(6)


class Products(Sized):
    def __getitem__(self, index: int) -> torch.Tensor:
        matrix = torch.full((384, 384), 1e-3)
        for _ in range(4):
            matrix = matrix @ matrix
        return matrix[:16]


def main(worker_init_fn=use_threads):
    one_core()
    loader = DataLoader(Products(), batch_size=8, num_workers=2, worker_init_fn=worker_init_fn)
    return loader, lambda batch: compute(1)


def fixed():
    return main(None)
