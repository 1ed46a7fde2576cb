"""Audio files, whole or as clips of one length, decoded by libsndfile (the package soundfile).

    audio       float32 (channels, frames), from -1 to 1, as torchaudio has it; float64 by `dtype=`
    rate        frames in a second, int
    label       the number of the class folder, as of images; absent without class folders
    start       of a clip: the time of its first frame in seconds
    path        the file's path, if it is asked for by name

    clip i of a file    frames i * step to i * step + frames; what is left at the end, and shorter files, are left out.
                        Those of an MP3 are decoded from its beginning

All files need one rate, as a batch of several would mix lengths of time: `rate=` says which (or "any"), and is that of
the first file by default. Nothing is resampled. A file that ends before the frames that its header states is broken.

A file whose header states no length is refused: of an MP3 file libsndfile guesses it from the bit rate of the first
frame, and reads no further.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from penstock.core.errors import OptionError, PenstockError, RecordError, SourceError
from penstock.data.formats.class_folders import ClassFolders
from penstock.data.formats.folder_source import FolderSource, choose_fields, read_each
from penstock.data.formats.media_rows import MediaRows
from penstock.data.optional import need
from penstock.data.rows import ConcatIndex
from penstock.data.schema import Errors, Field, Sample, Selection
from penstock.data.storage.storage import Storage

SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".aiff", ".aif", ".au", ".caf", ".w64", ".rf64")
"""Of the files that a folder is searched for."""

_DTYPES = ("float32", "float64")
_STATED = re.compile(r"data\s*:\s*(\d+)\s*\(should be (\d+)\)")
"""What libsndfile notes of a WAV file with fewer bytes than its header states."""
_UNFINISHED = re.compile(r"RIFF : 0$", re.MULTILINE)
"""What it notes of a WAV file whose header was never completed, as of a recording that was broken off."""
_UNKNOWN_NBYTES = 0x7FFF0000
"""Of a header that was written before its length was known, as by a pipe: this and more."""
_UNKNOWN_FRAMES = 1 << 62
"""What libsndfile says where no header states a length: this and more."""
_MP3_LENGTH = re.compile(rb"VBRI|(?:Xing|Info)...[\x01\x03\x05\x07\x09\x0b\x0d\x0f]", re.DOTALL)
"""What the first frame of an MP3 file has that states how many follow: of the last four bits the first says so."""
_FIRST_NBYTES = 4096


def open_files(
    paths: list[str],
    storage: Storage,
    fields: Selection,
    errors: Errors,
    *,
    frames: int | None = None,
    step: int | None = None,
    rate: int | Literal["any"] | None = None,
    dtype: Literal["float32", "float64"] = "float32",
    labels: bool | None = None,
    media: MediaRows | None = None,
    max_record_nbytes: int = 1 << 30,
) -> AudioFiles:
    """Open a folder of audio files, several, or the files themselves.

    Args:
        paths: folders, with class folders or without, or files.
        storage: gets what lies remotely.
        fields: of audio, rate, label, start and path; all but the path by default.
        errors: "skip" leaves out files whose header cannot be read, with a warning, where there are clips.
        frames: of a clip; None makes a sample of each whole file. With it, the headers of all files are read now.
        step: frames from the beginning of a clip to that of the next; `frames` where it is None.
        rate: what all files have to have, in frames a second; "any" takes each as it is.
        dtype: of the audio: float64 loses nothing of files of 32 bits or doubles.
        labels: whether class folders make labels; None for where nothing else is likely: see class_folders.py.
        media: rows of a table that name the files, each a sample; see `penstock.open`.
        max_record_nbytes: of one sample.

    Raises:
        SourceError: there are no files, or none is as long as a clip; or they differ in their rate.
        RecordError: a header cannot be read.
        OptionError: a number is not positive, or `dtype` is none of the two.
    """
    for name, number in (("frames", frames), ("step", step), ("rate", rate)):
        if number is not None and number != "any" and number < 1:
            raise OptionError(f"{name}={number} has to be 1 or more")
    if dtype not in _DTYPES or (step is not None and frames is None):
        raise OptionError(f"dtype={dtype!r} is one of {', '.join(_DTYPES)}, and step={step} is for clips: frames=")
    files = ClassFolders(paths, SUFFIXES, storage, labels, media)
    there = ("audio", "rate", "label", *(("start",) if frames else ()), "path")
    chosen = choose_fields(fields, there, files, paths[0])
    made = partial(
        AudioFiles,
        where=paths[0],
        files=files,
        chosen=chosen,
        storage=storage,
        dtype=dtype,
        max_record_nbytes=max_record_nbytes,
    )
    if frames is None:
        return made(rate=rate or _rate(storage, files.paths[0]))
    headers = read_each(lambda path, number: _header(storage, path, number), files.paths, (0, 0), errors)
    step = step or frames
    every: int | str = rate or next((own for _, own in headers if own), 0)
    for path, (_, own) in zip(files.paths, headers, strict=True):
        if every != "any" and own not in (0, every):
            raise SourceError(_other_rate(path, own, every))
    clips = ConcatIndex(max(0, (count - frames) // step + 1) for count, _ in headers)
    if not len(clips):
        raise SourceError(f"none of the {len(files.paths)} files of {paths[0]} has {frames} frames, as a clip needs")
    return made(rate=every, clips=clips, frames=frames, step=step)


def _other_rate(path: str, own: int, rate: int | str) -> str:
    return (
        f"{path} has {own} frames a second, and {rate} are wanted (those of the first file, or rate=): resample it, "
        'leave it out, or take each file as it is with rate="any"'
    )


@contextmanager
def _opened(storage: Storage, path: str, key: int) -> Iterator[Any]:
    """Open a file; what goes wrong inside is a RecordError, and so is one with less audio than it states."""
    soundfile = need("soundfile", "audio")
    try:
        with soundfile.SoundFile(storage.local(path)) as file:
            stated = _STATED.search(file.extra_info)
            if stated and int(stated[2]) < int(stated[1]) < _UNKNOWN_NBYTES:
                raise RecordError(path, -1, key, f"it states {stated[1]} bytes of audio, and has {stated[2]}")
            if not file.frames and _UNFINISHED.search(file.extra_info):
                reason = (
                    "its header states no length, as of a recording that was broken off; `ffmpeg -i this.wav new.wav`"
                )
                raise RecordError(path, -1, key, f"{reason} writes it anew, with its length")
            yield file
    except PenstockError:
        raise
    except (soundfile.SoundFileError, OSError, ValueError, TypeError, MemoryError) as error:
        raise RecordError(path, -1, key, f"it cannot be decoded: {error}") from error


def _header(storage: Storage, path: str, key: int) -> tuple[int, int]:
    """Return a file's frames and its rate."""
    with _opened(storage, path, key) as file:
        return _length(file, path, key), int(file.samplerate)


