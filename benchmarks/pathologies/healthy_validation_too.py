"""A loop with a validation before and between, whose loader is not the one that counts."""

import torch
from torch.utils.data import DataLoader
from work import Cheap, Sized, compute, one_core


class Light(Sized):
    def __getitem__(self, index: int) -> torch.Tensor:
        compute(1)
        return torch.full((256,), float(index))


def train() -> None:
    one_core()
    validation = DataLoader(Light(64), batch_size=8)
    training = DataLoader(Cheap(), batch_size=16, num_workers=1)
    for _ in range(1000):
        with torch.no_grad():
            for _ in validation:
                compute(1)
        for _ in training:
            compute(80)
