"""Where bytes lie: paths of this machine, and URLs that fsspec knows (s3://, gs://, http:// ...).

Formats ask for nothing else: which files a path stands for, a file as a stream, a file as a local one.

    open     local      the file
             remote     ranges fetched ahead, see `remote`; with a cache the copy there, and where there is none the
                        file is copied into it while it is read from its beginning
    local    local      the path
             remote     the path of a copy, downloaded first, see `cache`

A file:// URL is a path of this machine.
"""

from __future__ import annotations

import glob
import io
import os
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO
from urllib.parse import unquote

from penstock.core.errors import OptionError, SourceError
from penstock.feed.sources import remote
from penstock.feed.sources.cache import Cache, Filling, default_folder, name_of
from penstock.feed.sources.cache_copying import CopyingFile
from penstock.feed.sources.remote_wires import Stamp
from penstock.feed.sources.retries import Retries

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST_PATHS = 1_000_000
_BUFFER_NBYTES = 256 << 10
_REST_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """Opens files, wherever they lie. Can be pickled; holds nothing open."""

    cache: str | None = None
    """A folder for copies of remote files; None keeps none, but for formats that need a local file."""

    cache_nbytes: int = 32 << 30
    """The most that folder may hold."""

    retries: int = 8
    """How often a request that failed in a way that may pass is made again, unless bytes have come meanwhile."""

    timeout_s: float = 120.0
    """How long that may go on."""

    stall_s: float = 15.0
    """Silence of a server that counts as a failure."""

    range_nbytes: int = remote.RANGE_NBYTES
    """What one request asks for."""

    ahead: int = remote.AHEAD
    """How many requests of an open file are under way ahead of its reader; it holds the bytes of one more."""

    def __post_init__(self) -> None:
        if self.range_nbytes < 1 or self.ahead < 0 or self.cache_nbytes < 0:
            raise OptionError(
                f"range_nbytes={self.range_nbytes} has to be 1 or more, ahead={self.ahead} and "
                f"cache_nbytes={self.cache_nbytes} 0 or more"
            )
        self._retries()

    def expand(self, path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
        """Return the files that `path` stands for: braces ({000..127}, {train,val}) and wildcards are spelled out.

        Braces are not looked up: a remote file that is not there is missed when it is opened.

        Raises:
            SourceError: there is no such file.
        """
        if not isinstance(path, str | os.PathLike):
            _check_several(path)
            named = [found for one in path for found in self.expand(one)]
            if not named:
                raise SourceError("an empty list of paths names no data")
            return named
        found = []
        for one in map(without_scheme, spelled_out(os.fspath(path))):
            if is_remote(one):
                found += remote.glob(one, self._retries()) if _has_wildcards(one) else [one]
            elif not re.search(r"[*?\[]", one) or os.path.lexists(one):
                found.append(one)
            else:
                found += sorted(glob.glob(one))
        if not found:
            raise SourceError(f"there is no file {os.fspath(path)!r}")
        return found

    def list(self, path: str) -> list[str]:
        """Return all files below a folder, in order; none whose name, or whose folder's, begins with a dot.

        Raises:
            SourceError: the storage cannot say.
        """
        path = without_scheme(path)
        if is_remote(path):
            folder = path.rstrip("/") + "/"
            found = remote.find(folder, self._retries())
            return [url for url in found if "/." not in f"/{url.removeprefix(folder)}"]
        names: list[str] = []
        for folder, folders, files in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            names += (os.path.join(folder, name) for name in files if not name.startswith("."))
        return sorted(names)

    def open(self, path: str, offset: int = 0) -> BinaryIO:
        """Open a file to be read from `offset` on, in order.

        Raises:
            SourceError: it cannot be opened. Reads of a remote file raise it too.
            ExtraError: a package is missing; the message names the extra that brings it.
        """
        path = without_scheme(path)
        try:
            file = self._open_remote(path, copies=not offset) if is_remote(path) else open(path, "rb")  # noqa: SIM115
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
        return self.stamps([path])[0].nbytes

    def stamps(self, paths: Iterable[str]) -> Sequence[Stamp]:
        """Return each file's size, and what tells this version of it from others: an ETag, or when it was changed.

        Remote files are asked for side by side.

        Raises:
            SourceError: one is not there.
        """
        known = [without_scheme(path) for path in paths]
        asked = iter(remote.stamps([path for path in known if is_remote(path)], self._retries()))
        return [next(asked) if is_remote(path) else _local_stamp(path) for path in known]

    def local(self, path: str) -> str:
        """Return the path of a local file with the same bytes, for formats that jump about in it.

        A remote file is looked for in `cache` (or the user's own cache folder), and downloaded if it is not there. The
        copy stays as long as this process lives, so that its workers find it; all that is asked for must fit the cache.

        Raises:
            SourceError: there is none, or no room for a copy.
            ExtraError: a package is missing; the message names the extra that brings it.
        """
        path = without_scheme(path)
        if not is_remote(path):
            if not os.path.exists(path):
                raise SourceError(f"there is no file {path!r}")
            return path
        known = remote.stamps([path], self._retries())[0]
        cache = Cache(self.cache or default_folder(), self.cache_nbytes)
        return cache.path(_name(path, known), known.nbytes, lambda filling: self._download(path, known, filling))

    def _open_remote(self, url: str, *, copies: bool) -> BinaryIO:
        known = remote.stamps([url], self._retries())[0]
        filling = None
        if self.cache is not None:
            cache, name = Cache(self.cache, self.cache_nbytes), _name(url, known)
            copy = cache.open(name, known.nbytes)
            if copy is not None:
                return copy
            try:
                filling = cache.begin(name, known.nbytes, in_passing=True) if copies else None
            except SourceError as error:  # no room: read past the cache
                warnings.warn(f"not kept: {error}", RuntimeWarning, stacklevel=3)
        file = self._fetched(url, known)
        if filling is None:
            return io.BufferedReader(file, _BUFFER_NBYTES)
        copying = CopyingFile(file, filling, lambda start: file.has_rest(start, _REST_S))
        return io.BufferedReader(copying, _BUFFER_NBYTES)

    def _download(self, url: str, known: Stamp, filling: Filling) -> None:
        with self._fetched(url, known) as file:
            buffer = memoryview(bytearray(_BUFFER_NBYTES))
            while count := file.readinto(buffer):
                filling.write(buffer[:count])

    def _fetched(self, url: str, known: Stamp) -> remote.RemoteFile:
        return remote.open_remote(url, known, self._retries(), range_nbytes=self.range_nbytes, ahead=self.ahead)

    def _retries(self) -> Retries:
        return Retries(most=self.retries, timeout_s=self.timeout_s, stall_s=self.stall_s)


def _check_several(paths: object) -> None:
    if isinstance(paths, bytes) or not isinstance(paths, Iterable):
        raise OptionError(f"{paths!r} is neither a path nor several; a path is a str or a pathlib.Path")


def _local_stamp(path: str) -> Stamp:
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise SourceError(f"there is no file {path!r}") from error
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}") from error
    return Stamp(status.st_size, str(status.st_mtime_ns))


