"""penstock's loader with threads, for samples made in pure Python."""

import torch
from work import Sized, compute, interpret, one_core

from penstock import DataLoader


class Interpreted(Sized):
    def __getitem__(self, index: int) -> torch.Tensor:
        interpret(4)
        return torch.full((256,), float(index))


def main():
    one_core()
    return DataLoader(Interpreted(), batch_size=8, num_workers=3, workers="thread"), lambda batch: compute(1)
