"""Reads that wait, one at a time: every one holds the lock of a file."""

import fcntl
import time

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, folder, one_core

LOCK = folder() / "lock"


class Guarded(Sized):
    def __init__(self, *, locks: bool) -> None:
        super().__init__()
        self.locks = locks

    def __getitem__(self, index: int) -> torch.Tensor:
        with open(LOCK, "w") as file:
            if self.locks:
                fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(0.002)  # the server's answer
        return torch.full((256,), float(index))


def main(*, locks: bool = True):
    one_core()
    return DataLoader(Guarded(locks=locks), batch_size=16, num_workers=8, shuffle=True), lambda batch: compute(1)


def fixed():
    return main(locks=False)
