"""Sixteen workers, on the cores of a laptop."""

import os

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, interpret, one_core


class Counted(Sized):
    def __getitem__(self, index: int) -> torch.Tensor:
        interpret(2)
        return torch.full((256,), float(index))


def main():
    one_core()
    workers = max(8, 4 * len(os.sched_getaffinity(0)))
    return DataLoader(Counted(), batch_size=8, num_workers=workers), lambda batch: compute(40)


def fixed():
    one_core()
    return DataLoader(Counted(), batch_size=8, num_workers=2), lambda batch: compute(40)
