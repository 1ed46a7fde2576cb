"""What remote storage can be asked for: a file's stamp, a range of its bytes, names. Foreign errors end here.

    S3       the client of s3fs, without its own attempts and botocore's: attempts that multiply make minutes of seconds
    HTTP     the session of fsspec's HTTP filesystem
    Wire     any other filesystem of fsspec: `cat_file`, with the stamp looked at again after every range

All run in the loop of a `Line`. What may pass is raised as `TransientError`, what will not as `SourceError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.core.errors import ExtraError, SourceError
from penstock.feed.sources.extras import need
from penstock.feed.sources.remote_failures import answered, changed, shown, told
from penstock.feed.sources.remote_line import Line
from penstock.feed.sources.retries import TransientError

_Result = TypeVar("_Result")

_PIECE_NBYTES = 1 << 20
_READS = 32
"""Ranges that are read at the same time; others wait for their turn, which is no failure."""
_CONNECTIONS = 2 * _READS
_LONGEST_S = 600.0
"""For what shows no progress before its end: a listing, a range of a filesystem that is nothing special."""
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "LastModified", "last_modified", "updated", "mtime", "created")


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells one version of a remote file from another."""

    nbytes: int
    version: str
    """An ETag, or a time; empty where the storage says neither."""
    has_ranges: bool = True
    """Whether a part of it can be asked for."""


class Wire:
    """A filesystem of fsspec that is nothing special."""

    def __init__(self, fs: Any, stall_s: float) -> None:
        self._fs = fs
        self._turns = asyncio.Semaphore(_READS)
        self._answer_s = 2 * stall_s  # the libraries' own timeouts come first: but they have holes, as after HTTP 100
        # Those that are not asynchronous are not made for several threads either: memory://'s files have one position.
        self._thread = None if fs.async_impl else ThreadPoolExecutor(1, "penstock remote")

    async def stamp(self, url: str) -> Stamp:
        """Return a file's size and version.

        Raises:
            SourceError: it is not there, or may not be read.
            TransientError: that may be different the next time.
        """
        info = await self._call(url, "info", self._inner(url))
        if info.get("type") == "directory" or info.get("size") is None:
            raise SourceError(f"{shown(url)} is no file with a known size")
        version = " ".join(str(info[name]) for name in _VERSIONS if info.get(name))
        return Stamp(int(info["size"]), version)

    async def read(self, url: str, start: int, end: int, stamp: Stamp) -> AsyncIterator[bytes]:
        """Give bytes `start` to `end` in pieces; fewer, if the answer was cut.

        Raises:
            SourceError: the file is not what it was when `stamp` was taken, or cannot be read.
            TransientError: that may be different the next time.
        """
        async with self._turns:
            data = await self._call(url, "cat_file", self._inner(url), start, end)
        if await self.stamp(url) != stamp:
            raise changed(url)
        yield data

    async def find(self, url: str) -> list[str]:
        """Return the URLs of all files below a folder, in order."""
        return self._urls(url, await self._call(url, "find", self._inner(url)))

    async def glob(self, url: str) -> list[str]:
        """Return the URLs that a pattern matches, in order."""
        return self._urls(url, await self._call(url, "glob", self._inner(url)))

    async def close(self) -> None:
        """Close its connections."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        session = self._session()
        if session is not None:
            await session.close()

    def _session(self) -> Any:
        """Return what holds the connections, if there is one yet."""
        return getattr(self._fs, "_session", None)

    def _inner(self, url: str) -> str:
        return str(self._fs._strip_protocol(url))

    def _urls(self, url: str, names: list[str]) -> list[str]:
        scheme = url.partition("://")[0]
        found = (name if "://" in name else f"{scheme}://{name.removeprefix('/')}" for name in names)
        return sorted(name for name in found if not name.endswith("/"))

    async def _call(self, url: str, name: str, *arguments: Any) -> Any:
        with self._border(url):
            async with asyncio.timeout(_LONGEST_S):
                return await self._called(name, *arguments)

    async def _called(self, name: str, *arguments: Any) -> Any:
        if self._thread is None:
            return await getattr(self._fs, f"_{name}")(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, getattr(self._fs, name), *arguments)

    async def _in_time(self, answer: Awaitable[_Result]) -> _Result:
        async with asyncio.timeout(self._answer_s):
            return await answer

    @contextmanager
    def _border(self, url: str) -> Iterator[None]:
        try:
            yield
        except (SourceError, TransientError):
            raise
        except TimeoutError as error:
            raise TransientError("the server did not answer in time") from error
        except self._foreign() as error:
            raise told(url, error) from error

    def _foreign(self) -> tuple[type[Exception], ...]:
        return (OSError, ValueError, RuntimeError, LookupError, TypeError)


class S3(Wire):
    """S3, and what speaks its language."""

    async def stamp(self, url: str) -> Stamp:
        """Return a file's size and ETag."""
        answer = await self._ask(url, "head_object")
        if answer.get("ContentLength") is None:
            raise TransientError("the server did not say how large the file is")
        return Stamp(int(answer["ContentLength"]), str(answer.get("ETag") or answer.get("LastModified") or ""))

    async def read(self, url: str, start: int, end: int, stamp: Stamp) -> AsyncIterator[bytes]:
        """Give bytes `start` to `end` in pieces. The ETag is compared, not sent: some servers know no If-Match."""
        async with self._turns:
            answer = await self._ask(url, "get_object", Range=f"bytes={start}-{end - 1}")
            body = answer["Body"]
            try:
                if str(answer.get("ETag") or answer.get("LastModified") or "") != stamp.version:
                    raise changed(url)
                _check_range(url, answer.get("ContentRange", ""), start, stamp)
                with self._border(url):
                    while piece := await self._in_time(body.read(_PIECE_NBYTES)):
                        yield piece
            finally:
                body.close()

    def _session(self) -> Any:
        return self._fs._s3

    async def _ask(self, url: str, method: str, **arguments: Any) -> Any:
        bucket, key, version = self._fs.split_path(url)
        if version:
            arguments["VersionId"] = version
        with self._border(url):
            # fsspec's method for a range keeps nothing of an answer that is cut, and shows no ETag.
            return await self._in_time(self._fs._call_s3(method, Bucket=bucket, Key=key, **arguments))

    def _foreign(self) -> tuple[type[Exception], ...]:
        botocore = need("botocore.exceptions", "s3")
        client_error = need("aiohttp", "s3").ClientError
        return (*super()._foreign(), botocore.BotoCoreError, botocore.ClientError, client_error)


