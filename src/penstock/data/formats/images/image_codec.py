"""Decodes images, straight to the size that is wanted, and encodes them.

    JPEG                            libjpeg-turbo (the package simplejpeg), which decodes to 1/2, 1/4 or 1/8 of the size
                                    at once; what it has warnings about, CMYK, and all where it is missing: Pillow
    PNG WebP GIF BMP TIFF PPM       Pillow; the first frame where there are several

    grey, palette, two-tone         RGB
    alpha                           dropped, as by Pillow's convert("RGB"), not blended
    CMYK                            RGB by Pillow's formula, without colour profiles
    16 bits or floats per pixel     grey ones are an error; of RGB the upper 8 bits
    EXIF orientation                is not applied, as in torchvision's ImageFolder

What the bytes are decides, not a file's name. The pixels that a header promises are checked before memory is taken.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch

from penstock.core.errors import ExtraError, OptionError, PenstockError, SourceError
from penstock.data.optional import need

Size = int | tuple[int, int]
"""Height and width; one number for both."""

Crop = tuple[int, int, int, int]
"""Top, left, height, width: torchvision's order."""

Resize = Literal["cover", "stretch"]

MAX_PIXELS = 178_956_970
"""The most that an image may have; Pillow's own limit."""

_MAX_SIDE = 1 << 16
_MAX_SCANS = 256
_JPEG = b"\xff\xd8\xff"
_SCAN = b"\xff\xda"
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_BEGINNINGS = (
    (_JPEG, ".jpg"),
    (b"\x89PNG\r\n\x1a\n", ".png"),
    (b"GIF8", ".gif"),
    (b"BM", ".bmp"),
    (b"II*\0", ".tif"),
    (b"MM\0*", ".tif"),
    (b"P6", ".ppm"),
    (b"P5", ".pgm"),
)
_WHOLE_BYTES = ("RGB", "RGBA", "RGBX", "RGBa", "L", "LA", "La", "P", "PA", "1", "CMYK", "YCbCr")


