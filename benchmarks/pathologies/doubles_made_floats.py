"""NumPy's default type in samples, which every step makes float32."""

import numpy as np
import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Doubles(Sized):
    def __init__(self) -> None:
        super().__init__()
        self.rows = np.random.default_rng(0).random((self.size, 256))

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.rows[index] * 1.0001), index % 10


def main():
    one_core()
    model = torch.nn.Linear(256, 10)

    def step(batch: list[torch.Tensor]) -> None:
        values, labels = batch
        torch.nn.functional.cross_entropy(model(values.float()), labels).backward()
        compute(40)

    return DataLoader(Doubles(), batch_size=16, num_workers=1, shuffle=True), step
