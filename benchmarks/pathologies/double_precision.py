"""NumPy's default type, carried from workers to the loop."""

import numpy as np
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Doubles(Sized):
    def __init__(self, dtype: str = "float64") -> None:
        super().__init__(100_000)
        self.rows = np.random.default_rng(0).random((32, 200_000)).astype(dtype)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.rows[index % 32]


def main():
    one_core()
    return DataLoader(Doubles(), batch_size=16, num_workers=2), lambda batch: compute(1)


def fixed():
    one_core()
    return DataLoader(Doubles("float32"), batch_size=16, num_workers=2), lambda batch: compute(1)
