"""JPEG files are decoded where the step runs, because num_workers was never set."""

import io

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from work import Sized, compute, jpeg, one_core


class Pictures(Sized):
    def __init__(self) -> None:
        super().__init__(512)
        self.encoded = [jpeg(640, 480) for _ in range(4)]

    def __getitem__(self, index: int) -> torch.Tensor:
        image = Image.open(io.BytesIO(self.encoded[index % 4])).convert("RGB")
        return torch.from_numpy(np.asarray(image).copy())[:224, :224]


def train(num_workers: int = 0) -> None:
    one_core()
    for _ in range(100):
        for _ in DataLoader(Pictures(), batch_size=8, shuffle=True, num_workers=num_workers):
            compute(8)


def fixed() -> None:
    train(num_workers=2)
