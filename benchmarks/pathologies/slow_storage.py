"""Every sample is a request to a storage that answers after some milliseconds."""

import time

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Remote(Sized):
    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.004)  # the answer's delay
        return torch.full((64, 64), float(index))


def main(num_workers: int = 2):
    one_core()
    return DataLoader(Remote(), batch_size=16, num_workers=num_workers), lambda batch: compute(3)


def fixed():
    return main(num_workers=20)
