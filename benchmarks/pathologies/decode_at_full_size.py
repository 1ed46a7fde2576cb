"""Photographs of 2 megapixels, decoded whole to make thumbnails of them."""

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from work import Sized, compute, folder, jpeg, one_core


class Thumbnails(Sized):
    is_drafted = False

    def __init__(self) -> None:
        super().__init__(512)
        self.files = []
        for number in range(4):
            file = folder() / f"{number}.jpg"
            file.write_bytes(jpeg(1600, 1200))
            self.files.append(str(file))

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self.files[index % 4]) as image:
            if self.is_drafted:
                image.draft("RGB", (160, 120))
            small = image.convert("RGB").resize((160, 120), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.asarray(small).copy())


def main():
    one_core()
    return DataLoader(Thumbnails(), batch_size=8, num_workers=2), lambda batch: compute(4)


def fixed():
    loader, step = main()
    loader.dataset.is_drafted = True
    return loader, step
