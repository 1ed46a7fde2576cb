"""A compressed array that is unpacked from its beginning for every sample."""

import gzip

import numpy as np
import torch
from torch.utils.data import DataLoader
from work import Sized, compute, folder, one_core


class Compressed(Sized):
    def __init__(self) -> None:
        super().__init__()
        self.path = folder() / "values.gz"
        values = np.random.default_rng(0).integers(0, 40, 400_000).astype(np.uint8)
        with gzip.open(self.path, "wb") as file:
            file.write(values.tobytes())

    def read(self) -> bytes:
        with gzip.open(self.path) as file:
            return file.read()

    def values(self) -> bytes:
        return self.read()

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(self.values(), np.uint8, 1024, index * 16).astype(np.float32))


class Unpacked(Compressed):
    content = b""

    def values(self) -> bytes:
        self.content = self.content or self.read()
        return self.content


def main():
    one_core()
    return DataLoader(Compressed(), batch_size=16, num_workers=2, shuffle=True), lambda batch: compute(6)


def fixed():
    one_core()
    return DataLoader(Unpacked(), batch_size=16, num_workers=2, shuffle=True), lambda batch: compute(6)