class Http(Wire):
    """A server that speaks HTTP."""

    async def stamp(self, url: str) -> Stamp:
        """Return a file's size and ETag, or time. Asks for its first byte: a signed URL is not good for a HEAD."""
        async with self._get(url, 0, 1) as answer:
            total = answer.headers.get("Content-Range", "").rpartition("/")[2]
            if answer.status in (206, 416) and total.isdecimal():
                await self._in_time(answer.read())  # a connection whose answer was not read is closed
                return Stamp(int(total), _version(answer))
            length = answer.headers.get("Content-Length", "")
            if answer.status == 200 and length.isdecimal():
                return Stamp(int(length), _version(answer), has_ranges=False)
        raise SourceError(f"{shown(url)}: the server does not say how large the file is; copy it to a disk")

    async def read(self, url: str, start: int, end: int, stamp: Stamp) -> AsyncIterator[bytes]:
        """Give bytes `start` to `end` in pieces; from a server that has no ranges all before them is read again."""
        async with self._turns, self._get(url, start, end if stamp.has_ranges else None) as answer:
            if answer.status == 416 or _version(answer) != stamp.version:
                raise changed(url)
            left_out = 0
            if answer.status == 206:
                _check_range(url, answer.headers.get("Content-Range", ""), start, stamp)
            elif answer.status == 200 and not stamp.has_ranges:
                left_out = start
            else:
                raise TransientError(f"the server answered a range with HTTP {answer.status}")
            while piece := await self._in_time(answer.content.readany()):
                yield piece[left_out:]
                left_out = max(left_out - len(piece), 0)

    @asynccontextmanager
    async def _get(self, url: str, start: int, end: int | None) -> AsyncIterator[Any]:
        options = self._fs.kwargs  # what the user has configured, as headers with a token
        headers = {**options.get("headers", {}), "Accept-Encoding": "identity"}
        if end is not None:
            headers["Range"] = f"bytes={start}-{end - 1}"
        with self._border(url):
            session = await self._fs.set_session()
            request = session.get(self._fs.encode_url(url), **{**options, "headers": headers})
            async with await self._in_time(request) as answer:
                if answer.status >= 400 and answer.status != 416:
                    wait = answer.headers.get("Retry-After", "")
                    raise answered(url, answer.status, wait_s=float(wait) if wait.isdecimal() else 0.0)
                yield answer

    def _foreign(self) -> tuple[type[Exception], ...]:
        return (*super()._foreign(), need("aiohttp", "remote").ClientError)


