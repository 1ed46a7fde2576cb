"""Samples are Python lists, which the default collate takes position by position."""

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Rows(Sized):
    def __getitem__(self, index: int) -> list[float]:
        return [float(index)] * 400


def main():
    one_core()
    return DataLoader(Rows(), batch_size=32), lambda batch: compute(1)


class Tensors(Sized):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)] * 400)


def fixed():
    one_core()
    return DataLoader(Tensors(), batch_size=32), lambda batch: compute(1)
