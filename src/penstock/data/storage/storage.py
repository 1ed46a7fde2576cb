"""Storage: which files a path stands for, and how they are opened, local ones and URLs (s3://, gs://, http:// ...).

    open     local      the file
             remote     ranges fetched ahead, see `remote_file`; with a cache its copy, and if there is none the file is
                        copied into the cache while it is read from its beginning
    local    local      the path
             remote     the path of a copy, downloaded first, see `disk_cache`
    read     local      all of its bytes
             remote     the same; a small one by one request, those of a batch side by side, see `object_batch`

A file:// URL is a path of this machine.
"""

from __future__ import annotations

import glob
import io
import os
import re
import stat
import uuid
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, Literal
from urllib.parse import unquote

from penstock.core.errors import OptionError, SourceError
from penstock.core.units import to_nbytes
from penstock.data.storage.backend import FileVersion
from penstock.data.storage.cache.cache_fill import CopyingFile
from penstock.data.storage.cache.disk_cache import DiskCache, user_folder
from penstock.data.storage.cache.partial_copy import PartialCopy
from penstock.data.storage.foreign_files import refuse_pointer
from penstock.data.storage.listings import listed
from penstock.data.storage.object_batch import ObjectRequest, fetch, keep
from penstock.data.storage.remote_errors import file_changed
from penstock.data.storage.remote_file import AHEAD, RANGE_NBYTES, RemoteFile, each, file_versions, open_remote
from penstock.data.storage.retries import Retries

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAX_PATHS = 1_000_000
_MAX_LOOKED_UP = 1000
"""Remote files of which it is checked that they are there."""
_BUFFER_NBYTES = 256 << 10
_REST_S = 1.0
"""How long closing a file may wait for the last bytes of its copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """Finds and opens local and remote files. Can be pickled; holds nothing open.

    >>> Storage(range_nbytes="4MiB", retries=3).range_nbytes
    4194304
    """

    cache: str | None = None
    """A folder for copies of remote files; None keeps none, except for formats that need a local file."""

    cache_nbytes: int = 32 << 30
    """The most bytes that the folder may hold; text such as "32GiB" is converted, here and in `range_nbytes`."""

    retries: int = 8
    """How often in a row a request is retried; bytes that arrive reset the count."""

    timeout_s: float = 120.0
    """How long a request may be retried, from its first failure."""

    stall_s: float = 15.0
    """Silence of a server that counts as a failure."""

    range_nbytes: int = RANGE_NBYTES
    """Bytes of one request."""

    ahead: int = AHEAD
    """Requests of an open file that are under way ahead of its reader, in addition to the one that is read."""

    _opening: str = field(default_factory=lambda: uuid.uuid4().hex, init=False, repr=False, compare=False)
    _seen: dict[str, FileVersion] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The versions of remote files that were opened, here or before it was pickled: later ones are errors."""

    def __post_init__(self) -> None:
        for name, least in (("cache_nbytes", 0), ("range_nbytes", 1)):
            object.__setattr__(self, name, to_nbytes(name, getattr(self, name), least=least))
        if self.ahead < 0:
            raise OptionError(f"ahead={self.ahead} has to be 0 or more")
        self._retries()

    def expand(self, path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
        """Return the files that `path` stands for: braces ({000..127}, {train,val}) and wildcards are expanded.

        ** stands for folders of any depth. Names that begin with a dot are matched by a dot alone, and what lies in a
        folder that is matched too is that folder's. Paths without wildcards are not looked up: see `check_there`.

        Raises:
            SourceError: there is no such file.
        """
        if not isinstance(path, str | os.PathLike):
            _check_iterable(path)
            files = [file for one in path for file in self.expand(one)]
            if not files:
                raise SourceError("an empty list of paths names no data")
            return files
        found: list[str] = []
        for one in map(strip_file_scheme, expand_braces(os.fspath(path))):
            if is_remote(one):
                found += _outermost(one, self._listed("glob", one)) if _has_wildcards(one) else [one]
            elif not re.search(r"[*?\[]", one) or os.path.lexists(one):
                found.append(one)
            else:
                found += _outermost(one, sorted(glob.glob(one, recursive=True)))
        if not found:
            raise SourceError(f"there is no file {os.fspath(path)!r}")
        return found

    def check_there(self, files: list[str], path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> None:
        """Refuse files that are not there, of those that `expand` made of `path` without looking them up.

        Of many remote ones, some thousand are looked up, side by side.

        Raises:
            SourceError: a file does not exist, or cannot be read.
        """
        for one in files:
            if not is_remote(one) and not os.path.exists(one):
                raise SourceError(f"there is no file {one!r}")
        named = [path] if isinstance(path, str | os.PathLike) else path
        braced = {one for each_path in named for one in expand_braces(os.fspath(each_path))}
        remote = [one for one in files if is_remote(one) and one in braced]
        some = remote[:: -(-len(remote) // _MAX_LOOKED_UP) or 1]
        if some:
            found = listed("there", "\n".join(some), lambda: [*self.file_versions(some)])
            self._seen.update(zip(some, found, strict=True))

    def list(self, path: str) -> list[str]:
        """Return all files below a folder, sorted, except those whose name or folder begins with a dot.

        Raises:
            SourceError: the folder cannot be listed.
        """
        path = strip_file_scheme(path)
        if is_remote(path):
            folder = path.rstrip("/") + "/"
            found = [one for one in self._listed("find", folder) if "/." not in f"/{one[0].removeprefix(folder)}"]
            self._seen.update({url: FileVersion(*told) for url, *told in found[:_MAX_LOOKED_UP] if told[1]})
            return [url for url, _, _ in found]
        return sorted(walk_files(path))

    def listed_versions(self, path: str) -> dict[str, FileVersion]:
        """Return the versions of the files below a remote folder, as far as its listing says them.

        Raises:
            SourceError: the folder cannot be listed.
        """
        found = self._listed("find", path.rstrip("/") + "/")
        return {url: FileVersion(nbytes, version) for url, nbytes, version in found if version}

    def open(self, path: str, offset: int = 0) -> BinaryIO:
        """Open a file to be read in order, from `offset`.

        Raises:
            SourceError: it cannot be opened, or is a pointer of Git LFS. Reads of a remote file raise it too.
            ExtraError: a package is missing; the message names the extra that brings it.
        """
        path = strip_file_scheme(path)
        try:
            file: BinaryIO
            if is_remote(path):
                file = self._open_version(path, self._version(path), copies=not offset)
            elif stat.S_ISFIFO(os.stat(path).st_mode):
                raise SourceError(
                    f"{path} is a pipe, which is read once, and data are read again: for types, workers and epochs; "
                    "write it to a file"
                )
            else:
                refuse_pointer(path, path)
                file = open(path, "rb")  # noqa: SIM115
            if offset:
                file.seek(offset)
        except OSError as error:
            raise SourceError(f"{path} cannot be opened: {error}") from error
        return file

    def request(self, path: str, version: FileVersion | None = None) -> ObjectRequest | None:
        """Return what an `ObjectBatch` needs to fetch a file ahead of `read`; None for a local one.

        Args:
            path: of the file.
            version: the one that it had when its folder was listed, to take from the cache; looked up where it is None.
        """
        path = strip_file_scheme(path)
        if not is_remote(path):
            return None
        cache = None if self.cache is None else DiskCache(self.cache, self.cache_nbytes, self._opening)
        return ObjectRequest(path, self._retries(), self.range_nbytes, cache, version)

    def read(self, path: str, limit: int, version: FileVersion | None = None) -> bytes:
        """Return the bytes of a file, or the first `limit` where it has more; `version` as for `request`.

        Raises:
            SourceError: it cannot be read.
            ExtraError: a package is missing; the message names the extra that brings it.
        """
        request = self.request(path, version)
        if request is None:
            with self.open(path) as file:
                return file.read(limit)
        found = fetch(request)
        version, data = found.version, found.data
        if data is None or (len(data) < version.nbytes and request.cache is not None):
            with self._open_version(request.url, version, copies=True) as file:
                return file.read(limit)
        if len(data) < version.nbytes:
            with self._remote_file(request.url, version) as remote:
                remote.seek(len(data))
                rest = io.BufferedReader(remote, _BUFFER_NBYTES).read(max(0, limit - len(data)))
            return data[:limit] + rest
        if request.cache is not None:
            keep(partial(_keep, request.cache, request.cache.copy_name(request.url, version), data))
        return data[:limit]

    def nbytes(self, path: str) -> int:
        """Return a file's size.

        Raises:
            SourceError: it does not exist.
        """
        return self.file_versions([path])[0].nbytes

    def file_versions(self, paths: Iterable[str]) -> Sequence[FileVersion]:
        """Return each file's size and version: an ETag, or the time of its last change.

        Remote files are looked up concurrently.

        Raises:
            SourceError: one does not exist.
        """
        known = [strip_file_scheme(path) for path in paths]
        remote = iter(file_versions([path for path in known if is_remote(path)], self._retries()))
        return [next(remote) if is_remote(path) else _local_version(path) for path in known]

    def local(self, path: str) -> str:
        """Return the path of a local file with the same bytes, for formats with random access.

        A remote file is looked up in `cache` (or the user's cache folder), and downloaded if it is not there. The copy
        stays as long as this process lives, so that its workers find it. The cache must have room for all such files.

        Raises:
            SourceError: the file does not exist or is a pointer of Git LFS, or there is no room for a copy.
            ExtraError: a package is missing; the message names the extra that brings it.
        """
        path = strip_file_scheme(path)
        if not is_remote(path):
            if not os.path.exists(path):
                raise SourceError(f"there is no file {path!r}")
            refuse_pointer(path, path)
            return path
        version = self._version(path)
        cache = DiskCache(self.cache or user_folder("remote"), self.cache_nbytes, self._opening)
        name = cache.copy_name(path, version)
        local = cache.path(name, version.nbytes, lambda copy: self._download(path, version, copy))
        refuse_pointer(path, local)
        return local

    def _version(self, url: str) -> FileVersion:
        """Return the version of a remote file, which is the one that it had when it was opened first.

        Raises:
            SourceError: it has another one.
        """
        version = self.file_versions([url])[0]
        if not version.is_same(self._seen.setdefault(url, version)):
            raise file_changed(url)
        return version

    def _listed(self, kind: Literal["find", "glob"], place: str) -> Sequence[Any]:
        return listed(kind, place, lambda: each([place], self._retries(), lambda one, url: getattr(one, kind)(url))[0])

    def _open_version(self, url: str, version: FileVersion, *, copies: bool) -> BinaryIO:
        copy = None
        if self.cache is not None:
            cache = DiskCache(self.cache, self.cache_nbytes, self._opening)
            name = cache.copy_name(url, version)
            complete = cache.open(name, version.nbytes)
            if complete is not None:
                return complete
            try:
                copy = cache.begin_copy(name, version.nbytes, while_reading=True) if copies else None
            except SourceError as error:  # no room: read past the cache
                warnings.warn(f"not kept: {error}", RuntimeWarning, stacklevel=3)
        file = self._remote_file(url, version)
        if copy is None:
            return io.BufferedReader(file, _BUFFER_NBYTES)
        copying = CopyingFile(file, copy, lambda start: file.arrives_within(start, _REST_S))
        return io.BufferedReader(copying, _BUFFER_NBYTES)

    def _download(self, url: str, version: FileVersion, copy: PartialCopy) -> None:
        with self._remote_file(url, version) as file:
            buffer = memoryview(bytearray(_BUFFER_NBYTES))
            while count := file.readinto(buffer):
                copy.write(buffer[:count])

    def _remote_file(self, url: str, version: FileVersion) -> RemoteFile:
        return open_remote(url, version, self._retries(), range_nbytes=self.range_nbytes, ahead=self.ahead)

    def _retries(self) -> Retries:
        return Retries(max_retries=self.retries, timeout_s=self.timeout_s, stall_s=self.stall_s)


def _keep(cache: DiskCache, name: str, data: bytes) -> None:
    """Make a copy of a whole file, if there is room and nobody else is making it."""
    try:
        copy = cache.begin_copy(name, len(data), while_reading=True)
        if copy is not None:
            with copy:
                copy.write(data)
                copy.finish()
    except SourceError as error:
        warnings.warn(f"not kept: {error}", RuntimeWarning, stacklevel=3)


def _check_iterable(paths: object) -> None:
    if isinstance(paths, bytes) or not isinstance(paths, Iterable):
        raise OptionError(f"{paths!r} is neither a path nor several; a path is a str or a pathlib.Path")


def _outermost(pattern: str, matches: Sequence[str]) -> list[str]:
    """Return what a pattern matches, without what is hidden, lies in another match, or came by a circle of links.

    >>> _outermost("s3://b/**", ["s3://b/.a/c", "s3://b/x-1.csv", "s3://b/x/", "s3://b/x/1.csv"])
    ['s3://b/x-1.csv', 's3://b/x/']
    """
    shown = [one for one in matches if "/." not in one or "/." in pattern]
    there = {one.rstrip("/") for one in shown}
    outermost = [one for one in shown if there.isdisjoint(_folders_above(one.rstrip("/")))]
    if "**" not in pattern or is_remote(pattern):
        return outermost
    folders = {folder: _folders_above(f"{os.path.abspath(folder)}/") for folder in map(os.path.dirname, outermost)}
    circles = {folder for folder, above in folders.items() if len({*map(os.path.realpath, above)}) < len(above)}
    return [one for one in outermost if os.path.dirname(one) not in circles]


def _folders_above(path: str) -> list[str]:
    """Return the folders that a path, which may end on a slash, is in; with "a/b/" it is in "a/b"."""
    return [path[:at] for at, letter in enumerate(path) if letter == "/" and at]


def _local_version(path: str) -> FileVersion:
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise SourceError(f"there is no file {path!r}") from error
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}") from error
    return FileVersion(status.st_size, str(status.st_mtime_ns))


def _has_wildcards(url: str) -> bool:
    """Return whether a URL is a pattern. What follows a ? may also be a version or a signature.

    >>> [_has_wildcards(url) for url in ("s3://bucket/?.tar", "s3://bucket/a?versionId=1", "http://host/a?b*")]
    [True, False, False]
    """
    place = url.partition("://")[2].partition("/")[2]
    path, _, query = place.partition("?")
    has_query = "=" in query or url.startswith("http")
    return bool(re.search(r"[*\[]", path) if has_query else re.search(r"[*?\[]", place))


def is_remote(path: str) -> bool:
    """Return whether a path is a URL of another machine.

    >>> is_remote("s3://bucket/a.tar"), is_remote("data/a.tar"), is_remote("file:///data/a.tar")
    (True, False, False)
    """
    return bool(re.match(r"[a-z][a-z0-9+.-]*://", path)) and not path.startswith("file://")


def walk_files(path: str) -> Iterator[str]:
    """Yield all files below a local folder, folder by folder, except those whose name or folder begins with a dot.

    Raises:
        SourceError: a folder cannot be listed.
    """
    try:
        for _, entries in walk_folders(path):
            yield from (entry.path for entry in entries if not entry.is_dir())
    except OSError as error:
        raise SourceError(f"{error.filename} cannot be listed: {error.strerror}") from error


def walk_folders(path: str, above: tuple[tuple[int, int], ...] = ()) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Yield a local folder and each one below it, with what lies in it by name; nothing that begins with a dot.

    Links to folders are followed, except those to a folder that they lie in. `above` has the folders that `path` is in,
    as device and inode.

    Raises:
        OSError: a folder cannot be listed.
    """
    status = os.stat(path)
    own = (status.st_dev, status.st_ino)
    if own in above:
        return
    with os.scandir(path) as entries:
        shown = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    yield path, shown
    for entry in shown:
        if entry.is_dir():
            yield from walk_folders(entry.path, (*above, own))


def strip_file_scheme(path: str) -> str:
    """Return the path of a file:// URL; other paths unchanged.

    >>> strip_file_scheme("file:///data/a%20b.tar"), strip_file_scheme("s3://bucket/a.tar")
    ('/data/a b.tar', 's3://bucket/a.tar')
    """
    return unquote(path.removeprefix("file://").removeprefix("localhost")) if path.startswith("file://") else path


def expand_braces(path: str) -> list[str]:
    """Return the paths that a path with braces stands for, in order.

    >>> expand_braces("train-{08..10}.tar")
    ['train-08.tar', 'train-09.tar', 'train-10.tar']
    >>> expand_braces("{a,b}.h5")
    ['a.h5', 'b.h5']
    """
    found = _BRACES.search(path)
    if found is None:
        return [path]
    inner = _RANGE.fullmatch(found[1])
    if inner is not None:
        first, last = int(inner[1]), int(inner[2])
        width = len(inner[1]) if len(inner[1]) == len(inner[2]) or inner[1].startswith("0") else 0
        if abs(last - first) >= _MAX_PATHS:
            raise SourceError(f"{path} stands for {abs(last - first) + 1} files; {_MAX_PATHS} are the most")
        numbers = range(first, last + 1) if first <= last else range(first, last - 1, -1)
        words = [f"{number:0{width}d}" for number in numbers]
    elif "," in found[1]:
        words = found[1].split(",")
    else:  # neither a range nor a list: a literal brace
        head, tail = path[: found.end()], expand_braces(path[found.end() :])
        return [head + one for one in tail]
    return [one for word in words for one in expand_braces(path[: found.start()] + word + path[found.end() :])]
