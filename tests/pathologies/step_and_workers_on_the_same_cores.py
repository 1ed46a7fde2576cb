"""As many workers as cores, and a step that computes on all cores, too."""

import os

import torch
from torch.utils.data import DataLoader
from work import Sized, compute

CORES = len(os.sched_getaffinity(0))
WEIGHT = torch.full((1024, 1024), 1e-3)


class Made(Sized):
    def __getitem__(self, index: int) -> torch.Tensor:
        compute(4)
        return torch.full((256,), float(index))


def step(batch: torch.Tensor) -> None:
    torch.set_num_threads(CORES)
    value = WEIGHT
    for _ in range(12):
        value = value @ WEIGHT


def main():
    return DataLoader(Made(), batch_size=8, num_workers=CORES), step
