"""`next(iter(loader))` for every batch."""

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Made(Sized):
    def __getitem__(self, index: int) -> torch.Tensor:
        compute(1)
        return torch.full((256,), float(index))


def train() -> None:
    one_core()
    loader = DataLoader(Made(), batch_size=8, num_workers=2, shuffle=True)
    for _ in range(10_000):
        next(iter(loader))
        compute(2)


def fixed() -> None:
    one_core()
    loader = DataLoader(Made(), batch_size=8, num_workers=2, shuffle=True)
    while True:
        for _ in loader:
            compute(2)
