"""Folders of images: class folders as torchvision's ImageFolder has them, or images without labels.

    image       uint8 (3, height, width), decoded; see image_codec.py for what is decoded how
    label       the number of the class folder among all, sorted by name (int); not there without class folders
    path        the file's path, if it is asked for by name
    encoded     the file's bytes as they are, if they are asked for by name: for a decoder of your own, or to copy them

Which files there are, and in what order: class_folders.py. A crop of your own is cut from the encoded picture, of which
libjpeg-turbo then decodes no more than `size` needs:

    def random_crop(sample):
        height, width = dimensions(sample["encoded"])
        crop = ...                                              # top, left, height, width: drawn from these
        return {"image": decode(sample["encoded"], crop=crop, size=224, resize="stretch"), "label": sample["label"]}

    penstock.open("train/", fields=["encoded", "label"]).map(random_crop)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from penstock.core.errors import RecordError, SourceError
from penstock.core.per_process import PerProcess
from penstock.data.formats.class_folders import ClassFolders
from penstock.data.formats.decoding_device import decoding_device
from penstock.data.formats.folder_source import FolderSource, choose_fields
from penstock.data.formats.images.device_images import decode_images
from penstock.data.formats.images.image_codec import (
    MAX_PIXELS,
    Resize,
    Size,
    decode,
    decode_mask,
    encode,
    sides,
    suffix,
)
from penstock.data.formats.media_rows import MediaRows
from penstock.data.formats.paths import NamedPaths, Paths
from penstock.data.schema import Errors, Field, Sample, Schema, Selection, field_of
from penstock.data.storage import event_loop
from penstock.data.storage.foreign_files import foreign_words
from penstock.data.storage.object_batch import ObjectBatch, ObjectRequest
from penstock.data.storage.storage import Storage, is_remote

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Of the files that a folder is searched for: torchvision's."""

_FIELDS = ("image", "label", "path", "encoded")
_MAX_CLASSES = 100_000

Masks = str | list[str] | Callable[[str], str | os.PathLike[str]]


def open_files(
    paths: list[str],
    storage: Storage,
    fields: Selection,
    errors: Errors,
    *,
    size: Size | None = None,
    resize: Resize = "cover",
    labels: bool | None = None,
    media: MediaRows | None = None,
    masks: Masks | None = None,
    max_pixels: int = MAX_PIXELS,
    max_record_nbytes: int = 1 << 30,
    device: str | int | torch.device = "cpu",
) -> ImageFolder:
    """Open a folder of images, several, or the images themselves.

    Args:
        paths: folders or files.
        storage: opens what lies remotely.
        fields: of image, label, mask, path, encoded and the columns of `media`; by default all but path and encoded.
        errors: unused: reading a broken image raises RecordError.
        size: of every image: (height, width), or one number; None leaves each its own.
        resize: "cover" (torchvision's Resize and CenterCrop) or "stretch", see `image_codec.decode`.
        labels: whether class folders make labels; None for where nothing else is likely: see class_folders.py.
        media: rows of a table that name the files, each a sample; see `penstock.open`.
        masks: a folder of pictures with the names of the images, whatever they end on, or a function of an image's path
            that returns its mask's: the field "mask". See `image_codec.decode_mask`. Images without one are left out,
            with a warning.
        max_pixels: of one picture, as it lies in the file.
        max_record_nbytes: of one file.
        device: "cuda" decodes JPEGs on the GPU by torchvision, a batch at once, and resizes there: `image` is a tensor
            on it. In the training process only (num_workers=0); see docs/gpu.md.

    Raises:
        SourceError: there are no images.
        OptionError: a size or a device that cannot be.
        ExtraError: torchvision is missing, for "cuda".
    """
    if masks is not None and labels is None:
        labels = False
    files = ClassFolders(paths, SUFFIXES, storage, labels, media)
    pairs = None if masks is None else _pair(files, paths[0], masks, storage)
    there = _FIELDS if masks is None else ("image", "label", "mask", "path", "encoded")
    chosen = choose_fields(fields, there, files, paths[0], on_request=("path", "encoded"))
    return ImageFolder(
        where=paths[0],
        files=files,
        masks=pairs,
        chosen=chosen,
        storage=storage,
        size=sides(size, resize),
        resize=resize,
        max_pixels=max_pixels,
        max_record_nbytes=max_record_nbytes,
        device=decoding_device(device, "torchvision.io"),
    )


