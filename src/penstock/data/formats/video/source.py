"""Videos: clips of a few frames each, found by an index of every file's frames, decoded by ffmpeg (the package av).

    video       uint8 (frames, 3, height, width): red, green, blue, as ffmpeg's swscale converts them; resized as images
    label       the number of the class folder, as of images; absent without class folders
    start       the time of the first frame in seconds, as the file counts it
    path        the file's path, if it is asked for by name

    clip i of a file    frames i * step, i * step + stride, ... of those that decoding it from its beginning gives:
                        exactly these, wherever decoding begins

Opening the source reads all files for an index of their frames (frame_index.py), which a file may keep
(frame_index_cache.py). A clip is decoded from the keyframe before it (decoder.py), by one thread: loaders decode many
clips at a time. The rotation in a file's metadata is not applied. Files whose containers have no usable times (AVI with
frames out of order) are decoded from their beginning for each clip, which is slow if they are long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.core.per_process import PerProcess
from penstock.data.formats.class_folders import ClassFolders
from penstock.data.formats.decoding_device import begin_on, decoding_device
from penstock.data.formats.folder_source import FolderSource, choose_fields
from penstock.data.formats.images.device_images import resized_on_device
from penstock.data.formats.images.image_codec import Resize, Size, resized, sides
from penstock.data.formats.media_rows import MediaRows
from penstock.data.formats.video.decoder import DecoderPool, SeekingDecoder
from penstock.data.formats.video.device_decoder import DeviceVideoDecoder
from penstock.data.formats.video.frame_index import FrameIndex, translate_errors
from penstock.data.formats.video.frame_index_cache import read_frame_indexes
from penstock.data.optional import need
from penstock.data.rows import ConcatIndex
from penstock.data.schema import Errors, Field, Sample, Selection
from penstock.data.storage.storage import Storage

SUFFIXES = (".mp4", ".m4v", ".mkv", ".webm", ".mov", ".avi", ".mpg", ".mpeg")
"""Of the files that a folder is searched for."""

MAX_PIXELS = 8192 * 8192
"""The most that a frame may have."""

_FIELDS = ("video", "label", "start", "path")
_OPEN_FILES = 8


def open_files(
    paths: list[str],
    storage: Storage,
    fields: Selection,
    errors: Errors,
    *,
    frames: int = 16,
    stride: int = 1,
    step: int | None = None,
    size: Size | None = None,
    resize: Resize = "cover",
    labels: bool | None = None,
    media: MediaRows | None = None,
    max_pixels: int = MAX_PIXELS,
    max_record_nbytes: int = 1 << 30,
    index: str | None = None,
    device: str | int | torch.device = "cpu",
) -> Clips:
    """Open a folder of videos, several, or the videos themselves.

    Args:
        paths: folders, with class folders or without, or files.
        storage: gets what lies remotely.
        fields: of video, label, start and path; all but the path by default.
        errors: "skip" leaves out files that cannot be indexed, with a warning; "raise" does not.
        frames: the number of frames of a clip.
        stride: from one frame of a clip to its next; 1 takes each.
        step: frames from the beginning of a clip to that of the next; frames * stride where it is None, so that clips
            follow each other.
        size: of every frame: (height, width), or one number; None leaves each video its own.
        resize: "cover" (torchvision's Resize and CenterCrop) or "stretch", see `image_codec.decode`.
        labels: whether class folders make labels; None for where nothing else is likely: see class_folders.py.
        media: rows of a table that name the files, each a sample; see `penstock.open`.
        max_pixels: of one frame, as it lies in the file.
        max_record_nbytes: of one clip.
        index: a file (.npz) that keeps the index, created if it is missing: the next time only videos that are new
            or changed are read.
        device: "cuda" decodes on the GPU by torchcodec and resizes there: `video` is a tensor on it. In the training
            process only (num_workers=0); see docs/gpu.md.

    Raises:
        SourceError: there are no videos, or none is as long as a clip.
        RecordError: a file cannot be read.
        OptionError: a number is not positive, `index` is True, a clip has more than `max_record_nbytes`, or a device
            cannot be.
        ExtraError: torchcodec is missing, for "cuda".
    """
    step = frames * stride if step is None else step
    if frames < 1 or stride < 1 or step < 1:
        raise OptionError(f"frames={frames}, stride={stride} and step={step} have to be 1 or more")
    if isinstance(index, bool):
        raise OptionError(f"index={index} is not the path of a file, as in index='frames.npz'")
    wanted = sides(size, resize)
    if wanted is not None and frames * 3 * wanted[0] * wanted[1] > max_record_nbytes:
        raise OptionError(f"{frames} frames of {wanted} pixels are more than {max_record_nbytes} bytes")
    files = ClassFolders(paths, SUFFIXES, storage, labels, media)
    chosen = choose_fields(fields, _FIELDS, files, paths[0])
    indexes = read_frame_indexes(files.paths, storage, errors, max_pixels, index_path=index)
    span = (frames - 1) * stride + 1
    source = Clips(
        where=paths[0],
        files=files,
        chosen=chosen,
        clips=ConcatIndex(max(0, (len(one.names) - span) // step + 1) for one in indexes),
        indexes=indexes,
        offsets=np.arange(frames) * stride,
        step=step,
        size=wanted,
        resize=resize,
        storage=storage,
        max_pixels=max_pixels,
        max_record_nbytes=max_record_nbytes,
        device=decoding_device(device, "torchcodec.decoders"),
    )
    if not len(source):
        raise SourceError(f"none of the {len(files.paths)} videos of {paths[0]} has {span} frames, as a clip needs")
    return source


@dataclass(kw_only=True, eq=False, repr=False)
class Clips(FolderSource):
    """The clips of some videos. Made by `penstock.open`."""

    clips: ConcatIndex
    indexes: list[FrameIndex]
    offsets: np.ndarray
    """Of a clip's frames, from its first one."""
    step: int
    size: tuple[int, int] | None
    resize: Resize
    max_pixels: int
    device: torch.device | None
    _decoders: PerProcess[DecoderPool] = field(
        default_factory=lambda: PerProcess(partial(DecoderPool, _OPEN_FILES), DecoderPool.close), init=False
    )

    def _field(self, own: str) -> Field:
        shape = (len(self.offsets), 3, *(self.size or (None, None)))
        return Field("array", "uint8", shape) if own == "video" else Field("number", "float64")

    @property
    def decodes_on(self) -> torch.device | None:
        """The GPU that frames are decoded on, if they are."""
        return self.device if "video" in self.chosen.values() else None

    def read(self, index: int) -> Sample:
        """Return a clip with what was chosen of label, start and path."""
        number, clip = self.clips.locate(index)
        frames, path = self.indexes[number], self.files.paths[number]
        wanted = frames.names[clip * self.step + self.offsets].tolist()

        def value(own: str) -> Any:
            return self._video(path, frames, wanted, index) if own == "video" else wanted[0] / frames.units_per_s

        return self._sample(number, value)

    def close(self) -> None:
        """Close the files that this process has open."""
        self._decoders.close()

    def _video(self, path: str, frames: FrameIndex, wanted: list[int], index: int) -> np.ndarray | torch.Tensor:
        """Return the frames, (frames, 3, height, width)."""
        pool = self._decoders.get()
        if self.device is not None:
            return self._video_on(self.device, pool, path, frames, wanted, index)
        reformatter = need("av.video.reformatter", "video").VideoReformatter()
        clip = np.empty((0, 0, 0, 3), np.uint8)

        def put(number: int, frame: Any) -> None:
            nonlocal clip
            whole = (frame.height, frame.width)
            shape = (len(wanted), *(self.size or whole), 3)
            if not len(clip):
                if (nbytes := math.prod(shape)) > self.max_record_nbytes:
                    raise ValueError(
                        f"a clip of {nbytes} bytes; {self.max_record_nbytes} are the most (max_record_nbytes)"
                    )
                clip = np.empty(shape, np.uint8)
            if shape != clip.shape:
                raise ValueError(
                    f"a frame of the clip has {whole[0]} x {whole[1]} pixels, and its first has not; pass size="
                )
            pixels = reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
            clip[number] = resized(pixels, (0, 0, *whole), self.size, self.resize).transpose(1, 2, 0)

        with translate_errors(path, index):
            decoder = pool.take(path, wanted[0]) or SeekingDecoder(self.storage.local(path), frames, self.max_pixels)
            try:
                if not decoder.decode_frames(wanted, put):
                    raise RecordError(path, -1, index, "frames that the file lists cannot be decoded")
            except BaseException:
                decoder.close()
                raise
        pool.give(path, decoder)
        return clip.transpose(0, 3, 1, 2)

    def _video_on(
        self, device: torch.device, pool: DecoderPool, path: str, frames: FrameIndex, wanted: list[int], index: int
    ) -> torch.Tensor:
        begin_on(device)
        local = self.storage.local(path)
        try:
            decoder = pool.take(path, wanted[0]) or DeviceVideoDecoder(local, frames, device, self.max_record_nbytes)
            video = decoder.frames(wanted)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            raise RecordError(path, -1, index, f"it cannot be decoded on {device}: {error}") from error
        pool.give(path, decoder)
        return resized_on_device(video, self.size, self.resize)
