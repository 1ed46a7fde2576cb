"""Arrays that are compressed with zlib, and decompressed for every sample."""

import zlib

import numpy as np
import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Packed(Sized):
    def __init__(self, *, packs: bool) -> None:
        super().__init__(256)
        arrays = [np.random.default_rng(seed).integers(0, 20, (3, 128, 128), dtype=np.uint8) for seed in range(256)]
        self.packed = [zlib.compress(array.tobytes()) for array in arrays] if packs else []
        self.arrays = [] if packs else arrays

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.arrays:
            return torch.from_numpy(self.arrays[index])
        raw = bytearray(zlib.decompress(self.packed[index]))
        return torch.frombuffer(raw, dtype=torch.uint8).reshape(3, 128, 128)


def main(*, packs: bool = True):
    one_core()
    return DataLoader(Packed(packs=packs), batch_size=16, num_workers=1, shuffle=True), lambda batch: compute(2)


def fixed():
    return main(packs=False)
