"""non_blocking=True, from batches that are not pinned."""

import torch
from torch.utils.data import DataLoader
from work import Cheap, compute, one_core

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


def step(batch: torch.Tensor) -> None:
    batch = batch.to(DEVICE, non_blocking=True)
    compute(20)


def main():
    one_core()
    return DataLoader(Cheap(), batch_size=16, num_workers=1), step
