"""Videos: clips of a few frames each, found by an index of every file's frames, decoded by ffmpeg (the package av).

    video       uint8 (frames, 3, height, width): red, green, blue, as ffmpeg's swscale makes them; resized as pictures
    label       the number of the class folder, as of pictures; not there without class folders
    start       the time of the first frame in seconds, as the file counts it
    path        the file's path, if it is asked for by name

    clip i of a file    frames i * step, i * step + stride, ... of those that decoding it from its beginning would give
    a file's index      the presentation time of every packet, and which packets are keyframes: read once, when the
                        source is opened, without decoding. Frames are known by their time, so that decoding may begin
                        at the keyframe before them. MP4, MOV, MKV, WebM, FLV and TS hold these times. Files that do not
                        (AVI, MPEG with frames out of order) are decoded once to be counted, and then for each clip from
                        their beginning: exact, and slow where they are long.

A file is decoded by one thread: loaders decode many at a time. Rotation that a file asks for is not applied. Files are
opened as one of some containers, and can name no other file or address.
"""

from __future__ import annotations

import copy
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, PenstockError, RecordError, SourceError
from penstock.feed.sources.base import PerProcess, Source
from penstock.feed.sources.class_folders import ClassFolders, Paths
from penstock.feed.sources.extras import need
from penstock.feed.sources.pictures import Resize, Size, resized, sides
from penstock.feed.sources.sample import Errors, Field, Sample, Schema, Selection
from penstock.feed.sources.storage import Storage

SUFFIXES = (".mp4", ".m4v", ".mkv", ".webm", ".mov", ".avi", ".mpg", ".mpeg")
"""Of the files that a folder is searched for."""

MAX_PIXELS = 8192 * 8192
"""The most that a frame may have."""

_FIELDS = ("video", "label", "start", "path")
_CONTAINERS = ("mov", "matroska", "webm", "avi", "mpegts", "mpeg", "flv", "asf", "ogg")
_WITH_TIMES = ("mov", "matroska", "webm", "mpegts", "flv")
_OPEN_FILES = 8
_INDEXING_THREADS = 8
_MAX_FRAMES = 1 << 26


def opened(
    paths: list[str],
    *,
    storage: Storage,
    fields: Selection,
    errors: Errors,
    frames: int = 16,
    stride: int = 1,
    step: int | None = None,
    size: Size | None = None,
    resize: Resize = "cover",
    labels: bool | None = None,
    max_pixels: int = MAX_PIXELS,
    max_record_nbytes: int = 1 << 30,
) -> Clips:
    """Open a folder of videos, several, or the videos themselves.

    Args:
        paths: folders, with class folders or without, or files.
        storage: gets what lies remotely.
        fields: of video, label, start, path; all but the path, unless said.
        errors: "skip" leaves out files that cannot be indexed, with a warning; "raise" does not.
        frames: of a clip.
        stride: from one frame of a clip to its next; 1 takes each.
        step: frames from the beginning of a clip to that of the next; frames * stride where it is None, so that clips
            follow each other.
        size: of every frame: (height, width), or one number; None leaves each video its own.
        resize: "cover" (torchvision's Resize and CenterCrop) or "stretch", see `pictures.decode`.
        labels: whether class folders make labels; None for where there are some.
        max_pixels: of one frame, as it lies in the file.
        max_record_nbytes: of one clip.

    Raises:
        SourceError: there are no videos, or none is as long as a clip.
        RecordError: a file cannot be read.
        OptionError: a number that cannot be.
    """
    step = frames * stride if step is None else step
    if frames < 1 or stride < 1 or step < 1:
        raise OptionError(f"frames={frames}, stride={stride} and step={step} have to be 1 or more")
    if resize not in ("cover", "stretch"):
        raise OptionError(f"resize={resize!r} is neither 'cover' nor 'stretch'")
    wanted = None if size is None else sides(size)
    if wanted is not None and frames * 3 * wanted[0] * wanted[1] > max_record_nbytes:
        raise OptionError(f"{frames} frames of {wanted} pixels are more than {max_record_nbytes} bytes")
    files = ClassFolders(paths, SUFFIXES, storage, labels)
    known = _FIELDS if files.labels is not None else tuple(name for name in _FIELDS if name != "label")
    chosen = {name: name for name in known if name != "path"}
    if fields.chosen is not None:
        chosen = fields.names(known, paths[0])
    index = _indexed(files.paths, storage, errors, max_pixels)
    span = (frames - 1) * stride + 1
    source = Clips(
        paths[0],
        files,
        index,
        chosen,
        np.arange(frames) * stride,
        step,
        size=wanted,
        resize=resize,
        storage=storage,
        limits=(max_pixels, max_record_nbytes),
    )
    if not len(source):
        raise SourceError(f"none of the {len(files.paths)} videos of {paths[0]} has {span} frames, as a clip needs")
    return source


