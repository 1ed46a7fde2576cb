"""Files that are larger than what the page cache keeps; here the cache is dropped on purpose."""

import os

import numpy as np
import torch
from torch.utils.data import DataLoader
from work import Sized, compute, folder, one_core

_NBYTES = 1 << 20


class Cold(Sized):
    is_cold = True

    def __init__(self) -> None:
        super().__init__(256)
        self.files = []
        for number in range(64):
            path = folder() / f"{number}.bin"
            with path.open("wb") as file:
                file.write(os.urandom(_NBYTES))
                file.flush()
                os.fsync(file.fileno())
            self.files.append(str(path))

    def __getitem__(self, index: int) -> torch.Tensor:
        with open(self.files[index % 64], "rb", buffering=0) as file:
            if self.is_cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return torch.from_numpy(np.frombuffer(file.read(), np.uint8).copy())[:4096]


def main():
    one_core()
    return DataLoader(Cold(), batch_size=16, num_workers=1), lambda batch: compute(1)


def fixed():
    loader, step = main()
    loader.dataset.is_cold = False
    return loader, step
