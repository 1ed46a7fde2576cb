"""JPEGs decoded on a GPU by torchvision (nvJPEG), a batch at once; see formats/decoding_device.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.data.formats.decoding_device import begin_on, library
from penstock.data.formats.images.image_codec import Resize, covering, decode, has_usual_colours


def decode_images(
    encoded: Sequence[bytes], device: torch.device, size: tuple[int, int] | None, resize: Resize, max_pixels: int
) -> list[torch.Tensor]:
    """Return images on a device, uint8 of the shape (3, height, width): their JPEGs are decoded there, all at once.

    Raises:
        SourceError: one of them is no picture, truncated, corrupt or too large.
        OptionError: this is a worker.
    """
    begin_on(device)
    # What is cut off nvJPEG may decode all the same; the decoder of the host then says so.
    jpegs = [
        number
        for number, data in enumerate(encoded)
        if has_usual_colours(data, max_pixels=max_pixels) and data.rstrip(b"\0\r\n ").endswith(b"\xff\xd9")
    ]
    images = dict(zip(jpegs, _decode_jpegs([encoded[number] for number in jpegs], device), strict=True))
    found = []
    for number, data in enumerate(encoded):
        pixels = images.get(number)
        if pixels is None:
            on_host = decode(data, size=size, resize=resize, max_pixels=max_pixels)
            found.append(torch.from_numpy(np.ascontiguousarray(on_host)).to(device))
        else:
            found.append(resized_on_device(pixels, size, resize))
    return found


def _decode_jpegs(encoded: list[bytes], device: torch.device) -> list[torch.Tensor | None]:
    """Return the pixels of JPEGs; None for those that the decoder refuses."""
    if not encoded:
        return []
    torchvision = library("torchvision.io")
    data = [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in encoded]
    try:
        return list(torchvision.decode_jpeg(data, mode=torchvision.ImageReadMode.RGB, device=device))
    except RuntimeError:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # others that were begun may still be written, to memory that is free by now
        return [None] if len(encoded) == 1 else [each for one in encoded for each in _decode_jpegs([one], device)]


def resized_on_device(pixels: torch.Tensor, size: tuple[int, int] | None, resize: Resize) -> torch.Tensor:
    """Return (..., 3, height, width) brought to `size`, as `image_codec.resized` does; computed in float32.

    >>> resized_on_device(torch.zeros(2, 3, 375, 500, dtype=torch.uint8), (224, 224), "cover").shape
    torch.Size([2, 3, 224, 224])
    """
    whole = (pixels.shape[-2], pixels.shape[-1])
    if size is None or size == whole:
        return pixels
    height, width = covering(whole, size) if resize == "cover" else size
    if (height, width) != whole:
        batch = pixels.reshape(-1, *pixels.shape[-3:]).float()
        batch = torch.nn.functional.interpolate(batch, size=(height, width), mode="bilinear", antialias=True)
        pixels = batch.round_().clamp_(0, 255).to(torch.uint8).reshape(*pixels.shape[:-2], height, width)
    top, left = round((height - size[0]) / 2), round((width - size[1]) / 2)
    return pixels[..., top : top + size[0], left : left + size[1]].contiguous()
