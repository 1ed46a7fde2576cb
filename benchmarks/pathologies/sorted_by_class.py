"""A dataset that lists one class after the other, read in its order."""

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Sorted(Sized):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((256,), float(index)), index // 400


def main():
    one_core()
    return DataLoader(Sorted(), batch_size=16), lambda batch: compute(20)