# ── which frames there are ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Film:
    """The frames of one file."""

    names: np.ndarray
    """What each is known by, in order, int64: its time in units of `second`; its number where times are not told."""

    keys: np.ndarray
    """The names of the keyframes."""

    second: float
    """How many units a second has."""

    has_times: bool


def _indexed(paths: Sequence[str], storage: Storage, errors: Errors, max_pixels: int) -> list[_Film]:
    need("av", "video")

    def index(number: int) -> _Film | RecordError:
        try:
            return _film(paths[number], storage.local(paths[number]), max_pixels)
        except RecordError as error:
            return error

    found: list[_Film] = []
    with ThreadPoolExecutor(min(_INDEXING_THREADS, os.cpu_count() or 1, len(paths))) as threads:
        for film in threads.map(index, range(len(paths))):
            if isinstance(film, RecordError):
                if errors == "raise":
                    threads.shutdown(cancel_futures=True)
                    raise film
                warnings.warn(f"left out: {film}", stacklevel=4)
                film = _Film(np.zeros(0, np.int64), np.zeros(0, np.int64), 1.0, True)
            found.append(film)
    return found


def _film(path: str, local: str, max_pixels: int) -> _Film:
    with _broken(path, "index"):
        container = _open(local, max_pixels)
        try:
            stream = container.streams.video[0]
            has_times = container.format.name.split(",")[0] in _WITH_TIMES or not stream.codec_context.has_b_frames
            if has_times:
                film = _by_packets(container, stream)
                if film is not None:
                    return film
                container.close()
                container = _open(local, max_pixels)
                stream = container.streams.video[0]
            count = sum(1 for _ in container.decode(stream))
            rate = float(stream.average_rate or 1)
            return _Film(np.arange(count, dtype=np.int64), np.zeros(min(count, 1), np.int64), rate, False)
        finally:
            container.close()


def _by_packets(container: Any, stream: Any) -> _Film | None:
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
    return _Film(ordered, np.unique(np.asarray(keys, np.int64)), float(1 / stream.time_base), True)


# ── clips ───────────────────────────────────────────────────────────────────────────────────────────────────


