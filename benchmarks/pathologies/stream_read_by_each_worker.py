"""A stream of which each worker makes all samples, and keeps its own part of them."""

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from work import compute, one_core


class Records(IterableDataset):
    def __init__(self, *, splits: bool) -> None:
        self.splits = splits

    def __iter__(self):
        worker = get_worker_info()
        first, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for number in range(100_000):
            if self.splits and number % workers != first:
                continue
            sample = self.decode(number)
            if number % workers == first:
                yield sample

    def decode(self, number: int) -> torch.Tensor:
        compute(1)
        return torch.full((128,), float(number))


def main(*, splits: bool = False):
    one_core()
    return DataLoader(Records(splits=splits), batch_size=8, num_workers=2), lambda batch: compute(1)


def fixed():
    return main(splits=True)
