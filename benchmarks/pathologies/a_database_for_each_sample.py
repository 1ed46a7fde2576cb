"""A query over a column without an index, on a new connection, for every sample."""

import sqlite3

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, folder, one_core


class Queried(Sized):
    def __init__(self) -> None:
        super().__init__()
        self.path = folder() / "samples.db"
        with sqlite3.connect(self.path) as database:
            database.execute("create table samples (number integer, value real)")
            database.executemany("insert into samples values (?, ?)", ((row, row / 2) for row in range(self.size)))
        database.close()

    def __getitem__(self, index: int) -> torch.Tensor:
        database = sqlite3.connect(self.path)
        row = database.execute("select value from samples where number = ?", (index,)).fetchone()
        database.close()
        return torch.tensor(row)


class Connected(Queried):
    database: sqlite3.Connection | None = None

    def __init__(self) -> None:
        super().__init__()
        with sqlite3.connect(self.path) as database:
            database.execute("create index numbers on samples (number)")
        database.close()

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.database is None:
            self.database = sqlite3.connect(self.path)
        return torch.tensor(self.database.execute("select value from samples where number = ?", (index,)).fetchone())


def main():
    one_core()
    return DataLoader(Queried(), batch_size=16, num_workers=2), lambda batch: compute(4)


def fixed():
    one_core()
    return DataLoader(Connected(), batch_size=16, num_workers=2), lambda batch: compute(4)
