"""Debug lines for every sample, formatted and written to a file."""

import logging

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, folder, one_core

logger = logging.getLogger("samples")


class Logged(Sized):
    def __getitem__(self, index: int) -> torch.Tensor:
        values = torch.full((64,), float(index))
        for number in range(12):
            logger.debug("sample %d value %d %s", index, number, values[:3])
        return values


class Silent(Sized):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), float(index))


def main():
    one_core()
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(logging.FileHandler(folder() / "samples.log"))
    return DataLoader(Logged(), batch_size=16), lambda batch: compute(4)


def fixed():
    one_core()
    return DataLoader(Silent(), batch_size=16), lambda batch: compute(4)
