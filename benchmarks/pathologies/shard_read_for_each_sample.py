"""Shards of 256 samples: each sample reads a whole one."""

import numpy as np
import torch
from torch.utils.data import DataLoader
from work import Sized, compute, folder, one_core

PER_SHARD = 256


class Sharded(Sized):
    def __init__(self, *, maps: bool) -> None:
        super().__init__(8 * PER_SHARD)
        self.files = [folder() / "shard.npy" for _ in range(8)]
        for file in self.files:
            np.save(file, np.random.default_rng(0).normal(size=(PER_SHARD, 64, 64)).astype(np.float32))
        self.shards = [np.load(file, mmap_mode="r") for file in self.files] if maps else None

    def __getitem__(self, index: int) -> torch.Tensor:
        shard, row = divmod(index, PER_SHARD)
        if self.shards is not None:
            return torch.from_numpy(self.shards[shard][row].copy())
        images = np.load(self.files[shard])
        return torch.from_numpy(images[row].copy())


def main(*, maps: bool = False):
    one_core()
    return DataLoader(Sharded(maps=maps), batch_size=16, num_workers=2, shuffle=True), lambda batch: compute(4)


def fixed():
    return main(maps=True)