def decode(
    data: bytes | bytearray | memoryview,
    *,
    size: Size | None = None,
    crop: Crop | None = None,
    resize: Resize = "cover",
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """Return an image's pixels, uint8 of the shape (3, height, width): red, green, blue.

    The array is a view: what the decoder made, which is height x width x 3, transposed.

    Args:
        data: an encoded picture.
        size: what comes out, in pixels; None for as many as there are.
        crop: the part that is taken, in the pixels of the whole picture, before it is brought to `size`.
        resize: "cover" keeps the shape of things: the shorter side is brought to `size`, and the middle cut out, as by
            torchvision's Resize(size) and CenterCrop(size). "stretch" brings both sides to `size`, as by its
            RandomResizedCrop. Bilinear, antialiased; equal to Pillow's within 1, but for JPEGs of twice the size and
            more, of which fewer pixels are decoded.
        max_pixels: an image with more is refused.

    Raises:
        SourceError: it is no picture, truncated, corrupt or too large.
        ExtraError: neither simplejpeg nor Pillow is installed, or Pillow is not and is needed.
        OptionError: the crop lies outside of the picture, or `size` or `resize` cannot be.

    >>> data = encode(np.zeros((3, 40, 60), np.uint8))
    >>> decode(data).shape, decode(data, size=20).shape, decode(data, crop=(10, 0, 8, 16), size=(4, 8)).shape
    ((3, 40, 60), (3, 20, 20), (3, 4, 8))
    """
    data = _checked(data)
    wanted = sides(size, resize)
    pixels = _by_turbo(data, wanted, crop, resize, max_pixels) if data.startswith(_JPEG) else None
    if pixels is None:
        pixels = _by_pillow(data, wanted, crop, resize, max_pixels)
    return pixels


def decode_mask(
    data: bytes, size: tuple[int, int] | None = None, resize: Resize = "cover", max_pixels: int = MAX_PIXELS
) -> np.ndarray:
    """Return what a picture holds for each pixel, as it is: numbers of classes or depths, not colours.

    Args:
        data: an encoded picture: grey or with a palette, of which the numbers are kept (uint8, uint16 or int32), or
            floats (float32), of the shape (height, width); or colours, uint8 (channels, height, width).
        size: height and width; each pixel is that of the mask which lies nearest.
        resize: as of the image, so that both still belong together.
        max_pixels: a picture with more is refused.

    Raises:
        SourceError: it is no picture, truncated, corrupt or too large.

    >>> decode_mask(encode(np.full((3, 4, 4), 7, np.uint8)), (2, 3)).shape
    (3, 2, 3)
    """
    with _pillow(_checked(data), max_pixels) as picture:
        pixels = np.array(picture)
    pixels = (
        pixels.astype(np.uint8) if pixels.dtype == bool else pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
    )
    if size is not None:
        height, width = covering(pixels.shape[:2], size) if resize == "cover" else size
        top, left = round((height - size[0]) / 2), round((width - size[1]) / 2)
        rows = (np.arange(top, top + size[0]) * 2 + 1) * pixels.shape[0] // (2 * height)
        columns = (np.arange(left, left + size[1]) * 2 + 1) * pixels.shape[1] // (2 * width)
        pixels = pixels[rows][:, columns]
    return pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels


def dimensions(data: bytes | bytearray | memoryview, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return an image's height and width, from its header: what a random crop is drawn from.

    Raises:
        SourceError: it is no picture, or too large.

    >>> dimensions(encode(np.zeros((3, 40, 60), np.uint8)))
    (40, 60)
    """
    data = _checked(data)
    with _pillow(data, max_pixels) as picture:
        return picture.height, picture.width


def has_usual_colours(data: bytes, *, max_pixels: int = MAX_PIXELS) -> bool:
    """Return whether it is a JPEG, of grey or of red, green and blue, as far as its header says: no CMYK.

    Raises:
        SourceError: it is too large.

    >>> has_usual_colours(encode(np.zeros((3, 4, 6), np.uint8), "jpeg")), has_usual_colours(b"text")
    (True, False)
    """
    if not data.startswith(_JPEG):
        return False
    data, turbo = _checked(data), _turbo()
    if turbo is None:
        with _pillow(data, max_pixels) as picture:
            return picture.mode in ("RGB", "L")
    try:
        height, width, colours, _ = turbo.decode_jpeg_header(data)
    except ValueError:
        return False
    _check_pixels(height, width, max_pixels)
    return bool(colours != "CMYK")


def encode(image: np.ndarray, format: str = "png", quality: int = 95) -> bytes:
    """Return an image as the bytes of a file.

    Args:
        image: uint8 of the shape (3, height, width).
        format: "png" or "webp", which lose nothing, or "jpeg".
        quality: of JPEG.

    Raises:
        SourceError: it has no pixels, or more than the format can hold.
        OptionError: there is no such format.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[0] != 3 or not image.size:
        raise SourceError(f"an image is uint8[3, height, width], not {image.dtype}{list(image.shape)}")
    options: dict[str, dict[str, Any]] = {
        "png": {"compress_level": 3},
        "webp": {"lossless": True, "quality": 50, "exact": True},
        "jpeg": {"quality": quality},
    }
    if format not in options:
        raise OptionError(f"format={format!r} is none of {', '.join(options)}")
    file = io.BytesIO()
    picture = need("PIL.Image", "images").fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
    try:
        picture.save(file, format, **options[format])
    except (OSError, ValueError) as error:
        raise SourceError(f"{image.shape[2]} x {image.shape[1]} pixels cannot be {format}: {error}") from error
    return file.getvalue()


def suffix(data: bytes) -> str:
    """Return what the name of a file with these bytes ends on; "" where they are no image.

    >>> suffix(encode(np.zeros((3, 1, 1), np.uint8))), suffix(b"text")
    ('.png', '')
    """
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return ".webp"
    return next((found for beginning, found in _BEGINNINGS if data.startswith(beginning)), "")


def sides(size: Size | None, resize: Resize) -> tuple[int, int] | None:
    """Return height and width; None where `size` is.

    Raises:
        OptionError: it is no size, or `resize` is no way to come to it.
    """
    if resize not in ("cover", "stretch"):
        raise OptionError(f"resize={resize!r} is neither 'cover' nor 'stretch'")
    if size is None:
        return None
    try:
        height, width = (size, size) if isinstance(size, int) else size
    except ValueError as error:
        raise OptionError(f"size={size!r} is neither a number of pixels nor (height, width)") from error
    if not (0 < height <= _MAX_SIDE and 0 < width <= _MAX_SIDE):
        raise OptionError(f"size={size!r} has to lie between 1 and {_MAX_SIDE}")
    return height, width


def resized(pixels: np.ndarray, crop: Crop, wanted: tuple[int, int] | None, resize: Resize) -> np.ndarray:
    """Return a part of height x width x 3 pixels, brought to the size that is wanted, as 3 x height x width.

    >>> resized(np.zeros((375, 500, 3), np.uint8), (0, 0, 375, 500), (224, 224), "cover").shape
    (3, 224, 224)
    """
    top, left, rows, columns = crop
    part = pixels[top : top + rows, left : left + columns]
    if wanted is None or wanted == (rows, columns):
        return part.transpose(2, 0, 1)
    height, width = covering((rows, columns), wanted) if resize == "cover" else wanted
    if (height, width) != (rows, columns):
        # A batch whose strides have channels last is resized as it lies; others are copied first.
        batch = torch.from_numpy(part)[None].permute(0, 3, 1, 2)
        batch = torch.nn.functional.interpolate(batch, size=(height, width), mode="bilinear", antialias=True)
        part = batch[0].permute(1, 2, 0).numpy()
    top, left = round((height - wanted[0]) / 2), round((width - wanted[1]) / 2)  # as torchvision's CenterCrop
    return part[top : top + wanted[0], left : left + wanted[1]].transpose(2, 0, 1)


# ── decoders ────────────────────────────────────────────────────────────────────────────────────────────────


def _by_turbo(
    data: bytes, wanted: tuple[int, int] | None, crop: Crop | None, resize: Resize, max_pixels: int
) -> np.ndarray | None:
    """Return the pixels of a JPEG; None if it needs Pillow."""
    turbo = _turbo()
    if turbo is None:
        return None
    try:
        height, width, colours, _ = turbo.decode_jpeg_header(data)
        _check_pixels(height, width, max_pixels)
        if colours == "CMYK":
            return None
        crop = _inside(crop, height, width)
        shrink = _shrink(wanted, crop)
        pixels = turbo.decode_jpeg(data, min_height=-(-height // shrink), min_width=-(-width // shrink))
    except PenstockError:
        raise
    except (ValueError, MemoryError):
        return None
    return resized(pixels, _scaled(crop, (height, width), pixels.shape), wanted, resize)


def _by_pillow(
    data: bytes, wanted: tuple[int, int] | None, crop: Crop | None, resize: Resize, max_pixels: int
) -> np.ndarray:
    with _pillow(data, max_pixels) as picture:
        height, width = picture.height, picture.width
        crop = _inside(crop, height, width)
        if picture.format in ("JPEG", "MPO"):
            shrink = _shrink(wanted, crop)
            picture.draft(None, (width // shrink, height // shrink))
        pixels = np.array(_rgb(picture))  # writable, as asarray's would not be
    return resized(pixels, _scaled(crop, (height, width), pixels.shape), wanted, resize)


@functools.cache
def _turbo() -> Any:
    """Return simplejpeg, or None."""
    try:
        return need("simplejpeg", "images")
    except ExtraError:
        return None


@functools.cache
def _image() -> Any:
    """Return Pillow's Image, with the formats that it does not know from the beginning."""
    for module in ("PIL.WebPImagePlugin", "PIL.TiffImagePlugin"):
        need(module, "images")
    return need("PIL.Image", "images")


@contextmanager
def _pillow(data: bytes, max_pixels: int) -> Iterator[Any]:
    """Open an image; what goes wrong inside is a SourceError."""
    images = _image()
    try:
        with images.open(io.BytesIO(data), formats=_FORMATS) as picture:
            _check_pixels(picture.height, picture.width, max_pixels)
            yield picture
    except PenstockError:
        raise
    except images.DecompressionBombError as error:
        raise SourceError(str(error)) from error
    except Exception as error:  # Pillow raises some fifteen types for broken files, and its warnings may be errors
        raise SourceError(_said(error, data)) from error


def _said(error: BaseException, data: bytes) -> str:
    if not suffix(data):
        return f"this is no image of a format that is read ({', '.join(_FORMATS)}): it begins with {data[:12]!r}"
    return f"this {suffix(data)[1:]} cannot be decoded: {str(error) or type(error).__name__}"


def _rgb(picture: Any) -> Any:
    if picture.mode not in _WHOLE_BYTES:
        raise SourceError(
            f"pixels of mode {picture.mode} (16 bits or more, or other colours) would lose what they hold; ask for the "
            "field 'encoded', and decode them yourself"
        )
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")  # straight to RGB Pillow warns
    return picture if picture.mode == "RGB" else picture.convert("RGB")


# ── sizes ───────────────────────────────────────────────────────────────────────────────────────────────────


def _checked(data: bytes | bytearray | memoryview) -> bytes:
    if not len(data):
        raise SourceError("there are no bytes")
    data = bytes(data)
    if data.startswith(_JPEG) and data.count(_SCAN) > _MAX_SCANS:  # each is a pass over all pixels
        raise SourceError(f"a JPEG of {data.count(_SCAN)} scans; {_MAX_SCANS} are the most")
    return data


def _check_pixels(height: int, width: int, most: int) -> None:
    if height * width > most:
        raise SourceError(f"an image of {width} x {height} pixels; {most} are the most (max_pixels)")


def _inside(crop: Crop | None, height: int, width: int) -> Crop:
    if crop is None:
        return 0, 0, height, width
    top, left, rows, columns = crop
    if top < 0 or left < 0 or rows < 1 or columns < 1 or top + rows > height or left + columns > width:
        raise OptionError(f"crop={crop} (top, left, height, width) lies outside of {height} x {width} pixels")
    return crop


def _shrink(wanted: tuple[int, int] | None, crop: Crop) -> int:
    """Return by how much less may be decoded: what is cropped still covers what is wanted.

    Only powers of two: libjpeg-turbo has no vector code for other fractions, and is slower there than without.
    """
    if wanted is None:
        return 1
    return next((by for by in (8, 4, 2) if crop[2] // by >= wanted[0] and crop[3] // by >= wanted[1]), 1)


def _scaled(crop: Crop, whole: tuple[int, int], decoded: tuple[int, ...]) -> Crop:
    """Return the crop in the pixels that were decoded."""
    if whole == decoded[:2]:
        return crop
    rows, columns = decoded[0] / whole[0], decoded[1] / whole[1]
    top, left = int(crop[0] * rows), int(crop[1] * columns)
    bottom, right = round((crop[0] + crop[2]) * rows), round((crop[1] + crop[3]) * columns)
    return top, left, bottom - top, right - left


def covering(whole: tuple[int, int], wanted: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width that cover `wanted` in the shape of `whole`: those of torchvision's Resize."""
    height, width = wanted
    if height * whole[1] >= width * whole[0]:
        width = max(width, int(height * whole[1] / whole[0]))
    else:
        height = max(height, int(width * whole[0] / whole[1]))
    return height, width
