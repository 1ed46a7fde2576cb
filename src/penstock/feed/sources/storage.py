"""Where bytes lie: paths of this machine, and URLs that fsspec knows (s3://, gs://, http:// ...).

Formats ask for nothing else: which files a path stands for, a file as a stream, a file as a local one.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO

from penstock.core.errors import SourceError
from penstock.feed.sources.extras import need

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST_PATHS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """Opens files, wherever they lie. Can be pickled; holds nothing open."""

    cache: str | None = None
    """A folder for copies of remote files; None keeps none, but for formats that need a local file."""

    cache_nbytes: int = 32 << 30
    """The most that folder may hold."""

    def expand(self, path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
        """Return the files that `path` stands for: braces ({000..127}, {train,val}) and wildcards are spelled out.

        Raises:
            SourceError: there is no such file.
        """
        if not isinstance(path, str | os.PathLike):
            return [found for one in path for found in self.expand(one)]
        found = []
        for one in spelled_out(os.fspath(path)):
            if not re.search(r"[*?\[]", one) or os.path.lexists(one):
                found.append(one)
            elif is_remote(one):
                scheme = one.partition("://")[0]
                fs, inner = need("fsspec", "remote").core.url_to_fs(one)
                found += [f"{scheme}://{name.removeprefix(f'{scheme}://')}" for name in sorted(fs.glob(inner))]
            else:
                found += sorted(glob.glob(one))
        if not found:
            raise SourceError(f"there is no file {os.fspath(path)!r}")
        return found

    def open(self, path: str, offset: int = 0) -> BinaryIO:
        """Open a file to be read from `offset` on, in order.

        Raises:
            SourceError: it cannot be opened.
        """
        try:
            file: BinaryIO = _remote(path) if is_remote(path) else open(path, "rb")  # noqa: SIM115 - the caller's
            if offset:
                file.seek(offset)
        except OSError as error:
            raise SourceError(f"{path} cannot be opened: {error}") from error
        return file

    def nbytes(self, path: str) -> int:
        """Return a file's size.

        Raises:
            SourceError: it is not there.
        """
        try:
            if is_remote(path):
                fs, inner = need("fsspec", "remote").core.url_to_fs(path)
                return int(fs.size(inner))
            return os.stat(path).st_size
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error}") from error

    def local(self, path: str) -> str:
        """Return the path of a local file with the same bytes, for formats that jump about in it.

        Raises:
            SourceError: there is none.
        """
        if is_remote(path):
            raise NotImplementedError
        if not os.path.exists(path):
            raise SourceError(f"there is no file {path!r}")
        return path


def _remote(path: str) -> BinaryIO:
    file: BinaryIO = need("fsspec", "remote").open(path, "rb").open()
    return file


def is_remote(path: str) -> bool:
    """Say whether a path is a URL.

    >>> is_remote("s3://bucket/a.tar"), is_remote("data/a.tar")
    (True, False)
    """
    return bool(re.match(r"[a-z][a-z0-9+.-]*://", path))


def spelled_out(path: str) -> list[str]:
    """Return what a path with braces stands for, in order.

    >>> spelled_out("train-{08..10}.tar")
    ['train-08.tar', 'train-09.tar', 'train-10.tar']
    >>> spelled_out("{a,b}.h5")
    ['a.h5', 'b.h5']
    """
    found = _BRACES.search(path)
    if found is None:
        return [path]
    inner = _RANGE.fullmatch(found[1])
    if inner is not None:
        first, last = int(inner[1]), int(inner[2])
        width = len(inner[1]) if len(inner[1]) == len(inner[2]) or inner[1].startswith("0") else 0
        if abs(last - first) >= _MOST_PATHS:
            raise SourceError(f"{path} stands for {abs(last - first) + 1} files; {_MOST_PATHS} are the most")
        numbers = range(first, last + 1) if first <= last else range(first, last - 1, -1)
        words = [f"{number:0{width}d}" for number in numbers]
    elif "," in found[1]:
        words = found[1].split(",")
    else:  # a brace that is a brace
        head, tail = path[: found.end()], spelled_out(path[found.end() :])
        return [head + one for one in tail]
    return [one for word in words for one in spelled_out(path[: found.start()] + word + path[found.end() :])]
