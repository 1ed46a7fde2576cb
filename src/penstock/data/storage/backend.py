"""A file's size and version, ranges of its bytes, listings: of any remote filesystem of fsspec.

All methods run in the loop of an `EventLoopThread`. Errors of other libraries are translated: to `TransientError`
if a retry may succeed, to `SourceError` otherwise.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from penstock.core.errors import SourceError
from penstock.core.urls import redact_url
from penstock.data.storage.folder_errors import listing, raise_folder_errors
from penstock.data.storage.remote_errors import file_changed, translate_error, without_secrets
from penstock.data.storage.retries import TransientError

_Result = TypeVar("_Result")

MAX_READS = 64
"""Ranges that are read at the same time. The others wait, and that wait is no stall."""
_CALL_TIMEOUT_S = 600.0
"""For calls that show no progress before their end: a listing, a range of a plain `Backend`."""
_LEAST_UPLOAD_RATE = 1 << 20
"""Bytes per second of an upload, which may take so much longer."""
_VERSION_KEYS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
    "created",
)
_WHERE = ("endpoint_url", "endpoint_override", "endpoint", "account_url", "account_name", "base", "host", "port")
"""Attributes and options of filesystems that say which server answers for a URL without one, as gs://bucket/a."""
_OBJECT_STORES = {"gs", "gcs", "abfs", "memory"}
"""Protocols of fsspec where `cat_file` is one request, whose answer never mixes two versions of an object."""


@dataclass(frozen=True, slots=True)
class FileVersion:
    """A file's size and version. Two that are equal stand for the same bytes."""

    nbytes: int
    version: str
    """An ETag, or the time of the last change, and a mark of the server; empty where the storage reports neither."""
    has_ranges: bool = True
    """Whether the server answers requests for a part of it."""

    def is_same(self, other: FileVersion) -> bool:
        """Return whether it may be of the same bytes: of some, only the size is known."""
        return self.nbytes == other.nbytes and (self.version == other.version or not (self.version and other.version))


def mark_of_server(endpoint: str) -> str:
    """Return what makes versions of one server differ from another's, whose bucket may have the same name and ETags.

    >>> mark_of_server("https://s3.amazonaws.com"), mark_of_server("")
    (' @1ec878d0', '')
    """
    return f" @{hashlib.sha256(endpoint.encode()).hexdigest()[:8]}" if endpoint else ""


ListedFile = tuple[str, int, str]
"""The URL of a file, and its size and version, which is empty where a listing does not say it as a request does."""


