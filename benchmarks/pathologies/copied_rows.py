"""A table whose last rows are copies of its first ones, as two exports leave it that were put together."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from work import compute, one_core


def main():
    one_core()
    rows = torch.randn(400, 128)
    data = TensorDataset(torch.cat([rows, rows[:40]]))
    return DataLoader(data, batch_size=16, shuffle=True), lambda batch: compute(20)
