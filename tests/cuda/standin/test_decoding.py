"""Images decoded on a GPU by a decoder that writes on a stream of its own, as torchvision's does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import penstock

pytestmark = pytest.mark.standin

TEN_MS = 20_000_000
SIDE, IMAGES = 64, 24


class Decoder(ModuleType):
    """`torchvision.io`: memory from the current stream, written on another, of which the current stream waits."""

    ImageReadMode = SimpleNamespace(RGB="RGB")

    def __init__(self) -> None:
        super().__init__("torchvision.io")
        self.kept: list[torch.Tensor] = []

    def decode_jpeg(self, data: list[torch.Tensor], mode: str, device: torch.device) -> list[torch.Tensor]:
        from penstock.data.formats.images.image_codec import decode

        own, found = torch.cuda.Stream(device), []
        for one in data:
            pixels = torch.from_numpy(decode(one.numpy().tobytes()).copy()).pin_memory()
            self.kept.append(pixels)
            found.append(torch.empty(pixels.shape, dtype=torch.uint8, device=device))
            with torch.cuda.stream(own):
                found[-1].copy_(pixels, non_blocking=True)
        torch.cuda.current_stream(device).wait_stream(own)
        return found


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    images = pytest.importorskip("PIL.Image")
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.io", Decoder())
    for number in range(IMAGES):
        image = images.fromarray(np.full((SIDE, SIDE, 3), 10 * number, np.uint8))
        image.save(tmp_path / f"{number:02d}.{'png' if number % 6 == 5 else 'jpg'}", quality=100)
    return penstock.open(tmp_path, device="cuda")


@pytest.mark.parametrize("options", [{}, {"device": "cuda"}, {"seed": 0}, {"errors": "skip"}])
def test_images_are_decoded_into_no_memory_that_a_stream_still_reads(source: Any, options: dict[str, Any]) -> None:
    streams = [torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Stream()]
    results = torch.empty(IMAGES, 3, SIDE, SIDE, dtype=torch.uint8, pin_memory=True)
    # Samples, because those of a batch are stacked by a kernel, which computes nothing here.
    loader = penstock.DataLoader(source, batch_size=None, **options)
    seen = iter(loader)
    for number in range(IMAGES):
        with torch.cuda.stream(streams[number // 4 % 3]):
            image = next(seen)["image"]
            torch.cuda._sleep(TEN_MS // 10)
            results[number].copy_(image, non_blocking=True)
            del image
    torch.cuda.synchronize()
    assert [n for n in range(IMAGES) if int((results[n].int() - 10 * n).abs().max()) > 2] == []
