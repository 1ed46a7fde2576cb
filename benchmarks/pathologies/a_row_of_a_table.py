"""`iloc` of a pandas table for every sample."""

import numpy as np
import pandas
import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core

COLUMNS = list("abcdefgh")


class Rows(Sized):
    def __init__(self) -> None:
        super().__init__(20_000)
        self.table = pandas.DataFrame(np.random.default_rng(0).random((self.size, 8)), columns=COLUMNS)
        self.table["name"] = "x"

    def __getitem__(self, index: int) -> torch.Tensor:
        row = self.table.iloc[index]
        return torch.from_numpy(row[COLUMNS].to_numpy(dtype=np.float32))


class Columns(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.values = torch.tensor(self.table[COLUMNS].to_numpy(dtype=np.float32))

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index]


def main():
    one_core()
    return DataLoader(Rows(), batch_size=16, num_workers=1, shuffle=True), lambda batch: compute(4)


def fixed():
    one_core()
    return DataLoader(Columns(), batch_size=16, num_workers=1, shuffle=True), lambda batch: compute(4)