def connected(line: Line, url: str, stall_s: float) -> Wire:
    """Return the wire to where `url` lies, kept on the line. In the line's loop only.

    Raises:
        SourceError: fsspec knows no such scheme.
        ExtraError: the package for it is not installed.
    """
    fsspec = need("fsspec", "remote")
    scheme = url.partition("://")[0]
    if scheme in ("s3", "s3a"):
        need("s3fs", "s3")
    elif scheme in ("http", "https"):
        need("aiohttp", "remote")
    try:
        kind = fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise ExtraError(f"{shown(url)}: {error}") from error
    except ValueError as error:
        raise SourceError(f"{shown(url)}: fsspec knows no {scheme}://") from error
    options = kind._get_kwargs_from_urls(url)
    key = (kind, repr(sorted(options.items())), stall_s)
    wire: Wire | None = line.connected.get(key)
    if wire is None:
        if kind.async_impl:
            options["asynchronous"] = True
        wire = line.connected[key] = _made(kind, scheme, options, stall_s)
    return wire


def _made(kind: Any, scheme: str, options: dict[str, Any], stall_s: float) -> Wire:
    options |= {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme in ("s3", "s3a"):
        options["config_kwargs"] = {
            "max_pool_connections": _CONNECTIONS,
            **_configured(kind, "config_kwargs"),
            "retries": {"total_max_attempts": 1},
            "connect_timeout": stall_s,
            "read_timeout": stall_s,
        }
        fs = kind(**options)
        fs.retries = 1
        return S3(fs, stall_s)
    if scheme in ("http", "https"):
        aiohttp = need("aiohttp", "remote")
        options["client_kwargs"] = {
            **_configured(kind, "client_kwargs"),
            "timeout": aiohttp.ClientTimeout(total=None, sock_connect=stall_s, sock_read=stall_s),
            "auto_decompress": False,
            "read_bufsize": _PIECE_NBYTES,
        }
        return Http(kind(**options), stall_s)
    return Wire(kind(**options), stall_s)


def _configured(kind: Any, option: str) -> dict[str, Any]:
    """Return what the user's configuration of fsspec says for an option that we set too."""
    known = need("fsspec", "remote").config.conf
    protocols = (kind.protocol,) if isinstance(kind.protocol, str) else kind.protocol
    return {name: value for one in protocols for name, value in known.get(one, {}).get(option, {}).items()}


def _version(answer: Any) -> str:
    return str(answer.headers.get("ETag") or answer.headers.get("Last-Modified") or "")


def _check_range(url: str, said: str, start: int, stamp: Stamp) -> None:
    """Raise if an answer's Content-Range, "bytes 0-7/100", is not of the file that was opened, or of another place."""
    place, _, total = said.rpartition("/")
    if not total.isdecimal() or not place.startswith(f"bytes {start}-"):
        raise TransientError(f"the server answered a range from {start} on with {said or 'something else'!r}")
    if int(total) != stamp.nbytes:
        raise changed(url)
