"""A folder of files that is listed again for every sample, to find the one with its number."""

import glob

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, folder, one_core


class Listing(Sized):
    def __init__(self) -> None:
        super().__init__(1000)
        self.folder = folder()
        for number in range(self.size):
            torch.save(torch.full((256,), float(number)), self.folder / f"{number:04}.pt")

    def paths(self) -> list[str]:
        return sorted(glob.glob(f"{self.folder}/*.pt"))

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.load(self.paths()[index])


class Listed(Listing):
    def __init__(self) -> None:
        super().__init__()
        self.listed = super().paths()

    def paths(self) -> list[str]:
        return self.listed


def main():
    one_core()
    return DataLoader(Listing(), batch_size=16, num_workers=2, shuffle=True), lambda batch: compute(6)


def fixed():
    one_core()
    return DataLoader(Listed(), batch_size=16, num_workers=2, shuffle=True), lambda batch: compute(6)
