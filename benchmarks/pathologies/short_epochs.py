"""Epochs of a few batches, and workers started for each of them."""

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Few(Sized):
    def __getitem__(self, index: int) -> torch.Tensor:
        compute(1)
        return torch.full((256,), float(index))


def train(*, persistent_workers: bool = False) -> None:
    one_core()
    loader = DataLoader(Few(12), batch_size=4, num_workers=2, persistent_workers=persistent_workers)
    for _ in range(1000):
        for _ in loader:
            compute(2)


def fixed() -> None:
    train(persistent_workers=True)