def _pair(files: ClassFolders, folder: str, masks: Masks, storage: Storage) -> Sequence[str]:
    """Return the mask of each image; images without one leave `files`.

    Raises:
        SourceError: no image has one, one has several, or one that a row names has none.
    """
    if callable(masks):
        return Paths("", [os.fspath(masks(path)) for path in files.paths])
    found = ClassFolders(storage.expand(masks), SUFFIXES, storage, labels=False).paths
    named, root = NamedPaths(found), os.path.join(folder, "")
    numbers = [named.by_name(os.path.splitext(path.removeprefix(root))[0]) for path in files.paths]
    several = next((at for at, each in enumerate(numbers) if len(each) > 1), None)
    if several is not None:
        raise SourceError(
            f"{files.paths[several]} has several masks: {', '.join(found[at] for at in numbers[several][:3])}; pass "
            "masks= a function that returns the path of the one that is meant"
        )
    lacking = [at for at, each in enumerate(numbers) if not each]
    if len(lacking) == len(numbers) or (lacking and files.media is not None):
        raise SourceError(
            f"{len(lacking)} of {len(numbers)} images have no mask of their name in {masks}: {files.paths[lacking[0]]} "
            "...; pass masks= a function that returns the path of an image's mask"
        )
    if lacking:
        warnings.warn(
            f"left out: {len(lacking)} of {len(numbers)} images, without a mask of their name in {masks}: "
            f"{files.paths[lacking[0]]} ...",
            stacklevel=3,
        )
        files.keep([at for at, each in enumerate(numbers) if each])
    return Paths("", [found[each[0]] for each in numbers if each])


@dataclass(kw_only=True, eq=False, repr=False)
class ImageFolder(FolderSource):
    """The images of a folder. Made by `penstock.open`."""

    masks: Sequence[str] | None
    """Of each image."""
    size: tuple[int, int] | None
    resize: Resize
    max_pixels: int
    device: torch.device | None
    _connections: PerProcess[event_loop.EventLoopThread] = field(
        default_factory=lambda: PerProcess(event_loop.acquire, event_loop.EventLoopThread.release), init=False
    )

    def _field(self, own: str) -> Field:
        if own == "mask":
            found = field_of(self._mask(0))
            return found if self.size else replace(found, shape=(*found.shape[:-2], None, None))
        return Field("array", "uint8", (3, *(self.size or (None, None)))) if own == "image" else Field("bytes")

    @property
    def decodes_on(self) -> torch.device | None:
        """The GPU that images are decoded on, if they are."""
        return self.device if "image" in self.chosen.values() else None

    @property
    def reads_batches(self) -> bool:  # type: ignore[override]
        """Whether a batch is decoded at once."""
        return self.decodes_on is not None

    @property
    def reads_objects(self) -> bool:
        """Whether images lie remotely, and are read."""
        return self.files.are_remote and not {"image", "encoded"}.isdisjoint(self.chosen.values())

    def object_requests(self, indices: Sequence[int]) -> list[ObjectRequest]:
        """Return the remote images of these samples. The connections are kept from then on, until it is closed."""
        if not self.reads_objects:
            return []
        files = self.files
        requests = [self.storage.request(files.paths[index], files.listed_version(index)) for index in indices]
        missing = [request for request in requests if request is not None and request.kept() is None]
        if missing:
            self._connections.get()
        return missing

    def close(self) -> None:
        """Give up the connections of this process."""
        self._connections.close()

    def read(self, index: int) -> Sample:
        """Return an image with what was chosen of label, path and bytes."""
        path = self.files.paths[index]
        wanted = self.chosen.values()
        data = self._bytes(path, index) if "image" in wanted or "encoded" in wanted else b""

        def value(own: str) -> Any:
            if own == "mask":
                return self._mask(index)
            return self._decoded(data, path, index) if own == "image" else data

        return self._sample(index, value)

    def read_many(self, indices: np.ndarray) -> list[Sample]:
        """Return images, as `read` does; those of a GPU are decoded together."""
        device, numbers = self.decodes_on, indices.tolist()
        if device is None:
            return super().read_many(indices)
        with ObjectBatch(self.object_requests(numbers)):
            encoded = [self._bytes(self.files.paths[number], number) for number in numbers]
        images = decode_images(encoded, device, self.size, self.resize, self.max_pixels)
        return [
            self._sample(number, {"image": image, "encoded": data}.__getitem__)
            for number, data, image in zip(numbers, encoded, images, strict=True)
        ]

    def _decoded(self, data: bytes, path: str, index: int) -> np.ndarray | torch.Tensor:
        try:
            if self.device is not None:
                return decode_images([data], self.device, self.size, self.resize, self.max_pixels)[0]
            return decode(data, size=self.size, resize=self.resize, max_pixels=self.max_pixels)
        except SourceError as error:
            raise RecordError(path, 0, index, str(error)) from error

    def _mask(self, index: int) -> np.ndarray:
        path = self.masks[index] if self.masks else ""
        try:
            return decode_mask(self._bytes(path, index), self.size, self.resize, self.max_pixels)
        except SourceError as error:
            raise error if isinstance(error, RecordError) else RecordError(path, 0, index, str(error)) from error

    def _bytes(self, path: str, index: int) -> bytes:
        most = self.max_record_nbytes
        try:
            if is_remote(path):
                version = self.files.listed_version(index) if path == self.files.paths[index] else None
                data = self.storage.read(path, most + 1, version)
                nbytes = len(data)
            else:
                with open(path, "rb", buffering=0) as file:
                    nbytes = os.fstat(file.fileno()).st_size
                    data = file.readall() if nbytes <= most else b""
        except OSError as error:
            raise RecordError(path, 0, index, f"the file cannot be read: {error}") from error
        if nbytes > most:
            raise RecordError(path, 0, index, f"the file is larger than {most} bytes (max_record_nbytes)")
        if words := foreign_words(data):
            raise RecordError(path, 0, index, f"the file {words}")
        return data


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────