def _name(url: str, known: Stamp) -> str:
    return name_of(url, known.nbytes, known.version)


def _has_wildcards(url: str) -> bool:
    """Say whether a URL is a pattern. What follows a ? may as well be a version, or a signature.

    >>> [_has_wildcards(url) for url in ("s3://bucket/?.tar", "s3://bucket/a?versionId=1", "http://host/a?b*")]
    [True, False, False]
    """
    place = url.partition("://")[2].partition("/")[2]
    path, _, query = place.partition("?")
    has_query = "=" in query or url.startswith("http")
    return bool(re.search(r"[*\[]", path) if has_query else re.search(r"[*?\[]", place))


def is_remote(path: str) -> bool:
    """Say whether a path is a URL of another machine.

    >>> is_remote("s3://bucket/a.tar"), is_remote("data/a.tar"), is_remote("file:///data/a.tar")
    (True, False, False)
    """
    return bool(re.match(r"[a-z][a-z0-9+.-]*://", path)) and not path.startswith("file://")


def without_scheme(path: str) -> str:
    """Return a file:// URL as a path, and anything else as it is.

    >>> without_scheme("file:///data/a%20b.tar"), without_scheme("s3://bucket/a.tar")
    ('/data/a b.tar', 's3://bucket/a.tar')
    """
    return unquote(path.removeprefix("file://").removeprefix("localhost")) if path.startswith("file://") else path


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
