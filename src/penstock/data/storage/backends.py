"""Clients of remote storage: a file's size and version, ranges of its bytes, listings.

    Http       the session of fsspec's HTTP filesystem
    S3         the same, with requests that the client of s3fs signs: its own calls take four times the CPU time. Its
               retries and those of botocore are off: they would multiply with ours
    Hub        the same for hf://, with the listings of huggingface_hub's filesystem
    Azure      adlfs, as any other, and closed in its own loop
    Backend    any other filesystem of fsspec: `cat_file`, with the file's version compared after every range; object
               stores, which answer a request from one version of the object, without that for an object read whole

All methods run in the loop of an `EventLoopThread`. Errors of other libraries are translated here: to `TransientError`
if a retry may succeed, to `SourceError` otherwise.
"""

from __future__ import annotations

import asyncio
import os
import re
import urllib.parse
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar
from xml.etree import ElementTree

from penstock.core.errors import ExtraError, SourceError
from penstock.data.optional import need
from penstock.data.storage.event_loop import EventLoopThread
from penstock.data.storage.remote_errors import (
    credentials_error,
    file_changed,
    http_error,
    redact_url,
    translate_error,
)
from penstock.data.storage.retries import TransientError
from penstock.data.storage.url_signer import PLAIN_KEY, PROBE, UrlSigner

_Result = TypeVar("_Result")

_READ_NBYTES = 1 << 20
_MAX_ERROR_NBYTES = 4096
_MAX_READS = 64
"""Ranges that are read at the same time. The others wait, and that wait is no stall."""
_CONNECTIONS = 2 * _MAX_READS
_CALL_TIMEOUT_S = 600.0
"""For calls that show no progress before their end: a listing, a range of a plain `Backend`."""
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), ("s3fs", "s3")),
    **dict.fromkeys(("gs", "gcs"), ("gcsfs", "gs")),
    **dict.fromkeys(("az", "abfs", "abfss"), ("adlfs", "az")),
    **dict.fromkeys(("http", "https"), ("aiohttp", "remote")),
    "hf": ("huggingface_hub", "hf"),
}
"""The package that a scheme needs, and the extra that brings it."""
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


_USUAL_ERRORS = (OSError, ValueError, RuntimeError, LookupError, TypeError)
_OBJECT_STORES = {"gs", "gcs", "abfs", "memory"}
"""Protocols of fsspec where `cat_file` is one request, whose answer never mixes two versions of an object."""


@dataclass(frozen=True, slots=True)
class FileVersion:
    """A file's size and version. Two that are equal stand for the same bytes."""

    nbytes: int
    version: str
    """An ETag, or the time of the last change; empty where the storage reports neither."""
    has_ranges: bool = True
    """Whether the server answers requests for a part of it."""


ListedFile = tuple[str, int, str]
"""The URL of a file, and its size and version, which is empty where a listing does not say it as a request does."""


