"""An endless stream, read by a worker, behind a longer step."""

import torch
from torch.utils.data import DataLoader, IterableDataset
from work import compute, one_core


class Stream(IterableDataset):
    def __iter__(self):
        number = 0
        while True:
            compute(1)
            yield {"x": torch.full((128,), float(number)), "id": number}
            number += 1


def main():
    one_core()
    return DataLoader(Stream(), batch_size=4, num_workers=1), lambda batch: compute(80)
