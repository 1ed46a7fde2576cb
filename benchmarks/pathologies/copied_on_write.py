"""A million Python objects in the dataset, each sample reads some, and each worker ends up with a copy of all."""

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Annotated(Sized):
    def __init__(self) -> None:
        super().__init__(50_000)
        self.annotations = [(f"image-{number}.jpg", float(number)) for number in range(500_000)]

    def __getitem__(self, index: int) -> torch.Tensor:
        some = [self.annotations[(index * 7919 + number * 104_729) % 500_000][1] for number in range(8)]
        return torch.tensor(some)


def main():
    one_core()
    return DataLoader(Annotated(), batch_size=16, num_workers=2, shuffle=True), lambda batch: compute(20)