def _rate(storage: Storage, path: str) -> int:
    """Return the rate of the first file."""
    with _opened(storage, path, 0) as file:
        return int(file.samplerate)


def _length(file: Any, path: str, key: int) -> int:
    """Return the frames that an open file's header states.

    Raises:
        RecordError: it states none, so that nobody knows where they end.
    """
    ending = {"MP3": "mp3", "MPEG": "mp3"}.get(file.format, "flac")
    if file.frames < _UNKNOWN_FRAMES and (file.subtype != "MPEG_LAYER_III" or _states_length(file.name)):
        return int(file.frames)
    reason = "its header does not state its length, as of what is written to a pipe, or of what is broken"
    copied = " -c copy" if ending == "mp3" else ""
    words = f"`ffmpeg -i this.{ending}{copied} new.{ending}` writes it anew, with its length"
    raise RecordError(path, -1, key, f"{reason}; {words}")


def _states_length(path: str) -> bool:
    """Return whether the first frame of an MP3 file, after an ID3v2 tag, states how many follow."""
    with open(path, "rb") as file:
        head = file.read(10)
        tag = sum((byte & 0x7F) << 7 * at for at, byte in enumerate(reversed(head[6:])))
        file.seek(10 + tag if head.startswith(b"ID3") else 0)
        return bool(_MP3_LENGTH.search(file.read(_FIRST_NBYTES)))


@dataclass(kw_only=True, eq=False, repr=False)
class AudioFiles(FolderSource):
    """Audio files, or clips of them. Made by `penstock.open`."""

    dtype: str
    rate: int | str
    """What each file has to have, or "any"."""
    frames: int | None = None
    """Of a clip; None for whole files."""
    step: int = 0

    def _field(self, own: str) -> Field:
        if own == "audio":
            return Field("array", self.dtype, (None, self.frames))
        return Field("number", "int64" if own == "rate" else "float64")

    def read(self, index: int) -> Sample:
        """Return a file or a clip, with what was chosen of rate, label, start and path."""
        number, clip = (index, 0) if self.clips is None else self.clips.locate(index)
        start, path = clip * self.step, self.files.paths[number]
        values: dict[str, Any] = {}
        if not {"audio", "rate", "start"}.isdisjoint(self.chosen.values()):
            count = self.frames if "audio" in self.chosen.values() else 0
            values["audio"], values["rate"] = self._decoded(path, index, start, count)
            values["start"] = start / values["rate"]
        return self._sample(number, values.__getitem__)

    def _decoded(self, path: str, key: int, start: int, count: int | None) -> tuple[np.ndarray, int]:
        """Return frames from `start` on, all or `count` of them, as (channels, frames), and their rate."""
        with _opened(self.storage, path, key) as file:
            if self.rate not in ("any", file.samplerate):
                raise RecordError(path, -1, key, _other_rate("it", file.samplerate, self.rate))
            wanted = _length(file, path, key) - start if count is None else count
            # libsndfile 1.2.2 gives silence where it goes on in an MP3, or has sought: one read from the start is right
            before = start if file.subtype.startswith("MPEG") or not file.seekable() else 0
            nbytes = (before + wanted) * file.channels * np.dtype(self.dtype).itemsize
            if not 0 <= nbytes <= self.max_record_nbytes:
                raise RecordError(
                    path, -1, key, f"{nbytes} bytes of audio; max_record_nbytes is {self.max_record_nbytes}"
                )
            if start > before:
                file.seek(start)
            found = file.read(before + wanted, dtype=self.dtype, always_2d=True)[before:]
            if len(found) < wanted:
                raise RecordError(path, -1, key, f"it states {wanted} frames from {start} on, and has {len(found)}")
            return np.ascontiguousarray(found.T), int(file.samplerate)
