"""A model that is saved after every step."""

import torch
from torch.utils.data import DataLoader
from work import Cheap, compute, folder, one_core

model = torch.nn.Linear(1024, 1024)
path = folder() / "last.pt"


def save(batch: torch.Tensor) -> None:
    compute(4)
    torch.save(model.state_dict(), path)


def main():
    one_core()
    return DataLoader(Cheap(), batch_size=16, num_workers=1, shuffle=True), save


def fixed():
    one_core()
    return DataLoader(Cheap(), batch_size=16, num_workers=1, shuffle=True), lambda batch: compute(4)
