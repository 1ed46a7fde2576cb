"""Batches under way that a container's 64 MB of /dev/shm cannot hold; `SHM_NBYTES` is what it would have."""

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core

SHM_NBYTES = 64 << 20


class Volumes(Sized):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1 << 20)  # 4 MiB


def main():
    one_core()
    return DataLoader(Volumes(), batch_size=8, num_workers=2), lambda batch: compute(250)
