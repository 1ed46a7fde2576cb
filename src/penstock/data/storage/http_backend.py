"""Files of an HTTP server, through the session of fsspec's HTTP filesystem."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from penstock.core.errors import SourceError
from penstock.core.urls import redact_url
from penstock.data.optional import need
from penstock.data.storage.backend import Backend, FileVersion
from penstock.data.storage.redirects import origin_of_stranger
from penstock.data.storage.remote_errors import file_changed, http_error
from penstock.data.storage.retries import TransientError

_USUAL_ERRORS = (OSError, ValueError, RuntimeError, LookupError, TypeError)


class Http(Backend):
    """An HTTP server."""

    async def file_version(self, url: str) -> FileVersion:
        """Return a file's size and ETag, or time. Gets its first byte: a signed URL does not permit HEAD."""
        async with self._get(url, 0, 1) as response:
            version = await self._file_version(url, response)
            if version.has_ranges:
                # aiohttp closes the connection of a response that was not read
                async for _ in self._parts(response, 1):
                    pass
            return version

    async def read_start(self, url: str, nbytes: int) -> tuple[FileVersion, bytes]:
        """Return a file's size and ETag, or time, and its first bytes; a server without ranges sends all or none."""
        async with self._read_slots, self._get(url, 0, nbytes) as response:
            if response.status == 416:  # an empty file has no ranges
                version = await self.file_version(url)
                if version.nbytes:
                    raise TransientError("the server answered that the file has no first bytes")
                return version, b""
            version = await self._file_version(url, response)
            if response.status == 206:
                _check_range(url, response.headers["Content-Range"], 0, version)
            elif version.has_ranges or version.nbytes > nbytes:
                return version, b""
            return version, b"".join([part async for part in self._parts(response, min(nbytes, version.nbytes))])

    async def read(self, url: str, start: int, end: int, expected: FileVersion) -> AsyncIterator[bytes]:
        """Yield bytes `start` to `end` in parts; a server without ranges sends all bytes before them, too."""
        async with self._read_slots, self._get(url, start, end if expected.has_ranges else None) as response:
            if response.status == 416 or await self._version(url, response) != expected.version:
                raise file_changed(url)
            to_skip = 0
            if response.status == 206:
                _check_range(url, response.headers.get("Content-Range", ""), start, expected)
            elif response.status == 200 and not expected.has_ranges:
                to_skip = start
            else:
                raise TransientError(f"the server answered a range with HTTP {response.status}")
            async for data in self._parts(response, to_skip + end - start):
                yield data[to_skip:]
                to_skip = max(to_skip - len(data), 0)

    async def _parts(self, response: Any, nbytes: int) -> AsyncIterator[bytes]:
        """Yield what a response sends, to its end or to what it announced: a server may send on without an end."""
        while data := await self._with_timeout(response.content.readany()):
            yield data[:nbytes]
            nbytes -= len(data)
            if nbytes < 0:
                return

    async def _file_version(self, url: str, response: Any) -> FileVersion:
        """Return what a response to a request for the first bytes of a file says of the whole file."""
        total = response.headers.get("Content-Range", "").rpartition("/")[2]
        if response.status in (206, 416) and total.isdecimal():
            return FileVersion(int(total), await self._version(url, response))
        length = response.headers.get("Content-Length", "")
        if response.status == 200 and length.isdecimal():
            return FileVersion(int(length), await self._version(url, response), has_ranges=False)
        raise SourceError(f"{redact_url(url)}: the server does not report the size of the file; copy it to a disk")

    async def _version(self, url: str, response: Any) -> str:
        told = str(response.headers.get("ETag") or response.headers.get("Last-Modified") or "")
        return told and told + await self._mark(url)

    async def _mark(self, url: str) -> str:
        return ""

    def _get(self, url: str, start: int, end: int | None) -> AbstractAsyncContextManager[Any]:
        return self._get_url(url, url, {}, start, end)

    @asynccontextmanager
    async def _get_url(
        self, url: str, served: str, headers: dict[str, str], start: int, end: int | None
    ) -> AsyncIterator[Any]:
        options = self._fs.kwargs  # from the user's configuration of fsspec: headers with a token, say
        headers = {**options.get("headers", {}), **headers, "Accept-Encoding": "identity"}
        if end is not None:
            headers["Range"] = f"bytes={start}-{end - 1}"
        with self._translate_errors(url):
            session = await self._fs.set_session()
            request = session.get(self._fs.encode_url(served), **{**options, "headers": headers})
            async with await self._with_timeout(request) as response:
                check_status(url, response, _about_stranger(served, response))
                yield response

    def _foreign_errors(self) -> tuple[type[Exception], ...]:
        return (*_USUAL_ERRORS, need("aiohttp", "remote").ClientError)


def _about_stranger(url: str, response: Any) -> str:
    """Return what to say where a server refuses somebody who has come there by a redirect."""
    stranger = origin_of_stranger(url, response) if response.status in (401, 403) else ""
    return f"of {stranger}, to which a redirect led: it gets no credentials" if stranger else ""


def check_status(url: str, response: Any, code: str = "") -> None:
    """Raise the error for a response that is one."""
    if response.status >= 300 and response.status != 416:
        wait = response.headers.get("Retry-After", "")
        raise http_error(url, response.status, code, wait_s=float(wait) if wait.isdecimal() else 0.0)


def _check_range(url: str, content_range: str, start: int, expected: FileVersion) -> None:
    """Raise if a Content-Range, as in "bytes 0-7/100", is for another place or another version of the file."""
    place, _, total = content_range.rpartition("/")
    if not total.isdecimal() or not place.startswith(f"bytes {start}-"):
        raise TransientError(
            f"the server answered a request for byte {start} with the range {content_range or 'none'!r}"
        )
    if int(total) != expected.nbytes:
        raise file_changed(url)
