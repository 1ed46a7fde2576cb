"""A zip archive of many members, whose directory is read again for every sample."""

import zipfile

import numpy as np
import torch
from torch.utils.data import DataLoader
from work import Sized, compute, folder, one_core


class Archived(Sized):
    def __init__(self) -> None:
        super().__init__(2000)
        self.path = folder() / "samples.zip"
        with zipfile.ZipFile(self.path, "w") as archive:
            for number in range(self.size):
                archive.writestr(f"{number}.bin", bytes(1024))

    def __getitem__(self, index: int) -> torch.Tensor:
        with zipfile.ZipFile(self.path) as archive:
            data = archive.read(f"{index}.bin")
        return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def main():
    one_core()
    return DataLoader(Archived(), batch_size=8, num_workers=2), lambda batch: compute(2)


class Opened(Archived):
    def __getitem__(self, index: int) -> torch.Tensor:
        if not hasattr(self, "archive"):
            self.archive = zipfile.ZipFile(self.path)
        return torch.from_numpy(np.frombuffer(self.archive.read(f"{index}.bin"), np.uint8).copy())


def fixed():
    one_core()
    return DataLoader(Opened(), batch_size=8, num_workers=2), lambda batch: compute(2)