class Backend:
    """Any filesystem of fsspec, through its common methods.

    Args:
        fs: the filesystem.
        stall_s: silence of a server that counts as a failure.
    """

    def __init__(self, fs: Any, stall_s: float) -> None:
        self._fs = fs
        self._read_slots = asyncio.Semaphore(_MAX_READS)
        self._response_timeout_s = 2 * stall_s
        # The libraries' own timeouts of `stall_s` have holes: aiohttp waits without limit after "HTTP 100 Continue".

        # Filesystems that are not asynchronous are not thread-safe either: memory:// files share one position.
        self._thread = None if fs.async_impl else ThreadPoolExecutor(1, "penstock remote")

    async def file_version(self, url: str) -> FileVersion:
        """Return a file's size and version.

        Raises:
            SourceError: the file does not exist, or may not be read.
            TransientError: a retry may succeed.
        """
        info = await self._call(url, "info", self._path(url))
        if info.get("type") == "directory" or info.get("size") is None:
            raise SourceError(f"{redact_url(url)} is no file with a known size")
        version = " ".join(str(info[name]) for name in _VERSION_KEYS if info.get(name))
        return FileVersion(int(info["size"]), version)

    async def read(self, url: str, start: int, end: int, expected: FileVersion) -> AsyncIterator[bytes]:
        """Yield bytes `start` to `end` in parts; fewer, if the response was cut.

        Raises:
            SourceError: the file's version is not `expected`, or it cannot be read.
            TransientError: a retry may succeed.
        """
        async with self._read_slots:
            data = await self._call(url, "cat_file", self._path(url), start, end)
        if await self.file_version(url) != expected:
            raise file_changed(url)
        yield data

    async def read_start(self, url: str, nbytes: int) -> tuple[FileVersion, bytes]:
        """Return a file's size and version, and its first `nbytes` bytes; by one request, if it has no more than those.

        None of the bytes are returned where the storage does not say of which version they are and there are more.

        Raises:
            SourceError: the file does not exist, or may not be read.
            TransientError: a retry may succeed.
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
        return [(found, 0, "") for found in self._urls(url, await self._call(url, "find", self._path(url)))]

    async def glob(self, url: str) -> list[str]:
        """Return the URLs that match a pattern, sorted."""
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

    def _session(self) -> Any:
        """Return the object that owns the connections, if one exists yet."""
        return getattr(self._fs, "_session", None)

    def _path(self, url: str) -> str:
        return str(self._fs._strip_protocol(url))

    def _urls(self, url: str, names: Iterable[str]) -> list[str]:
        scheme = url.partition("://")[0]
        found = (name if "://" in name else f"{scheme}://{name.removeprefix('/')}" for name in names)
        return sorted(name for name in found if not name.endswith("/"))

    async def _call(self, url: str, name: str, *arguments: Any, **options: Any) -> Any:
        with self._translate_errors(url):
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                return await self._invoke(name, *arguments, **options)

    async def _invoke(self, name: str, *arguments: Any, **options: Any) -> Any:
        if self._thread is None:
            return await getattr(self._fs, f"_{name}")(*arguments, **options)
        call = partial(getattr(self._fs, name), *arguments, **options)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

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
            raise TransientError("the server did not response in time") from error
        except self._foreign_errors() as error:
            raise translate_error(url, error) from error

    def _foreign_errors(self) -> tuple[type[Exception], ...]:
        return (Exception,)  # some have errors of their own, like gcsfs, which derive from nothing else


class Http(Backend):
    """An HTTP server."""

    async def file_version(self, url: str) -> FileVersion:
        """Return a file's size and ETag, or time. Gets its first byte: a signed URL does not permit HEAD."""
        async with self._get(url, 0, 1) as response:
            version = _file_version(url, response)
            if version.has_ranges:
                # aiohttp closes the connection of a response that was not read
                await self._with_timeout(response.read())
            return version

    async def read_start(self, url: str, nbytes: int) -> tuple[FileVersion, bytes]:
        """Return a file's size and ETag, or time, and its first bytes; a server without ranges sends all or none."""
        async with self._read_slots, self._get(url, 0, nbytes) as response:
            if response.status == 416:  # an empty file has no ranges
                version = await self.file_version(url)
                if version.nbytes:
                    raise TransientError("the server answered that the file has no first bytes")
                return version, b""
            version = _file_version(url, response)
            if response.status == 206:
                _check_range(url, response.headers["Content-Range"], 0, version)
            elif version.has_ranges or version.nbytes > nbytes:
                return version, b""
            data = bytearray()
            while part := await self._with_timeout(response.content.readany()):
                data += part
            return version, bytes(data)

    async def read(self, url: str, start: int, end: int, expected: FileVersion) -> AsyncIterator[bytes]:
        """Yield bytes `start` to `end` in parts; a server without ranges sends all bytes before them, too."""
        async with self._read_slots, self._get(url, start, end if expected.has_ranges else None) as response:
            if response.status == 416 or _version(response) != expected.version:
                raise file_changed(url)
            to_skip = 0
            if response.status == 206:
                _check_range(url, response.headers.get("Content-Range", ""), start, expected)
            elif response.status == 200 and not expected.has_ranges:
                to_skip = start
            else:
                raise TransientError(f"the server answered a range with HTTP {response.status}")
            while data := await self._with_timeout(response.content.readany()):
                yield data[to_skip:]
                to_skip = max(to_skip - len(data), 0)

    @asynccontextmanager
    async def _get(self, url: str, start: int, end: int | None) -> AsyncIterator[Any]:
        async with self._get_url(url, url, {}, start, end) as response:
            yield response

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
                _check_status(url, response)
                yield response

    def _foreign_errors(self) -> tuple[type[Exception], ...]:
        return (*_USUAL_ERRORS, need("aiohttp", "remote").ClientError)


