"""A blur of the whole picture, of which a corner is kept."""

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Corners(Sized):
    def __init__(self) -> None:
        super().__init__()
        noise = np.random.default_rng(0).integers(0, 255, (600, 800, 3), np.uint8)
        self.image = Image.fromarray(noise)

    def __getitem__(self, index: int) -> torch.Tensor:
        image = self.image.filter(ImageFilter.GaussianBlur(3))
        image = image.crop((index % 200, 0, index % 200 + 128, 128))
        return torch.from_numpy(np.asarray(image).copy())


class CroppedFirst(Corners):
    def __getitem__(self, index: int) -> torch.Tensor:
        image = self.image.crop((index % 200, 0, index % 200 + 128, 128))
        return torch.from_numpy(np.asarray(image.filter(ImageFilter.GaussianBlur(3))).copy())


def main():
    one_core()
    return DataLoader(Corners(), batch_size=8, num_workers=2), lambda batch: compute(6)


def fixed():
    one_core()
    return DataLoader(CroppedFirst(), batch_size=8, num_workers=2), lambda batch: compute(6)
