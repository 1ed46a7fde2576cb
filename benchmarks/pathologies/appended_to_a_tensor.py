"""A tensor of all that was seen, which every sample copies to append itself."""

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Remembering(Sized):
    def __init__(self) -> None:
        super().__init__(100_000)
        self.seen = torch.zeros(1, 1024)

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.full((1024,), float(index))
        self.seen = torch.cat([self.seen, row[None]])
        return row - self.seen[-1]


def main():
    one_core()
    return DataLoader(Remembering(), batch_size=16, num_workers=2, shuffle=True), lambda batch: compute(6)