class S3(Http):
    """S3, and servers with its API."""

    def __init__(self, fs: Any, stall_s: float) -> None:
        super().__init__(fs, stall_s)
        self._clients: set[int] = set()
        self._listings: dict[str, _Pages] = {}
        self._signers: dict[tuple[str, str], UrlSigner | None] = {}
        """By client, and bucket with the user's arguments; None where the client has to sign each URL itself."""

    async def file_version(self, url: str) -> FileVersion:
        """Return a file's size and ETag."""
        bucket, key, version = self._fs.split_path(url)
        which = {"VersionId": version} if version else {}
        with self._translate_errors(url):
            response = await self._with_timeout(self._fs._call_s3("head_object", Bucket=bucket, Key=key, **which))
        if response.get("ContentLength") is None:
            raise TransientError("the server did not report the size of the file")
        changed = response["ResponseMetadata"]["HTTPHeaders"].get("last-modified")
        return FileVersion(int(response["ContentLength"]), str(response.get("ETag") or changed or ""))

    async def find(self, url: str) -> list[ListedFile]:
        """Return all files below a folder, sorted, with their sizes and ETags.

        As s3fs does, with a part of its time and memory. A retry goes on with the page that has failed.
        """
        bucket, key, _ = self._fs.split_path(self._path(url))
        pages = self._listings.setdefault(url, _Pages())
        scheme, prefix = url.partition("://")[0], f"{key}/" if key else ""
        while pages.has_more:
            token = {"ContinuationToken": pages.token} if pages.token else {}
            with self._translate_errors(url):
                client = await self._client(bucket)
                arguments = {"Bucket": bucket, "Prefix": prefix, "EncodingType": "url", **token, **self._fs.req_kw}
                arguments = self._fs._get_s3_method_kwargs(client.list_objects_v2, **arguments)
                signed = await client.generate_presigned_url("list_objects_v2", Params=arguments)
                async with self._send(url, client, signed, _headers(client, arguments, "ListObjectsV2")) as response:
                    pages.add(await self._with_timeout(response.content.read()))
        del self._listings[url]
        found = [(f"{scheme}://{bucket}/{name}", nbytes, version) for name, nbytes, version in sorted(pages.found)]
        return found or [(one, 0, "") for one in self._urls(url, await self._call(url, "find", self._path(url)))]

    def _session(self) -> Any:
        return self._fs._s3

    @asynccontextmanager
    async def _get(self, url: str, start: int, end: int | None) -> AsyncIterator[Any]:
        with self._translate_errors(url):
            client, signed, headers = await self._sign(url, f"bytes={start}-{'' if end is None else end - 1}")
        async with self._send(url, client, signed, headers) as response:
            yield response

    @asynccontextmanager
    async def _send(self, url: str, client: Any, signed: str, headers: dict[str, str]) -> AsyncIterator[Any]:
        awsrequest = need("botocore.awsrequest", "s3")
        with self._translate_errors(url):
            request = awsrequest.AWSPreparedRequest("GET", signed, headers, None, stream_output=True)
            sent = await self._with_timeout(client._endpoint.http_session.send(request))
            async with sent.raw as response:
                if response.status in (301, 400):  # of another region? botocore asks there from then on
                    self._signers.clear()
                    await self.file_version(url)
                    raise TransientError(f"the server answered HTTP {response.status}")
                answer = await response.content.read(_MAX_ERROR_NBYTES) if response.status >= 400 else b""
                code = re.search(rb"<Code>(\w+)</Code>", answer)
                _check_status(url, response, code[1].decode() if code else "")
                yield response

    async def _sign(self, url: str, byte_range: str) -> tuple[Any, str, dict[str, str]]:
        """Return the client that answers for a bucket, and the URL and headers that request a range of an object."""
        bucket, key, version = self._fs.split_path(url)
        client = await self._client(bucket)
        arguments = {"Bucket": bucket, "Key": key, "Range": byte_range, **({"VersionId": version} if version else {})}
        arguments = self._fs._get_s3_method_kwargs(client.get_object, **arguments)
        signer = await self._signer(client, arguments) if not version and PLAIN_KEY.fullmatch(key) else None
        if signer is not None:
            headers = _headers(client, arguments)
            credentials = await client._request_signer._credentials.get_frozen_credentials()
            return client, signer.sign(key, headers, credentials), headers
        signed = await client.generate_presigned_url("get_object", Params=arguments)  # which adds to the arguments
        return client, signed, _headers(client, arguments)

    async def _client(self, bucket: str) -> Any:
        await self._fs.set_session()
        client = await self._fs.get_s3(bucket)
        if id(client) not in self._clients:
            self._clients.add(id(client))
            for name in ("GetObject", "ListObjectsV2"):
                client.meta.events.register_first(f"choose-signer.s3.{name}", _keep_signature_version)
        return client

    async def _signer(self, client: Any, arguments: dict[str, str]) -> UrlSigner | None:
        """Return what signs URLs as the client does for these arguments, whatever the key; None if only it can."""
        like = str(id(client)), repr([item for item in arguments.items() if item[0] not in ("Key", "Range")])
        if like not in self._signers:
            headers, credentials = _headers(client, arguments), client._request_signer._credentials
            frozen = None if credentials is None else await credentials.get_frozen_credentials()
            probe = await client.generate_presigned_url("get_object", Params={**arguments, "Key": PROBE})
            self._signers[like] = None if frozen is None else UrlSigner.like(probe, headers, frozen)
        return self._signers[like]

    def _foreign_errors(self) -> tuple[type[Exception], ...]:
        botocore = need("botocore.exceptions", "s3")
        return (*super()._foreign_errors(), botocore.BotoCoreError, botocore.ClientError)


