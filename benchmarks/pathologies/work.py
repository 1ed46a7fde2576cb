"""Work of a fixed amount, for steps and samples: half a millisecond or so for each unit."""

from __future__ import annotations

import hashlib
import io
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

_OPTIMIZER = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def compute(units: int) -> bytes:
    """Use one core, in C, without Python's lock; as steps do, with one of an optimizer in the training process."""
    if get_worker_info() is None:
        _OPTIMIZER.step()
    return hashlib.pbkdf2_hmac("sha256", b"penstock", b"valve", 1500 * units)


def interpret(units: int) -> int:
    """Use one core, in Python."""
    total = 0
    for number in range(15_000 * units):
        total += number & 3
    return total


class Sized(Dataset):
    """A dataset of `size` samples; subclasses make them."""

    def __init__(self, size: int = 4096) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


class Cheap(Sized):
    """Small tensors, at no cost."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((256,), float(index))


def one_core() -> None:
    """Keep torch from computing on the cores that workers need."""
    torch.set_num_threads(1)


def jpeg(width: int, height: int) -> bytes:
    """Return a picture with some detail."""
    from PIL import Image

    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / (7 + band)) * np.cos(y / (11 - band)) * 70 + 128 for band in range(3)]
    grain = np.random.default_rng(0).normal(0, 12, (height, width, 3))
    file = io.BytesIO()
    Image.fromarray((np.stack(waves, -1) + grain).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def folder() -> Path:
    """Return a folder that lives as long as this process's program."""
    made = tempfile.TemporaryDirectory(prefix="penstock-pathology-")
    _folders.append(made)
    return Path(made.name)


def clean_up() -> None:
    """Remove all of them."""
    while _folders:
        _folders.pop().cleanup()


_folders: list[tempfile.TemporaryDirectory[str]] = []
