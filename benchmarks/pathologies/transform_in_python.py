"""An augmentation that goes through a sample number by number."""

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


def augment(values: list[float]) -> list[float]:
    return [value * 1.1 + 0.5 if value < 40_000 else value - 1.0 for value in values]


class Augmented(Sized):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(augment([float(number) for number in range(20_000)]))


def main():
    one_core()
    return DataLoader(Augmented(), batch_size=8, num_workers=1), lambda batch: compute(2)


class Vectorised(Sized):
    def __getitem__(self, index: int) -> torch.Tensor:
        values = torch.arange(20_000.0)
        return torch.where(values < 40_000, values * 1.1 + 0.5, values - 1.0)


def fixed():
    one_core()
    return DataLoader(Vectorised(), batch_size=8, num_workers=1), lambda batch: compute(2)