class _Pages:
    """The listing of a bucket, as far as its pages have come."""

    def __init__(self) -> None:
        self.found: list[ListedFile] = []
        self.token = ""
        self.has_more = True

    def add(self, page: bytes) -> None:
        """Add the files of a page."""
        try:
            root = ElementTree.fromstring(page)
        except ElementTree.ParseError as error:
            raise TransientError("the server sent half a listing") from error
        space = root.tag.partition("ListBucketResult")[0]
        is_encoded = root.findtext(f"{space}EncodingType") == "url"
        for one in root.iterfind(f"{space}Contents"):
            key, nbytes, version = (one.findtext(f"{space}{name}") or "" for name in ("Key", "Size", "ETag"))
            if not key.endswith("/"):
                self.found.append((urllib.parse.unquote_plus(key) if is_encoded else key, int(nbytes), version))
        self.token = root.findtext(f"{space}NextContinuationToken") or ""
        self.has_more = bool(self.token)


def _headers(client: Any, arguments: dict[str, str], operation: str = "GetObject") -> dict[str, str]:
    """Return the headers that a request for an object has by its arguments."""
    members = client.meta.service_model.operation_model(operation).input_shape.members
    places = {name: members[name].serialization for name in arguments}
    return {one["name"]: arguments[name] for name, one in places.items() if one.get("location") == "header"}


