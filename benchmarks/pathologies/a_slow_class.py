"""One sample in twelve takes twenty times as long as the others."""

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Uneven(Sized):
    slow_units = 40

    def __getitem__(self, index: int) -> torch.Tensor:
        compute(self.slow_units if index % 12 == 5 else 2)
        return torch.full((64, 64), float(index))


def main():
    one_core()
    return DataLoader(Uneven(), batch_size=8, num_workers=2), lambda batch: compute(2)


def fixed():
    loader, step = main()
    loader.dataset.slow_units = 2
    return loader, step
