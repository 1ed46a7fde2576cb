"""JPEG files in a temporary folder: a dataset that decodes them with Pillow, and folders of classes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.workloads import SEED, Workload

WIDTH, HEIGHT, CROP = 500, 375, 224
FILES = 96
QUALITY = 92
GRAIN = 7.0


class Jpegs(Dataset[Tensor]):
    """Sample `i`: file `i` modulo their number, decoded, cropped at random, flipped or not: 3x224x224 uint8."""

    def __init__(self, paths: list[str], length: int) -> None:
        self.paths = paths
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.length:
            raise IndexError(index)
        chance = Random(index)  # by index, so that every adapter crops alike
        left, top = chance.randrange(WIDTH - CROP), chance.randrange(HEIGHT - CROP)
        with Image.open(self.paths[index % len(self.paths)]) as file:
            image = file.convert("RGB").crop((left, top, left + CROP, top + CROP))
        if chance.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


@contextmanager
def jpeg_workload(batches: int, batch_size: int = 64) -> Iterator[Workload]:
    """Write the files, yield the workload on them, and remove them."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        dataset = Jpegs(_write(Path(folder)), batch_size * batches)
        yield Workload(name="JPEG decode, crop, flip", dataset=dataset, batch_size=batch_size, batches=batches)


def _write(folder: Path) -> list[str]:
    """Write scenes of blobs and grain at every scale, about as large and as dear to decode as photographs."""
    draw = np.random.default_rng(SEED)
    paths = []
    for number in range(FILES):
        scene = np.zeros((HEIGHT, WIDTH, 3), np.float32)
        for side, weight in ((4, 90), (16, 50), (64, 25), (256, 10)):
            coarse = Image.fromarray(draw.integers(0, 256, (side, side, 3), dtype=np.uint8))
            fine = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32)
            scene += (fine - 127.5) * (weight / 127.5)
        scene += draw.normal(0, GRAIN, scene.shape[:2])[..., None]
        path = folder / f"{number:04}.jpg"
        Image.fromarray((scene + 127.5).clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)
        paths.append(str(path))
    return paths


def write_class_folders(folder: Path, files: int, side: int, *, links: int = 1) -> Path:
    """Write square pictures in folders, one for each of four classes; each file has `links` names."""
    draw = np.random.default_rng(SEED)
    for number in range(files):
        path = folder / str(number % 4) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8))
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(path, quality=90)
        for link in range(1, links):
            path.with_name(f"{number}-{link}.jpg").hardlink_to(path)
    return folder
