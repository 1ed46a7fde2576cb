"""Samples that lie in memory already, so large that their transport is the only cost."""

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core

import penstock


class InMemory(Sized):
    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.images = torch.rand(16, 3, 224, 224)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.images[index % 16]


def main():
    one_core()
    return DataLoader(InMemory(), batch_size=64, num_workers=2), lambda batch: compute(1)


def fixed():
    one_core()
    return penstock.DataLoader(InMemory(), batch_size=64, num_workers=2), lambda batch: compute(1)
