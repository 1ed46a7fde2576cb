"""Pictures, decoded."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.core.errors import ExtraError, OptionError, SourceError
from penstock.data.formats.images import image_codec
from penstock.data.formats.images.image_codec import decode, dimensions, encode, suffix


def smooth(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Make up a picture with shapes of all sizes, height x width x 3."""
    rng = np.random.default_rng(seed)
    total = np.zeros((height, width, 3))
    for cells in (2, 5, 11, 23):
        coarse = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), np.uint8))
        total += np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), float)
    return (total / 4).astype(np.uint8)


def saved(pixels: np.ndarray | Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    picture = Image.fromarray(pixels) if isinstance(pixels, np.ndarray) else pixels
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def by_pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).transpose(2, 0, 1)


def torchvision_crop(data: bytes, size: int) -> np.ndarray:
    """Do as torchvision's Resize(size) and CenterCrop(size) do with a PIL image."""
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    width, height = picture.size
    short, long = min(width, height), max(width, height)
    other = int(size * long / short)
    width, height = (size, other) if width <= height else (other, size)
    picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    top, left = round((height - size) / 2), round((width - size) / 2)
    return np.asarray(picture.crop((left, top, left + size, top + size))).transpose(2, 0, 1)


def apart(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    assert one.shape == other.shape
    assert one.dtype == other.dtype == np.uint8
    return np.abs(one.astype(int) - other.astype(int))


@pytest.fixture(params=["turbo", "pillow"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With simplejpeg, and without."""
    if request.param == "pillow":
        monkeypatch.setattr(image_codec, "_turbo", lambda: None)
    return str(request.param)


# ── the same as Pillow ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shape", [(40, 60), (1, 1), (17, 3), (375, 500)])
@pytest.mark.parametrize("options", [{}, {"quality": 30}, {"subsampling": 0}, {"progressive": True}])
def test_a_whole_jpeg_is_what_pillow_makes_of_it(either: str, shape: tuple[int, int], options: dict[str, Any]) -> None:
    data = saved(smooth(*shape), **options)
    np.testing.assert_array_equal(decode(data), by_pillow(data))
    assert dimensions(data) == shape


@pytest.mark.parametrize("shape", [(375, 500), (500, 375), (224, 224), (100, 447), (60, 70)])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_a_size_is_resize_and_center_crop_of_torchvision_within_1(
    either: str, shape: tuple[int, int], format: str
) -> None:
    data = saved(smooth(*shape), format)
    assert apart(decode(data, size=224), torchvision_crop(data, 224)).max() <= 1


@pytest.mark.parametrize("shape", [(448, 600), (900, 1200), (1800, 2000)])
def test_large_jpegs_of_which_fewer_pixels_are_decoded_are_close_to_it(either: str, shape: tuple[int, int]) -> None:
    data = saved(smooth(*shape), quality=90)
    difference = apart(decode(data, size=224), torchvision_crop(data, 224))
    assert difference.mean() < 1.5
    assert np.percentile(difference, 99) <= 8


def test_both_sides_may_be_given_and_the_picture_covers_them(either: str) -> None:
    data = saved(smooth(300, 400), "PNG")
    whole = Image.open(io.BytesIO(data)).resize((160, 120), Image.Resampling.BILINEAR)
    expected = np.asarray(whole.crop((0, 20, 160, 100))).transpose(2, 0, 1)
    assert apart(decode(data, size=(80, 160)), expected).max() <= 1
    stretched = np.asarray(Image.open(io.BytesIO(data)).resize((160, 80), Image.Resampling.BILINEAR))
    assert apart(decode(data, size=(80, 160), resize="stretch"), stretched.transpose(2, 0, 1)).max() <= 1


def test_a_crop_is_cut_before_it_is_resized(either: str) -> None:
    data = saved(smooth(300, 400))
    crop = (30, 50, 120, 110)
    np.testing.assert_array_equal(decode(data, crop=crop), by_pillow(data)[:, 30:150, 50:160])
    cut = Image.open(io.BytesIO(data)).convert("RGB").crop((50, 30, 160, 150))
    expected = np.asarray(cut.resize((96, 96), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert apart(decode(data, crop=crop, size=96, resize="stretch"), expected).max() <= 1


def test_a_crop_of_a_large_jpeg_is_cut_where_it_lies(either: str) -> None:
    data = saved(smooth(1201, 1603), quality=90)
    crop = (101, 203, 900, 907)
    cut = Image.open(io.BytesIO(data)).convert("RGB").crop((203, 101, 203 + 907, 101 + 900))
    expected = np.asarray(cut.resize((200, 200), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    difference = apart(decode(data, crop=crop, size=200, resize="stretch"), expected)
    assert difference.mean() < 1.5


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    resize=st.sampled_from(["cover", "stretch"]),
    data=st.data(),
)
def test_every_size_and_crop_gives_as_many_pixels(
    shape: tuple[int, int], size: tuple[int, int], resize: Any, data: st.DataObject
) -> None:
    encoded = saved(smooth(*shape))
    top, left = data.draw(st.integers(0, shape[0] - 1)), data.draw(st.integers(0, shape[1] - 1))
    rows, columns = data.draw(st.integers(1, shape[0] - top)), data.draw(st.integers(1, shape[1] - left))
    assert decode(encoded, size=size, resize=resize).shape == (3, *size)
    assert decode(encoded, size=size, crop=(top, left, rows, columns), resize=resize).shape == (3, *size)
    assert decode(encoded, crop=(top, left, rows, columns)).shape == (3, rows, columns)


# ── modes ───────────────────────────────────────────────────────────────────────────────────────────────────


def translucent_palette() -> bytes:
    picture = Image.fromarray(smooth(20, 30)).quantize(16)
    return saved(picture, "PNG", transparency=bytes(range(16)))


MODES: dict[str, Callable[[], bytes]] = {
    "grey JPEG": lambda: saved(Image.fromarray(smooth(20, 30)).convert("L")),
    "CMYK JPEG": lambda: saved(Image.fromarray(smooth(20, 30)).convert("CMYK")),
    "grey PNG": lambda: saved(Image.fromarray(smooth(20, 30)).convert("L"), "PNG"),
    "grey PNG with alpha": lambda: saved(Image.fromarray(smooth(20, 30)).convert("LA"), "PNG"),
    "two-tone PNG": lambda: saved(Image.fromarray(smooth(20, 30)).convert("1"), "PNG"),
    "PNG with alpha": lambda: saved(Image.fromarray(smooth(20, 30)).convert("RGBA"), "PNG"),
    "palette": lambda: saved(Image.fromarray(smooth(20, 30)).quantize(16), "PNG"),
    "GIF": lambda: saved(smooth(20, 30), "GIF"),
    "BMP": lambda: saved(smooth(20, 30), "BMP"),
    "TIFF": lambda: saved(smooth(20, 30), "TIFF", compression="tiff_lzw"),
    "PPM": lambda: saved(smooth(20, 30), "PPM"),
    "WebP": lambda: saved(smooth(20, 30), "WEBP"),
    "WebP with alpha": lambda: saved(Image.fromarray(smooth(20, 30)).convert("RGBA"), "WEBP", lossless=True),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_rgb_as_by_pillow(either: str, mode: str) -> None:
    data = MODES[mode]()
    np.testing.assert_array_equal(decode(data), by_pillow(data))
    assert decode(data, size=8).shape == (3, 8, 8)
    assert suffix(data)


def test_a_palette_with_transparency_becomes_rgb_without_a_warning(either: str) -> None:
    data = translucent_palette()
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"))[..., :3].transpose(2, 0, 1)
    np.testing.assert_array_equal(decode(data), expected)


def test_16_bits_of_grey_are_an_error_that_says_how_to_get_at_them(either: str) -> None:
    data = saved(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100, "PNG")
    with pytest.raises(SourceError, match="encoded"):
        decode(data)


@pytest.mark.parametrize("format", ["GIF", "WEBP"])
def test_of_an_animation_the_first_frame_is_taken(format: str) -> None:
    frames = [Image.fromarray(smooth(20, 30, seed)) for seed in range(3)]
    data = saved(frames[0], format, save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(decode(data), by_pillow(data))


def test_exif_orientation_is_not_applied(either: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(smooth(20, 30), exif=exif)
    assert decode(data).shape == (3, 20, 30)


def test_pixels_can_be_written_to(either: str) -> None:
    for format in ("JPEG", "PNG"):
        for options in ({}, {"size": 10}):
            assert decode(saved(smooth(20, 30), format), **options).flags.writeable


# ── what is broken, and what is too much ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "TIFF"])
def test_a_truncated_picture_is_an_error(either: str, format: str) -> None:
    data = saved(smooth(40, 60), format)
    for keep in (0, 1, 3, 20, len(data) // 2):
        with pytest.raises(SourceError):
            decode(data[:keep])


def test_what_is_no_picture_says_how_it_begins(either: str) -> None:
    with pytest.raises(SourceError, match=r"no image.*%PDF"):
        decode(b"%PDF-1.4 and so on")


def test_a_picture_of_more_pixels_is_refused_by_its_header(either: str) -> None:
    for format in ("JPEG", "PNG"):
        data = saved(smooth(40, 60), format)
        with pytest.raises(SourceError, match="max_pixels"):
            decode(data, max_pixels=2399)
        assert decode(data, max_pixels=2400).shape == (3, 40, 60)


def test_a_jpeg_whose_header_promises_too_much_is_refused(either: str) -> None:
    data = bytearray(saved(smooth(40, 60)))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"
    with pytest.raises(SourceError, match="pixels"):
        decode(bytes(data))


def test_a_jpeg_of_thousands_of_scans_is_refused(either: str) -> None:
    data = saved(smooth(40, 60), progressive=True)
    scan = data.rindex(b"\xff\xda")
    with pytest.raises(SourceError, match="scans"):
        decode(data[:-2] + data[scan:-2] * 1000 + data[-2:])


def test_a_jpeg_with_rubbish_that_libjpeg_only_warns_about_is_read_as_pillow_reads_it(either: str) -> None:
    data = saved(smooth(40, 60))
    scan = data.rindex(b"\xff\xda")
    data = data[:scan] + b"rubbish" + data[scan:]
    np.testing.assert_array_equal(decode(data), by_pillow(data))


def test_options_that_cannot_be_are_refused() -> None:
    data = saved(smooth(40, 60))
    for crop in ((0, 0, 41, 60), (-1, 0, 5, 5), (0, 0, 0, 5), (0, 58, 5, 5)):
        with pytest.raises(OptionError, match="outside"):
            decode(data, crop=crop)
    for size in (0, -3, (0, 5), (1, 2, 3)):
        with pytest.raises(OptionError, match="size"):
            decode(data, size=size)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="resize"):
        decode(data, resize="fit")  # type: ignore[arg-type]


def test_without_packages_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ExtraError('pip install "penstock[images]"')

    monkeypatch.setattr(image_codec, "_turbo", lambda: None)
    monkeypatch.setattr(image_codec, "_image", missing)
    with pytest.raises(ExtraError, match=r"penstock\[images\]"):
        decode(saved(smooth(40, 60)))


def test_a_jpeg_needs_no_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(smooth(40, 60))
    monkeypatch.setattr(image_codec, "_image", lambda: pytest.fail("Pillow was used"))
    assert decode(data, size=16).shape == (3, 16, 16)


@pytest.mark.parametrize("mode", MODES)
def test_mutated_pictures_give_a_picture_or_the_one_error(mode: str) -> None:
    chance = random.Random(mode)
    original = MODES[mode]()
    for _ in range(60):
        data = bytearray(original)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            match chance.randrange(4):
                case 0:
                    data[at] ^= 1 << chance.randrange(8)
                case 1:
                    data[at : at + 2] = bytes(chance.randrange(256) for _ in range(chance.randrange(5)))
                case 2:
                    data[at:at] = bytes(data[at : at + 20])
                case _:
                    data = data[: at + 1]
        try:
            found = decode(bytes(data), size=8, max_pixels=1 << 22)
        except SourceError:
            continue
        assert found.shape == (3, 8, 8)


# ── the way back ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("format", ["png", "webp"])
@settings(max_examples=20, deadline=None)
@given(shape=st.tuples(st.integers(1, 20), st.integers(1, 20)), seed=st.integers(0, 99))
def test_what_was_encoded_without_loss_comes_back(format: str, shape: tuple[int, int], seed: int) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (3, *shape), np.uint8)
    np.testing.assert_array_equal(decode(encode(image, format)), image)


def test_a_jpeg_comes_back_about_as_it_was() -> None:
    image = smooth(400, 600).transpose(2, 0, 1)
    data = encode(image, "jpeg", quality=95)
    assert suffix(data) == ".jpg"
    assert apart(decode(data), image).mean() < 4


@pytest.mark.parametrize(
    "image", [np.zeros((1, 4, 4), np.uint8), np.zeros((3, 4, 4)), np.zeros((3, 0, 4), np.uint8), np.zeros(3, np.uint8)]
)
def test_what_is_no_picture_is_not_encoded(image: np.ndarray) -> None:
    with pytest.raises(SourceError, match="uint8"):
        encode(image)