class Clips(Source):
    """The clips of some videos. Made by `penstock.open`."""

    def __init__(
        self,
        where: str,
        files: ClassFolders,
        films: list[_Film],
        chosen: dict[str, str],
        offsets: np.ndarray,
        step: int,
        *,
        size: tuple[int, int] | None,
        resize: Resize,
        storage: Storage,
        limits: tuple[int, int],
    ) -> None:
        self.where = where
        self._paths: Paths = files.paths
        self._labels = files.labels
        self._classes = files.classes
        self._films = films
        self._chosen = chosen
        self._offsets = offsets
        self._step = step
        self._size = size
        self._resize: Resize = resize
        self._storage = storage
        self._max_pixels, self._max_record_nbytes = limits
        counts = [max(0, (len(film.names) - int(offsets[-1]) - 1) // step + 1) for film in films]
        self._ends = np.cumsum([0, *counts])
        self._players: PerProcess[_Players] = PerProcess(partial(_Players, _OPEN_FILES), _Players.close)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by label; empty without labels."""
        return self._classes

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The label of each class."""
        return {name: number for number, name in enumerate(self._classes)}

    @property
    def schema(self) -> Schema:
        """What samples hold; without `size` frames differ in theirs from file to file."""
        height, width = self._size or (None, None)
        all_fields = {
            "video": Field("array", "uint8", (len(self._offsets), 3, height, width)),
            "label": Field("number", "int64"),
            "start": Field("number", "float64"),
            "path": Field("text"),
        }
        return {name: all_fields[own] for name, own in self._chosen.items()}

    def narrow(self, fields: Sequence[str]) -> Clips:
        """Return the same clips with these fields only; without video nothing is decoded."""
        other = copy.copy(self)
        kept = Selection.of(list(fields)).names(self._chosen, self.where)
        other._chosen = {name: self._chosen[name] for name in kept}
        return other

    def read(self, index: int) -> Sample:
        """Return a clip with what was chosen of label, start and path.

        Raises:
            RecordError: a frame of it cannot be decoded.
        """
        number = int(np.searchsorted(self._ends, index, side="right")) - 1
        film, path = self._films[number], self._paths[number]
        wanted = film.names[(index - int(self._ends[number])) * self._step + self._offsets]
        sample: Sample = {}
        for name, own in self._chosen.items():
            if own == "video":
                sample[name] = self._video(path, film, wanted.tolist(), index)
            elif own == "label" and self._labels is not None:
                sample[name] = int(self._labels[number])
            else:
                sample[name] = path if own == "path" else float(wanted[0]) / film.second
        return sample

    def close(self) -> None:
        """Close the files that this process has open."""
        self._players.close()

    def _video(self, path: str, film: _Film, wanted: list[int], index: int) -> np.ndarray:
        players = self._players.get()
        with _broken(path, index):
            player = players.take(path, wanted[0]) or _Player(self._storage.local(path), film, self._max_pixels)
            try:
                canvas = _Canvas(len(wanted), self._size, self._resize, self._max_record_nbytes)
                if not player.play(wanted, canvas.put):
                    raise RecordError(path, -1, index, "frames that the file tells of cannot be decoded")
            except BaseException:
                player.close()
                raise
        players.give(path, player)
        return canvas.video()


class _Canvas:
    """Takes frames, and makes one array of them."""

    def __init__(self, frames: int, size: tuple[int, int] | None, resize: Resize, max_nbytes: int) -> None:
        self._frames = frames
        self._size = size
        self._resize: Resize = resize
        self._max_nbytes = max_nbytes
        self._reformatter = need("av.video.reformatter", "video").VideoReformatter()
        self._whole: tuple[int, int] = (0, 0)
        self._made: np.ndarray | None = None

    def put(self, number: int, frame: Any) -> None:
        """Draw a frame in its place."""
        whole = (frame.height, frame.width)
        if self._made is None:
            self._whole = whole
            shape = (self._frames, *(self._size or whole), 3)
            if np.prod(shape, dtype=np.int64) > self._max_nbytes:
                raise ValueError(f"a clip of {shape} bytes; {self._max_nbytes} are the most (max_record_nbytes)")
            self._made = np.empty(shape, np.uint8)
        if self._size is None and whole != self._whole:
            raise ValueError(f"a frame has {whole} pixels, and the clip's first {self._whole}; say size=")
        pixels = self._reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
        self._made[number] = resized(pixels, (0, 0, *whole), self._size, self._resize).transpose(1, 2, 0)

    def video(self) -> np.ndarray:
        """Return the frames, (frames, 3, height, width)."""
        if self._made is None:
            raise ValueError("a clip without frames")
        return self._made.transpose(0, 3, 1, 2)


# ── decoding ────────────────────────────────────────────────────────────────────────────────────────────────


class _Player:
    """Decodes one file, here and there. Used by one thread at a time."""

    def __init__(self, path: str, film: _Film, max_pixels: int) -> None:
        self._path = path
        self._film = film
        self._max_pixels = max_pixels
        self._can_seek = film.has_times
        self._last: int | None = None
        self._container: Any = None
        self._decoding: Iterator[tuple[int, Any]] = iter(())
        self._begin()

    def play(self, wanted: list[int], put: Callable[[int, Any], None]) -> bool:
        """Give `put` the frames with these names, numbered; return whether all came.

        A file's own index may lead to a later keyframe than was asked for, or to none: the one before is tried then,
        and after that the file from its beginning.
        """
        keys = self._film.keys
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
        """Return how close this is before a frame, the more the closer; least where it is behind it."""
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
        self._container = _open(self._path, self._max_pixels)
        self._last = None
        self._decoding = self._frames(sought=False)

    def _seek(self, name: int) -> None:
        self._last = None
        self._container.seek(name, stream=self._container.streams.video[0], backward=True)
        self._decoding = self._frames(sought=True)

    def _frames(self, *, sought: bool) -> Iterator[tuple[int, Any]]:
        stream = self._container.streams.video[0]
        if not self._film.has_times:
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


class _Players:
    """Open files: the ones used last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._idle: list[tuple[str, _Player]] = []

    def take(self, path: str, first: int) -> _Player | None:
        """Return a player of this file that nobody uses, the one closest before a frame; None if there is none."""
        with self._lock:
            own = [number for number, (other, _) in enumerate(self._idle) if other == path]
            if not own:
                return None
            best = max(own, key=lambda number: self._idle[number][1].closeness(first))
            return self._idle.pop(best)[1]

    def give(self, path: str, player: _Player) -> None:
        """Keep a player for the next clip."""
        with self._lock:
            self._idle.append((path, player))
            oldest = self._idle.pop(0)[1] if len(self._idle) > self._most else None
        if oldest is not None:
            oldest.close()

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            players, self._idle = self._idle, []
        for _, player in players:
            player.close()


def _open(path: str, max_pixels: int) -> Any:
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
def _broken(path: str, key: object) -> Iterator[None]:
    """Make a RecordError of what ffmpeg raises."""
    try:
        yield
    except PenstockError:
        raise
    except (need("av", "video").FFmpegError, OSError, ValueError, LookupError, ArithmeticError, MemoryError) as error:
        raise RecordError(path, -1, key, f"it cannot be decoded: {error}") from error
