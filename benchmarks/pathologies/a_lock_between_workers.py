"""Workers that run one at a time, because every sample is made under one lock."""

import multiprocessing
from contextlib import nullcontext

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Locked(Sized):
    def __init__(self, lock) -> None:
        super().__init__()
        self.lock = lock

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            compute(2)
        return torch.full((256,), float(index))


def main():
    one_core()
    return DataLoader(Locked(multiprocessing.Lock()), batch_size=8, num_workers=2), lambda batch: compute(1)


def fixed():
    one_core()
    return DataLoader(Locked(nullcontext()), batch_size=8, num_workers=2), lambda batch: compute(1)
