"""penstock's loader with threads, for samples that release Python's lock."""

import torch
from work import Sized, compute, one_core

from penstock import DataLoader


class Released(Sized):
    def __getitem__(self, index: int) -> torch.Tensor:
        compute(1)
        return torch.full((3, 32, 32), float(index))


def main():
    one_core()
    return DataLoader(Released(), batch_size=8, num_workers=2, worker_type="thread"), lambda batch: compute(100)
