"""The frames of a video file and its keyframes, read from its packets without decoding them.

    times      MP4, MOV, MKV, WebM, FLV and TS store when each frame is shown. A frame's name is that time, in the units
               of its file; likewise of keyframes
    numbers    AVI and MPEG program streams store no times, or wrong ones where frames are out of order. All frames are
               decoded once to count them, and a frame's name is its number; decoding begins at the first one only

Frames that an edit list cuts out, and frames before the first keyframe, do not count. Only some containers are opened:
a playlist is refused, as ffmpeg would open the files that it names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.errors import PenstockError, RecordError
from penstock.data.formats.video.mp4_counts import FIRST_BOXES, check_counts
from penstock.data.optional import need

_CONTAINERS = ("matroska", "webm", "avi", "mpegts", "mpeg", "flv", "asf", "ogg")
_WITH_TIMES = ("mov", "matroska", "webm", "mpegts", "flv")
_MAX_FRAMES = 1 << 26


@dataclass(frozen=True, slots=True)
class FrameIndex:
    """The frames of one file. Can be pickled."""

    names: np.ndarray
    """int64, ascending: the time of each in units, or its number without times."""

    keys: np.ndarray
    """The names of the keyframes."""

    units_per_s: float

    has_times: bool


def read_frame_index(path: str, local: str, max_pixels: int) -> FrameIndex:
    """Return the frames of a file that lies at `local`; errors call it `path`.

    Raises:
        RecordError: it is no video, or broken.
    """
    with translate_errors(path, "index"):
        container = open_container(local, max_pixels)
        try:
            stream = container.streams.video[0]
            has_times = container.format.name.split(",")[0] in _WITH_TIMES or not stream.codec_context.has_b_frames
            if has_times:
                index = _index_by_packets(container, stream)
                if index is not None:
                    return index
                container.close()
                container = open_container(local, max_pixels)
                stream = container.streams.video[0]
            count = sum(1 for _ in container.decode(stream))
            rate = float(stream.average_rate or 1)
            return FrameIndex(np.arange(count, dtype=np.int64), np.zeros(min(count, 1), np.int64), rate, False)
        finally:
            container.close()


def _index_by_packets(container: Any, stream: Any) -> FrameIndex | None:
    """Return the index from packets; None if a packet has no time, or two frames have the same one."""
    names: list[int] = []
    keys: list[int] = []
    for packet in container.demux(stream):
        if not packet.size:
            continue
        if packet.pts is None or len(names) >= _MAX_FRAMES:
            return None
        if packet.is_keyframe and not (keys and packet.is_discard):
            keys.append(packet.pts)
        if keys and packet.pts >= keys[0] and not packet.is_discard:  # before the first keyframe none can be decoded,
            names.append(packet.pts)  # and an edit list cuts out what it discards
    ordered = np.unique(np.asarray(names, np.int64))
    if len(ordered) != len(names):
        return None
    return FrameIndex(ordered, np.unique(np.asarray(keys, np.int64)), float(1 / stream.time_base), True)


def open_container(path: str, max_pixels: int) -> Any:
    """Open a file with a video; to be called inside `translate_errors`."""
    av = need("av", "video")
    with open(path, "rb") as file:
        is_mp4 = file.read(8)[4:] in FIRST_BOXES
    if is_mp4:
        check_counts(path)
    options = {
        "format_whitelist": "mov" if is_mp4 else ",".join(_CONTAINERS),  # a playlist would open what it names
        "max_pixels": str(max_pixels),  # of what is decoded to find out what streams hold
    }
    container = av.open(f"file:{os.path.abspath(path)}", options=options, metadata_errors="replace")
    try:
        if not container.streams.video:
            raise ValueError("it has no video")
        context = container.streams.video[0].codec_context
        if context is None:
            raise ValueError("this ffmpeg has no decoder for it")
        if context.width * context.height > max_pixels:
            raise ValueError(
                f"frames of {context.width} x {context.height} pixels; {max_pixels} are the most (max_pixels)"
            )
        context.options = {"max_pixels": str(max_pixels)}
        context.thread_count = 1
    except BaseException:
        container.close()
        raise
    return container


@contextmanager
def translate_errors(path: str, key: object) -> Iterator[None]:
    """Raise RecordError for whatever ffmpeg raises inside, about sample or step `key`."""
    try:
        yield
    except PenstockError:
        raise
    except (need("av", "video").FFmpegError, OSError, ValueError, LookupError, ArithmeticError, MemoryError) as error:
        raise RecordError(path, -1, key, f"it cannot be decoded: {error}") from error
