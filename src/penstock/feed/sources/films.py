"""The frames of many video files: read by some threads, and kept in a file so that the next time only new ones are.

The file is an .npz of NumPy's, without pickles. Of n videos with f frames and k keyframes in all:

    version         1
    stamps          int64 (n, 3): a hash of the path, the size in bytes, a hash of the version (see `Storage.stamps`)
    names, ends     int64 (f,) and (n + 1,): the names of all frames (film.py), and where each video's begin
    keys, key_ends  int64 (k,) and (n + 1,): likewise of keyframes
    seconds         float64 (n,)
    has_times       bool (n,)

It is written beside itself and renamed: ranks that write it at once do no harm.
"""

from __future__ import annotations

import hashlib
import os
import warnings
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from penstock.core.errors import SourceError
from penstock.feed.sources.extras import need
from penstock.feed.sources.film import Film, film_of
from penstock.feed.sources.sample import Errors
from penstock.feed.sources.storage import Storage

_VERSION = 1
_THREADS = 8
_NONE = Film(np.zeros(0, np.int64), np.zeros(0, np.int64), 1.0, True)

Stamp = tuple[int, int, int]


def indexed(
    paths: Sequence[str], storage: Storage, errors: Errors, max_pixels: int, kept_in: str | None = None
) -> list[Film]:
    """Return the frames of each file.

    Args:
        paths: of the files.
        storage: where they lie.
        errors: "skip" gives a file that cannot be read no frames, and warns.
        max_pixels: of one frame.
        kept_in: the file that keeps them; None keeps nothing.

    Raises:
        RecordError: a file is no video, or broken.
        SourceError: a file is not there, or `kept_in` is something else.
    """
    need("av", "video")
    known = {} if kept_in is None or not os.path.exists(kept_in) else _read(kept_in)
    stamps: list[Stamp | None] = [None] * len(paths)

    def index(number: int) -> Film | SourceError:
        try:
            if kept_in is not None:
                stamp = stamps[number] = _stamp(paths[number], storage)
                if stamp in known:
                    return known[stamp]
            return film_of(paths[number], storage.local(paths[number]), max_pixels)
        except SourceError as error:
            return error

    found: list[Film] = []
    kept: dict[Stamp, Film] = {}
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1, len(paths))) as threads:
        for number, film in enumerate(threads.map(index, range(len(paths)))):
            stamp = stamps[number]
            if isinstance(film, SourceError):
                if errors == "raise":
                    threads.shutdown(cancel_futures=True)
                    raise film
                warnings.warn(f"left out: {film}", stacklevel=4)
            elif stamp is not None:
                kept[stamp] = film
            found.append(_NONE if isinstance(film, SourceError) else film)
    if kept_in is not None and kept.keys() - known.keys():
        _write(kept_in, known | kept)
    return found


def _stamp(path: str, storage: Storage) -> Stamp:
    (known,) = storage.stamps([path])
    return _hash(os.fsencode(path)), known.nbytes, _hash(known.version.encode())


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big", signed=True)


def _write(path: str, films: dict[Stamp, Film]) -> None:
    new = f"{path}.{os.getpid()}.partial"
    all_films = list(films.values())
    try:
        with open(new, "wb") as file:
            np.savez(
                file,
                version=np.int64(_VERSION),
                stamps=np.array(list(films), np.int64),
                names=np.concatenate([film.names for film in all_films]),
                ends=np.cumsum([0, *(len(film.names) for film in all_films)]),
                keys=np.concatenate([film.keys for film in all_films]),
                key_ends=np.cumsum([0, *(len(film.keys) for film in all_films)]),
                seconds=np.array([film.second for film in all_films]),
                has_times=np.array([film.has_times for film in all_films]),
            )
        os.replace(new, path)
    except OSError as error:
        raise SourceError(f"the index {path} cannot be written: {error}") from error


def _read(path: str) -> dict[Stamp, Film]:
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as held:
            if held["version"] != _VERSION:
                return {}
            names, keys = (
                np.split(held[one], held[ends][1:-1]) for one, ends in (("names", "ends"), ("keys", "key_ends"))
            )
            films = [
                Film(*row)
                for row in zip(names, keys, held["seconds"].tolist(), held["has_times"].tolist(), strict=True)
            ]
            stamps: list[Stamp] = [(name, nbytes, time) for name, nbytes, time in held["stamps"].tolist()]
            return dict(zip(stamps, films, strict=True))
    except (OSError, ValueError, TypeError, LookupError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise SourceError(f"{path} is no index of videos; remove it, or name another file ({error})") from error