def _keep_signature_version(signature_version: Any, **_: Any) -> Any:
    """Sign a URL by version 4, as all requests are: botocore takes version 2 for some, which new buckets refuse.

    By S3's kind of it, where the signature says nothing of the body; with any other, S3 answers 403.
    """
    if signature_version in ("v4", "v4-query"):
        return "s3v4-query"
    return signature_version if "v4" in str(signature_version) else None


class Azure(Backend):
    """Azure's Blob Storage, through adlfs."""

    def __init__(self, fs: Any, stall_s: float) -> None:
        super().__init__(fs, stall_s)
        # adlfs closes its client in finalizers too, in a loop that there is not: tracebacks when the process ends.
        for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
            if (finalizer.peek() or (None,))[0] is fs:
                finalizer.detach()

    def _session(self) -> Any:
        return self._fs.service_client


class Hub(Http):
    """The Hugging Face Hub: its own filesystem lists, and files are read side by side from the URLs that it serves.

    That filesystem reads one file at a time, knows a file's version from a listing that it keeps, and lists the whole
    folder of a file in each process that opens one.
    """

    def __init__(self, fs: Any, stall_s: float, http_fs: Any) -> None:
        super().__init__(http_fs, stall_s)
        self._hub = fs
        self._thread = ThreadPoolExecutor(1, "penstock remote")

    async def exists(self, url: str) -> bool:
        """Return whether there is a file or a folder."""
        return bool(await self._call(url, "exists", url))

    @asynccontextmanager
    async def _get(self, url: str, start: int, end: int | None) -> AsyncIterator[Any]:
        with self._translate_errors(url):
            place = await self._run(self._hub.resolve_path, url)  # asks the Hub for each repository once
        path = urllib.parse.quote(place.path)
        if hasattr(place, "bucket_id"):
            served = f"{self._hub.endpoint}/buckets/{place.bucket_id}/resolve/{path}"
        else:
            kind = "" if place.repo_type == "model" else f"{place.repo_type}s/"
            revision = urllib.parse.quote(place.revision, safe="")
            served = f"{self._hub.endpoint}/{kind}{place.repo_id}/resolve/{revision}/{path}"
        headers = need("huggingface_hub", "hf").utils.build_hf_headers(token=self._hub.token)
        async with self._get_url(url, served, headers, start, end) as response:
            yield response

    def _path(self, url: str) -> str:
        return url

    async def _invoke(self, name: str, *arguments: Any, **options: Any) -> Any:
        self._hub.invalidate_cache()
        return await self._run(getattr(self._hub, name), *arguments)

    async def _run(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _foreign_errors(self) -> tuple[type[Exception], ...]:
        return (Exception,)


def get_backend(loop_thread: EventLoopThread, url: str, stall_s: float) -> Backend:
    """Return the backend for a URL, created once for each thread and configuration. Called in the thread's loop only.

    Raises:
        SourceError: fsspec has no such scheme.
        ExtraError: the package for the scheme is not installed.
    """
    fsspec = need("fsspec", "remote")
    scheme = url.partition("://")[0]
    need(*_PACKAGES.get(scheme, ("fsspec", "remote")))
    try:
        fs_class = fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise ExtraError(f"{redact_url(url)}: {error}") from error
    except ValueError as error:
        raise SourceError(f"{redact_url(url)}: fsspec knows no {scheme}://") from error
    options = fs_class._get_kwargs_from_urls(url)
    key = (fs_class, repr(sorted(options.items())), stall_s)
    backend: Backend | None = loop_thread.backends.get(key)
    if backend is None:
        if fs_class.async_impl:
            options["asynchronous"] = True
        try:
            backend = _create_backend(fs_class, scheme, options, stall_s)
        except ValueError as error:  # adlfs without an account
            raise credentials_error(url, str(error)) from error
        loop_thread.backends[key] = backend
    return backend


def _create_backend(fs_class: Any, scheme: str, options: dict[str, Any], stall_s: float) -> Backend:
    options |= {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme in ("s3", "s3a"):
        options["config_kwargs"] = {
            "max_pool_connections": _CONNECTIONS,
            **_user_config(fs_class, "config_kwargs"),
            "retries": {"total_max_attempts": 1},
            "connect_timeout": stall_s,
            "read_timeout": stall_s,
        }
        fs = fs_class(**options)
        fs.retries = 1
        with suppress(need("botocore.exceptions", "s3").BotoCoreError):  # raised again by the first request
            fs.session = fs.session or _aws_session(**fs.kwargs)
        return S3(fs, stall_s)
    if scheme in ("http", "https"):
        return Http(_http_fs(fs_class, options, stall_s), stall_s)
    if scheme == "hf":
        http_class = need("fsspec", "remote").get_filesystem_class("https")
        http_options = {"asynchronous": True, "skip_instance_cache": True, "use_listings_cache": False}
        return Hub(fs_class(**options), stall_s, _http_fs(http_class, http_options, stall_s))
    if scheme in ("az", "abfs", "abfss"):
        options["loop"] = asyncio.get_running_loop()  # without one it starts fsspec's thread
        return Azure(fs_class(**options), stall_s)
    return Backend(fs_class(**options), stall_s)


def _aws_session(**options: Any) -> Any:
    """Return a session for s3fs that has read what botocore knows of S3, which takes longer than a hundred requests."""
    session = need("aiobotocore.session", "s3").AioSession(**options)
    session.register_component("data_loader", _aws_data(session.get_config_variable("data_path")))
    return session


@cache
def _aws_data(path: str | None) -> Any:
    """Return what reads botocore's files once: in the training process, for its forked workers too."""
    return need("botocore.loaders", "s3").create_loader(path)


def _http_fs(fs_class: Any, options: dict[str, Any], stall_s: float) -> Any:
    aiohttp = need("aiohttp", "remote")
    options["client_kwargs"] = {
        **_user_config(fs_class, "client_kwargs"),
        "timeout": aiohttp.ClientTimeout(total=None, sock_connect=stall_s, sock_read=stall_s),
        "auto_decompress": False,
        "read_bufsize": _READ_NBYTES,
    }
    return fs_class(**options)


def _user_config(fs_class: Any, option: str) -> dict[str, Any]:
    """Return the user's values, from fsspec's configuration, for an option that is set here too."""
    known = need("fsspec", "remote").config.conf
    protocols = (fs_class.protocol,) if isinstance(fs_class.protocol, str) else fs_class.protocol
    return {name: value for one in protocols for name, value in known.get(one, {}).get(option, {}).items()}


def _file_version(url: str, response: Any) -> FileVersion:
    """Return what a response to a request for the first bytes of a file says of the whole file."""
    total = response.headers.get("Content-Range", "").rpartition("/")[2]
    if response.status in (206, 416) and total.isdecimal():
        return FileVersion(int(total), _version(response))
    length = response.headers.get("Content-Length", "")
    if response.status == 200 and length.isdecimal():
        return FileVersion(int(length), _version(response), has_ranges=False)
    raise SourceError(f"{redact_url(url)}: the server does not report the size of the file; copy it to a disk")


def _check_status(url: str, response: Any, code: str = "") -> None:
    """Raise the error for a response that is one."""
    if response.status >= 400 and response.status != 416:
        wait = response.headers.get("Retry-After", "")
        raise http_error(url, response.status, code, wait_s=float(wait) if wait.isdecimal() else 0.0)


def _version(response: Any) -> str:
    return str(response.headers.get("ETag") or response.headers.get("Last-Modified") or "")


def _check_range(url: str, content_range: str, start: int, expected: FileVersion) -> None:
    """Raise if a Content-Range, as in "bytes 0-7/100", is for another place or another version of the file."""
    place, _, total = content_range.rpartition("/")
    if not total.isdecimal() or not place.startswith(f"bytes {start}-"):
        raise TransientError(
            f"the server answered a request for byte {start} with the range {content_range or 'none'!r}"
        )
    if int(total) != expected.nbytes:
        raise file_changed(url)