class Backend:
    """Any filesystem of fsspec, through its common methods."""

    def __init__(self, fs: Any, stall_s: float) -> None:
        self._fs = fs
        raise_folder_errors(fs)
        self._read_slots = asyncio.Semaphore(MAX_READS)
        self._response_timeout_s = 2 * stall_s
        # The libraries' own timeouts of `stall_s` have holes: aiohttp waits without limit after "HTTP 100 Continue".

        # Filesystems that are not asynchronous are not thread-safe either: memory:// files share one position.
        self._thread = None if fs.async_impl else ThreadPoolExecutor(1, "penstock remote")

    async def file_version(self, url: str) -> FileVersion:
        """Return a file's size and version."""
        info = await self._call(url, "info", self._path(url))
        if info.get("type") == "directory" or info.get("size") is None:
            raise SourceError(f"{redact_url(url)} is no file with a known size")
        version = " ".join(str(info[name]) for name in _VERSION_KEYS if info.get(name))
        return FileVersion(int(info["size"]), version and version + await self._mark(url))

    async def read(self, url: str, start: int, end: int, expected: FileVersion) -> AsyncIterator[bytes]:
        """Yield bytes `start` to `end` in parts; fewer, if the response was cut."""
        async with self._read_slots:
            data = await self._call(url, "cat_file", self._path(url), start, end)
        if await self.file_version(url) != expected:
            raise file_changed(url)
        yield data

    async def read_start(self, url: str, nbytes: int) -> tuple[FileVersion, bytes]:
        """Return a file's size and version, and its first `nbytes` bytes; by one request, if it has no more than those.

        None of the bytes are returned where the storage does not say of which version they are and there are more.
        """
        protocols = (self._fs.protocol,) if isinstance(self._fs.protocol, str) else self._fs.protocol
        if not _OBJECT_STORES.isdisjoint(protocols):
            try:
                async with self._read_slots:
                    data: bytes = await self._call(url, "cat_file", self._path(url), 0, nbytes + 1)
                if len(data) <= nbytes:
                    return FileVersion(len(data), ""), data
            except SourceError:  # some have no range of an empty object
                if (await self.file_version(url)).nbytes:
                    raise
                return FileVersion(0, ""), b""
        version = await self.file_version(url)
        if version.nbytes > nbytes:
            return version, b""
        async with aclosing(self.read(url, 0, version.nbytes, version)) as parts:  # type: ignore[type-var]
            return version, b"".join([part async for part in parts])

    async def find(self, url: str) -> list[ListedFile]:
        """Return all files below a folder, sorted."""
        with listing():
            urls = self._urls(url, await self._call(url, "find", self._path(url)))
        return [(found, 0, "") for found in urls if not found.endswith("/")]

    async def glob(self, url: str) -> list[str]:
        """Return the URLs that match a pattern, sorted, folders among them."""
        with listing():
            return self._urls(url, await self._call(url, "glob", self._path(url)))

    async def exists(self, url: str) -> bool:
        """Return whether there is a file, or a folder with files."""
        return bool(await self._call(url, "exists", self._path(url)))

    async def remove(self, url: str) -> None:
        """Remove a file."""
        await self._call(url, "rm_file", self._path(url))

    async def put(self, path: str, url: str, *, overwrite: bool) -> bool:
        """Upload a file of this machine; return False if there is one that may not be replaced."""
        with self._translate_errors(url):
            async with asyncio.timeout(_CALL_TIMEOUT_S + os.path.getsize(path) / _LEAST_UPLOAD_RATE):
                try:
                    await self._invoke("put_file", path, self._path(url), mode="overwrite" if overwrite else "create")
                except FileExistsError:
                    return False
        return True

    async def close(self) -> None:
        """Close its connections."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        session = self._session()
        if session is not None:
            await session.close()

    async def _mark(self, url: str) -> str:
        """Return the mark of the server that answers for a URL; "" where the URL names it."""
        options = self._fs.storage_options
        found = {name: getattr(self._fs, name, None) or options.get(name) for name in _WHERE}
        return mark_of_server(
            " ".join(f"{name}={value}" for name, value in found.items() if isinstance(value, str | int))
        )

    def _session(self) -> Any:
        """Return the object that owns the connections, if one exists yet."""
        return getattr(self._fs, "_session", None)

    def _path(self, url: str) -> str:
        return str(self._fs._strip_protocol(url))

    def _urls(self, url: str, names: Iterable[str]) -> list[str]:
        scheme = url.partition("://")[0]
        found = (name if "://" in name else f"{scheme}://{name.removeprefix('/')}" for name in names)
        return sorted(found)

    async def _call(self, url: str, name: str, *arguments: Any, **options: Any) -> Any:
        with self._translate_errors(url):
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                return await self._invoke(name, *arguments, **options)

    async def _invoke(self, name: str, *arguments: Any, **options: Any) -> Any:
        if self._thread is None:
            return await getattr(self._fs, f"_{name}")(*arguments, **options)
        call = partial(getattr(self._fs, name), *arguments, **options)
        return await self._in_thread(contextvars.copy_context().run, call)

    async def _in_thread(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _with_timeout(self, response: Awaitable[_Result]) -> _Result:
        async with asyncio.timeout(self._response_timeout_s):
            return await response

    @contextmanager
    def _translate_errors(self, url: str) -> Iterator[None]:
        try:
            yield
        except (SourceError, TransientError):
            raise
        except TimeoutError as error:
            raise TransientError("the server did not respond in time") from without_secrets(url, error)
        except self._foreign_errors() as error:
            raise translate_error(url, error) from without_secrets(url, error)

    def _foreign_errors(self) -> tuple[type[Exception], ...]:
        return (Exception,)  # some have errors of their own, like gcsfs, which derive from nothing else
