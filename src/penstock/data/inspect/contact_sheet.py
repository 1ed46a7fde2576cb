"""Images among samples, as a contact sheet: for a file, or as half blocks for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats.images.image_codec import decode
from penstock.data.optional import need
from penstock.data.schema import Sample

_CELL = 192
_GAP = 4
_MIN_SIZE = 4
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")


def images_of(samples: Iterable[Sample]) -> list[np.ndarray]:
    """Return the images in samples: (height, width, 3), uint8."""
    found = (as_image(value) for sample in samples for value in sample.values())
    return [image for image in found if image is not None]


def as_image(value: Any) -> np.ndarray | None:
    """Return a field's value as an image (height, width, 3); None if it is no image. Of several frames, the first.

    >>> as_image(np.zeros((3, 10, 20), np.uint8)).shape, as_image(np.zeros(3, np.uint8))
    ((10, 20, 3), None)
    """
    if isinstance(value, bytes) and value.startswith(_MAGIC):
        try:
            value = decode(value)
        except SourceError:
            return None
    if hasattr(value, "numpy"):
        value = value.numpy()
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or not value.size or not 2 <= value.ndim <= 5:
        return None
    while value.ndim > 3:
        value = value[0]
    if value.ndim == 2:
        value = value[:, :, None]
    elif value.shape[0] in (1, 3) and value.shape[2] not in (1, 3):
        value = value.transpose(1, 2, 0)
    if value.shape[2] not in (1, 3) or min(value.shape[:2]) < _MIN_SIZE:
        return None
    return np.ascontiguousarray(np.broadcast_to(value, (*value.shape[:2], 3)))


def contact_sheet(images: list[np.ndarray], *, cell: int = _CELL, columns: int | None = None) -> np.ndarray:
    """Return one image with all of them, each in a square cell of `cell` pixels; by default a third wider than high."""
    image_module = need("PIL.Image", "images")
    columns = columns or max(1, min(len(images), round(len(images) ** 0.5 * 1.3)))
    rows = -(-len(images) // columns)
    step = cell + _GAP
    sheet = np.full((rows * step - _GAP, columns * step - _GAP, 3), 24, np.uint8)
    for number, image in enumerate(images):
        scale = cell / max(image.shape[:2])
        size = max(1, round(image.shape[1] * scale)), max(1, round(image.shape[0] * scale))
        small = np.asarray(image_module.fromarray(image).resize(size))
        top, left = number // columns * step, number % columns * step
        sheet[top : top + small.shape[0], left : left + small.shape[1]] = small
    return sheet


def save(sheet: np.ndarray, path: str) -> None:
    """Write an image to a file, in the format of its suffix."""
    try:
        need("PIL.Image", "images").fromarray(sheet).save(path)
    except (OSError, ValueError, KeyError) as error:
        raise SourceError(f"the image {path} cannot be written: {error}") from error


def half_blocks(image: np.ndarray, columns: int) -> list[list[tuple[tuple[int, int, int], tuple[int, int, int]]]]:
    """Return rows of cells (colour above, colour below), each for one "▀", `columns` wide or less."""
    image_module = need("PIL.Image", "images")
    width = min(columns, image.shape[1])
    height = max(2, round(image.shape[0] * width / image.shape[1]) // 2 * 2)
    small = np.asarray(image_module.fromarray(image).resize((width, height))).tolist()
    return [
        [(tuple(above), tuple(below)) for above, below in zip(small[row], small[row + 1], strict=True)]
        for row in range(0, height, 2)
    ]
