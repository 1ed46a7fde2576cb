"""Numbers, in batches of eight, carried from process to process."""

import torch
from torch.utils.data import DataLoader
from work import Sized, one_core


class Numbers(Sized):
    def __getitem__(self, index: int) -> int:
        return index


def main(num_workers: int = 2):
    one_core()
    loader = DataLoader(Numbers(200_000), batch_size=8, num_workers=num_workers)
    return loader, lambda batch: torch.add(batch, 1)


def fixed():
    return main(num_workers=0)
