"""The frames of a video file: which there are, and where decoding may begin, told by its packets without decoding them.

    times      MP4, MOV, MKV, WebM, FLV and TS say when each frame is shown. A frame is known by that time, in the units
               of its file, and keyframes by theirs.
    numbers    AVI, and MPEG program streams, say it of no frame, or wrongly, where frames come out of order. These are
               counted by decoding all of them once, and known by their number; only the first is a beginning.

No frame is what an edit list cuts out, and what comes before the first keyframe. Files are opened as one of some
containers: one that is a playlist, and would open what it names, is none of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.errors import PenstockError, RecordError
from penstock.feed.sources.extras import need

_CONTAINERS = ("mov", "matroska", "webm", "avi", "mpegts", "mpeg", "flv", "asf", "ogg")
_WITH_TIMES = ("mov", "matroska", "webm", "mpegts", "flv")
_MAX_FRAMES = 1 << 26


@dataclass(frozen=True, slots=True)
class Film:
    """The frames of one file. Can be pickled."""

    names: np.ndarray
    """What each is known by, in order, int64: its time in units of `second`; its number where times are not told."""

    keys: np.ndarray
    """The names of the keyframes."""

    second: float
    """How many units a second has."""

    has_times: bool


def film_of(path: str, local: str, max_pixels: int) -> Film:
    """Return the frames of a file.

    Args:
        path: what errors call it.
        local: where it lies.
        max_pixels: of one frame.

    Raises:
        RecordError: it is no video, or broken.
    """
    with broken(path, "index"):
        container = container_of(local, max_pixels)
        try:
            stream = container.streams.video[0]
            has_times = container.format.name.split(",")[0] in _WITH_TIMES or not stream.codec_context.has_b_frames
            if has_times:
                film = _by_packets(container, stream)
                if film is not None:
                    return film
                container.close()
                container = container_of(local, max_pixels)
                stream = container.streams.video[0]
            count = sum(1 for _ in container.decode(stream))
            rate = float(stream.average_rate or 1)
            return Film(np.arange(count, dtype=np.int64), np.zeros(min(count, 1), np.int64), rate, False)
        finally:
            container.close()


def _by_packets(container: Any, stream: Any) -> Film | None:
    """Return the frames that packets tell of; None where they do not tell all, or one twice."""
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
    return Film(ordered, np.unique(np.asarray(keys, np.int64)), float(1 / stream.time_base), True)


def container_of(path: str, max_pixels: int) -> Any:
    """Open a file with a video. What ffmpeg raises then, and when it is read, `broken` knows."""
    av = need("av", "video")
    options = {
        "format_whitelist": ",".join(_CONTAINERS),  # a playlist would open what it names
        "protocol_whitelist": "file",
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
def broken(path: str, key: object) -> Iterator[None]:
    """Make a RecordError of what ffmpeg raises inside."""
    try:
        yield
    except PenstockError:
        raise
    except (need("av", "video").FFmpegError, OSError, ValueError, LookupError, ArithmeticError, MemoryError) as error:
        raise RecordError(path, -1, key, f"it cannot be decoded: {error}") from error
