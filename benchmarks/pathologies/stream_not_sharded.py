"""An IterableDataset that does not split its samples between workers."""

import torch
from torch.utils.data import DataLoader, IterableDataset
from work import compute, one_core


class Stream(IterableDataset):
    def __iter__(self):
        for number in range(100_000):
            yield torch.full((128,), float(number))


def main():
    one_core()
    return DataLoader(Stream(), batch_size=4, num_workers=2), lambda batch: compute(30)
