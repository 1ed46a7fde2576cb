"""Decodes frames anywhere in a video file: from the keyframe before them, or from the current position."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from penstock.data.formats.video.frame_index import FrameIndex, open_container


class SeekingDecoder:
    """Decodes one file. Used by one thread at a time."""

    def __init__(self, path: str, index: FrameIndex, max_pixels: int) -> None:
        self._path = path
        self._index = index
        self._max_pixels = max_pixels
        self._can_seek = index.has_times
        self._last: int | None = None
        self._container: Any = None
        self._decoding: Iterator[tuple[int, Any]] = iter(())
        self._begin()

    def decode_frames(self, wanted: list[int], put: Callable[[int, Any], None]) -> bool:
        """Call `put` with the number in `wanted` and the frame of each; return whether all frames were found.

        The container's own index may seek to a later keyframe than asked for, or to none. Then the keyframe before is
        tried, and last the file from its beginning.
        """
        keys = self._index.keys
        before = int(np.searchsorted(keys, wanted[0], side="right")) - 1
        is_ahead = self._last is not None and self._last < wanted[0]
        if is_ahead and (not self._can_seek or keys[before] <= self._last) and self._found(wanted, put):
            return True
        for key in keys[max(1, before - 1) : before + 1][::-1]:
            if self._can_seek:
                self._seek(int(key))
                if self._found(wanted, put):
                    return True
        self._begin()
        return self._found(wanted, put)

    def closeness(self, first: int) -> float:
        """Return how close the position is before a frame: 0 is closest, -inf is behind it."""
        return self._last - first if self._last is not None and self._last < first else -float("inf")

    def close(self) -> None:
        """Close the file."""
        self._decoding = iter(())
        if self._container is not None:
            self._container.close()
            self._container = None

    def _found(self, wanted: list[int], put: Callable[[int, Any], None]) -> bool:
        number = 0
        for name, frame in self._decoding:
            self._last = name
            if name > wanted[number]:
                return False
            if name == wanted[number]:
                put(number, frame)
                number += 1
                if number == len(wanted):
                    return True
        self._last = None
        return False

    def _begin(self) -> None:
        self.close()
        self._container = open_container(self._path, self._max_pixels)
        self._last = None
        self._decoding = self._frames(sought=False)

    def _seek(self, name: int) -> None:
        self._last = None
        self._container.seek(name, stream=self._container.streams.video[0], backward=True)
        self._decoding = self._frames(sought=True)

    def _frames(self, *, sought: bool) -> Iterator[tuple[int, Any]]:
        stream = self._container.streams.video[0]
        if not self._index.has_times:
            yield from enumerate(self._container.decode(stream))
            return
        floor: int | None = None
        is_first = sought
        for packet in self._container.demux(stream):
            if floor is None:
                if not packet.is_keyframe:
                    continue
                floor = packet.pts
            for frame in packet.decode():
                if frame.pts is None or frame.pts < floor:  # those before it may lean on frames that were not read
                    continue
                if is_first and frame.pts > floor:  # no keyframe: each frame refreshes a part of the picture, and
                    self._can_seek = False  # ffmpeg gives none until it takes the picture to be whole, too early
                    return
                is_first = False
                yield frame.pts, frame


class DecoderPool:
    """Open decoders that nobody uses: at most `most`, the ones used last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._idle: list[tuple[str, Any]] = []

    def take(self, path: str, first: int) -> Any:
        """Take the decoder of this file that is closest before frame `first`; None if there is none."""
        with self._lock:
            own = [number for number, (other, _) in enumerate(self._idle) if other == path]
            if not own:
                return None
            best = max(own, key=lambda number: self._idle[number][1].closeness(first))
            return self._idle.pop(best)[1]

    def give(self, path: str, decoder: Any) -> None:
        """Put a decoder back for the next clip."""
        with self._lock:
            self._idle.append((path, decoder))
            oldest = self._idle.pop(0)[1] if len(self._idle) > self._most else None
        if oldest is not None:
            oldest.close()

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            decoders, self._idle = self._idle, []
        for _, decoder in decoders:
            decoder.close()
