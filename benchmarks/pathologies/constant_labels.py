"""A label that is read from the wrong part of a path, so that it is always the same."""

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Pets(Sized):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        path = f"/data/pets/{'cat' if index % 2 else 'dog'}_{index}.jpg"
        return torch.full((256,), float(index)), torch.tensor(1.0 if path.startswith("cat") else 0.0)


def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    images, labels = batch
    compute(20)
    (images.mean(1) - labels[:, None]).square().mean()


def main():
    one_core()
    return DataLoader(Pets(), batch_size=32, shuffle=True), step
