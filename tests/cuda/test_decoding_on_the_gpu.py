"""On a real GPU: images by torchvision's decoder (nvJPEG) beside the host's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import penstock

pytestmark = [pytest.mark.cuda, pytest.mark.arithmetic]

IMAGES, SIDE, SIZE = 24, 96, 64
NEAR = 3.0
"""What pixels may differ by on average, of 255: decoders round otherwise, and so do the two ways to resize."""


@pytest.fixture(autouse=True, scope="module")
def _nvjpeg_is_up() -> None:
    """It opens the GPU's devices when it first decodes; the leak check is to see them as there from the start."""
    io = pytest.importorskip("torchvision.io")
    if torch.cuda.is_available() and hasattr(io, "decode_jpeg"):
        jpeg = io.encode_jpeg(torch.zeros(3, 16, 16, dtype=torch.uint8))
        io.decode_jpeg([jpeg], device="cuda")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("torchvision.io")
    images = pytest.importorskip("PIL.Image")
    across, down = np.meshgrid(np.linspace(0, 1, SIDE), np.linspace(0, 1, SIDE))
    for number in range(IMAGES):
        pixels = np.stack([200 * across, 200 * down, np.full_like(across, 8 * number)], axis=-1).astype(np.uint8)
        images.fromarray(pixels).save(tmp_path / f"{number:02d}.{'png' if number % 6 == 5 else 'jpg'}", quality=95)
    return tmp_path


@pytest.mark.parametrize("size", [None, SIZE])
def test_images_decoded_on_the_gpu_are_nearly_those_of_the_host(folder: Path, size: int | None) -> None:
    decoded = penstock.DataLoader(penstock.open(folder, size=size, device="cuda"), batch_size=8)
    hosts = penstock.DataLoader(penstock.open(folder, size=size), batch_size=8)
    batches = 0
    for batch, expected in zip(decoded, hosts, strict=True):
        assert batch["image"].is_cuda
        assert batch["image"].shape == expected["image"].shape
        apart = (batch["image"].cpu().float() - expected["image"].float()).abs()
        assert apart.mean().item() <= NEAR
        batches += 1
    assert batches == IMAGES // 8


def test_decoding_beside_a_step_that_lags_behind_overwrites_nothing(folder: Path) -> None:
    loader = penstock.DataLoader(penstock.open(folder, size=SIZE, device="cuda"), batch_size=4)
    alone = [batch["image"].clone() for batch in loader]
    torch.cuda.synchronize()
    sums = []
    for batch in loader:
        torch.cuda._sleep(20_000_000)
        sums.append(batch["image"].sum(dtype=torch.int64))
        del batch
    assert [one.item() for one in sums] == [one.sum(dtype=torch.int64).item() for one in alone]