def why_unsupported(schema: Schema) -> str:
    """Return why samples of this schema would not come back from a folder of images as they were; "" if they would.

    The order of samples with labels is not kept: a folder is read class by class.

    >>> why_unsupported({"image": Field("array", "uint8", (3, None, None)), "label": Field("number", "int64")})
    ''
    """
    names = set(schema) - {"label"}
    if names not in ({"image"}, {"encoded"}):
        return (
            f"a folder of images holds 'image' or 'encoded', and 'label' if you like; not {', '.join(sorted(schema))}"
        )
    image, label = schema.get("image"), schema.get("label")
    if image is not None and (image.kind, image.dtype, len(image.shape)) != ("array", "uint8", 3):
        return f"the field 'image' has to be uint8[3, height, width], not {image.words()}"
    if image is not None and image.shape[0] != 3:
        return f"the field 'image' has to have 3 channels, red, green and blue, not {image.words()}"
    if image is not None and 0 in image.shape:
        return f"the field 'image' is {image.words()}: it has no pixels"
    if "encoded" in schema and schema["encoded"].kind != "bytes":
        return f"the field 'encoded' has to be bytes, not {schema['encoded'].words()}"
    if label is not None and (label.kind, label.dtype) != ("number", "int64"):
        return f"the field 'label' has to be int64, not {label.words()}"
    return ""


class ImageFolderWriter:
    """Writes images to a new folder: where there are labels, to class folders named by five digits of each.

    Args:
        path: the folder; made, and has to be empty.
        schema: image (uint8, 3 x height x width) or encoded (bytes of a picture, written as they are), and perhaps
            label (a number from 0 on).
        format: of images: "png" and "webp" lose nothing, "jpeg" does.
        quality: of JPEG.

    >>> import tempfile
    >>> from penstock.data.schema import field_of
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     image = np.full((3, 4, 4), 7, np.uint8)
    ...     writer = ImageFolderWriter(f"{folder}/out", {"image": field_of(image), "label": field_of(1)})
    ...     writer.write({"image": image, "label": 1})
    ...     writer.close()
    ...     source = open_files([f"{folder}/out"], storage=Storage(), fields=Selection(), errors="raise", size=2)
    ...     source.classes, source[0]["label"], source[0]["image"].max()
    (('00000', '00001'), 1, np.uint8(7))
    """

    def __init__(self, path: str, schema: Schema, *, format: str = "png", quality: int = 95) -> None:
        label = schema.get("label")
        is_integer = label is not None and label.kind == "number" and np.dtype(label.dtype).kind in "iu"
        why = why_unsupported(schema | {"label": Field("number", "int64")} if is_integer else schema)
        if why:
            raise SourceError(f"{path}: {why}")
        os.makedirs(path, exist_ok=True)
        if os.listdir(path):
            raise SourceError(f"{path} is not empty; a folder of images is written to a new one")
        self._path = path
        self._has_labels = "label" in schema
        self._format = format
        self._quality = quality
        self._made = 0
        self._count = 0

    def write(self, sample: Sample) -> None:
        """Write an image."""
        if "encoded" in sample:
            data = bytes(sample["encoded"])
        else:
            data = encode(np.asarray(sample["image"]), self._format, self._quality)
        ending = suffix(data)
        if not ending:
            raise SourceError(f"{self._path}: sample {self._count} is no encoded image: it begins with {data[:8]!r}")
        folder = self._path
        if self._has_labels:
            label = int(sample["label"])
            if not 0 <= label < _MAX_CLASSES:
                raise SourceError(
                    f"{self._path}: the label {label} of sample {self._count} has to lie in range({_MAX_CLASSES})"
                )
            while self._made <= label:  # those before it too, even if they stay empty: labels are read from their order
                os.mkdir(os.path.join(self._path, f"{self._made:05d}"))
                self._made += 1
            folder = os.path.join(self._path, f"{label:05d}")
        with open(os.path.join(folder, f"{self._count:010d}{ending}"), "xb") as file:
            file.write(data)
        self._count += 1

    def close(self) -> None:
        """Leave the folder as it is: every image is whole as soon as it is written."""
