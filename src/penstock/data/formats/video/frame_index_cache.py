"""The frame indexes of many videos: read by some threads, and kept in a file so that later only new ones are read.

The file is an .npz of NumPy's, without pickles. Of n videos with f frames and k keyframes in all:

    version         2
    stamps          text (n,): a hash of the path, size and version (see `Storage.file_versions`) of each
    names, ends     int64 (f,) and (n + 1,): the names of all frames (frame_index.py), and where each video's begin
    keys, key_ends  int64 (k,) and (n + 1,): likewise of keyframes
    seconds         float64 (n,)
    has_times       bool (n,)

It is written beside itself and renamed: ranks that write it at the same time do no harm.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Sequence

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats.folder_source import read_each
from penstock.data.formats.video.frame_index import FrameIndex, read_frame_index
from penstock.data.optional import need
from penstock.data.schema import Errors
from penstock.data.storage.storage import Storage

_VERSION = 2
_NONE = FrameIndex(np.zeros(0, np.int64), np.zeros(0, np.int64), 1.0, True)


def read_frame_indexes(
    paths: Sequence[str], storage: Storage, errors: Errors, max_pixels: int, index_path: str | None = None
) -> list[FrameIndex]:
    """Return the frames of each file.

    Args:
        paths: of the files.
        storage: where they lie.
        errors: "skip" gives a file that cannot be read no frames, and warns.
        max_pixels: of one frame.
        index_path: the file that keeps them; None keeps none.

    Raises:
        RecordError: a file is no video, or broken.
        SourceError: a file is not there, or `index_path` is something else.
    """
    need("av", "video")
    known = {} if index_path is None or not os.path.exists(index_path) else _read(index_path)
    kept: dict[str, FrameIndex] = {}

    def read(path: str, _: int) -> FrameIndex:
        if index_path is None:
            return read_frame_index(path, storage.local(path), max_pixels)
        stamp = _stamp(path, storage)
        kept[stamp] = known.get(stamp) or read_frame_index(path, storage.local(path), max_pixels)
        return kept[stamp]

    found = read_each(read, paths, _NONE, errors)
    if index_path is not None and kept.keys() - known.keys():
        _write(index_path, known | kept)
    return found


def _stamp(path: str, storage: Storage) -> str:
    (known,) = storage.file_versions([path])
    return hashlib.sha256(repr((path, known.nbytes, known.version)).encode()).hexdigest()


def _write(path: str, indexes: dict[str, FrameIndex]) -> None:
    new = f"{path}.{os.urandom(8).hex()}.partial"
    values = list(indexes.values())
    try:
        with open(new, "xb") as file:  # follows no link that another user has put there
            np.savez(
                file,
                version=np.int64(_VERSION),
                stamps=np.array(list(indexes)),
                names=np.concatenate([index.names for index in values]),
                ends=np.cumsum([0, *(len(index.names) for index in values)]),
                keys=np.concatenate([index.keys for index in values]),
                key_ends=np.cumsum([0, *(len(index.keys) for index in values)]),
                seconds=np.array([index.units_per_s for index in values]),
                has_times=np.array([index.has_times for index in values]),
            )
        os.replace(new, path)
    except OSError as error:
        raise SourceError(f"the index {path} cannot be written: {error}") from error


def _read(path: str) -> dict[str, FrameIndex]:
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as held:
            if held["version"] != _VERSION:
                return {}
            names, keys = (
                np.split(held[one], held[ends][1:-1]) for one, ends in (("names", "ends"), ("keys", "key_ends"))
            )
            indexes = [
                FrameIndex(*row)
                for row in zip(names, keys, held["seconds"].tolist(), held["has_times"].tolist(), strict=True)
            ]
            return dict(zip(held["stamps"].tolist(), indexes, strict=True))
    except (OSError, ValueError, TypeError, LookupError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise SourceError(f"{path} is no index of videos; remove it, or name another file ({error})") from error
